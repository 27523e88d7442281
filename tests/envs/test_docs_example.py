"""The environments in docs/reference/environments.md work as they are printed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from envs import EnvContext, Environment, load_environment
from envs.conformance import check_environment
from envs.new_project import write_template
from tools import ToolCall

PAGE = Path(__file__).parents[2] / "docs/reference/environments.md"


def printed(number: int, context: EnvContext, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """The class ``Sums`` of the page's ``number``-th Python block, loaded as a user would."""
    module = ModuleType(f"printed_environment_{number}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    block = PAGE.read_text().split("```python\n")[number + 1].split("```")[0]
    exec(compile(block, str(PAGE), "exec"), module.__dict__)
    return load_environment(f"{module.__name__}:Sums", context, {"count": 3})


def test_users_code_imports_from_one_place(tmp_path: Path) -> None:
    written = write_template("letters", tmp_path)
    pages = [PAGE, PAGE.with_name("tools.md")]
    sources = [*PAGE.parent.glob("examples/*.py"), written.environment, written.test]
    code = [block.split("```")[0] for page in pages for block in page.read_text().split("```python\n")[1:]]
    code += [path.read_text() for path in sources]
    found = {word for text in code for word in re.findall(r"^(?:from|import) ([\w.]+)", text, re.MULTILINE)}
    assert "agent_rl.api" in found
    assert not {name for name in found if name.split(".")[0] in {"envs", "tools", "sandbox", "r3"}}
    assert {name for name in found if name.startswith("agent_rl")} == {"agent_rl.api"}


async def test_the_printed_class_of_tools_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = printed(0, EnvContext(backend=None), monkeypatch)  # type: ignore[arg-type]
    assert [finding for finding in await check_environment(environment) if not finding.ok] == []


@pytest.mark.bubblewrap
async def test_the_printed_environment_runs(context: EnvContext, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = printed(1, context, monkeypatch)
    task = environment.tasks("heldout")[2]
    async with environment.start(task) as episode:
        assert "1000002 + 14" in episode.messages[1]["content"]
        assert (await episode.grade()).reward == 0.0
        answered = await episode.tools.call(ToolCall("execute_bash", {"cmd": "echo 1000016 > answer.txt"}))
        assert not answered.failed, answered.text
        assert (await episode.grade()).resolved
