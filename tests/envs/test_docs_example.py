"""The environment in docs/environments.md works as it is printed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from envs import EnvContext, load_environment
from tools import ToolCall

PAGE = Path(__file__).parents[2] / "docs/environments.md"


@pytest.mark.bubblewrap
async def test_the_printed_environment_runs(context: EnvContext, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("printed_environment")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(PAGE.read_text().split("```python\n")[1].split("```")[0], str(PAGE), "exec"), module.__dict__)
    environment = load_environment("printed_environment:Sums", context, {"count": 3})
    task = environment.tasks("heldout")[2]
    async with environment.start(task) as episode:
        assert "1000002 + 14" in episode.messages[1]["content"]
        assert (await episode.grade()).reward == 0.0
        answered = await episode.tools.call(ToolCall("execute_bash", {"cmd": "echo 1000016 > answer.txt"}))
        assert not answered.failed, answered.text
        assert (await episode.grade()).resolved
