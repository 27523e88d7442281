"""The environments of the documentation work as they are printed: users' files in a directory, and commands on them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml
from typer.testing import CliRunner

from agent_rl.cli import app
from envs.new_project import write_template

PAGE = Path(__file__).parents[2] / "docs/reference/environments.md"

Command = Callable[..., str]


def printed(number: int) -> str:
    """The page's ``number``-th Python block."""
    return PAGE.read_text().split("```python\n")[number + 1].split("```")[0]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Runs ``agent-rl`` in a directory of its own; returns the output of a command that succeeds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)

    def run(*arguments: str) -> str:
        ran = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
        assert ran.exit_code == 0, ran.output + repr(ran.exception)
        return ran.output

    yield run
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def write_config(environment: str, **options: object) -> None:
    Path("config.yaml").write_text(
        yaml.safe_dump({"name": "mine", "model": "tiny-moe", "env": {"name": environment, "options": options}})
    )


def check(command: Command, environment: str, **options: object) -> None:
    """Every check of the environment passes, its solutions are resolved, and doing nothing is not."""
    write_config(environment, **options)
    assert "FAILED" not in command("envs", "check", environment, *(f"{key}={value}" for key, value in options.items()))
    for policy, score in (("gold", "100.0%"), ("noop", " 0.0%")):
        assert score in command("eval", "config.yaml", "--policy", policy, "--tasks", "2")


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


@pytest.mark.parametrize(
    ("number", "name"),
    [
        pytest.param(0, "Sums", id="class of tools"),
        pytest.param(1, "Sums", id="protocol", marks=pytest.mark.bubblewrap),
        pytest.param(2, "Sentences", id="dialogue"),
        pytest.param(3, "Shop", id="tools and a user"),
    ],
)
def test_printed_environment_passes_checks_and_is_solved(command: Command, number: int, name: str) -> None:
    Path(f"printed_{number}.py").write_text(printed(number))
    check(command, f"printed_{number}:{name}", **({} if name == "Shop" else {"count": 3}))


TUTORIAL = PAGE.parents[1] / "tutorials/users-and-judges.md"


def judging(content: str) -> type[BaseHTTPRequestHandler]:
    """A chat endpoint whose every answer is ``content``."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            body = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

    return Handler


def test_tutorial_of_users_and_judges(command: Command) -> None:
    text = TUTORIAL.read_text()
    Path("desk.py").write_text(text.split("```python\n")[1].split("```")[0])
    assert "FAILED" not in command("envs", "check", "desk:Desk")
    config = text.split("```yaml\n")[1].split("```")[0]
    with ThreadingHTTPServer(("127.0.0.1", 0), judging('{"polite": 0.5}')) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        Path("desk.yaml").write_text(config.replace("127.0.0.1:8000", address))
        said = command("eval", "desk.yaml", "--policy", "gold")
        server.shutdown()
    assert "100.0%" in said
    assert "reward/polite            0.5" in said
    assert len(list(Path("judged").iterdir())) == 3  # the first task was tried before, untouched
    without_cache = Path("desk.yaml").read_text().replace("cache: judged", "retries: 0")
    Path("desk.yaml").write_text(without_cache.replace(address, "127.0.0.1:1"))
    ran = CliRunner().invoke(app, ["eval", "desk.yaml", "--policy", "gold", "--out", "again"], env={"COLUMNS": "200"})
    assert ran.exit_code
    assert "none of 2 tasks could be graded" in ran.output + str(ran.exception)
    assert "ModelError" in ran.output + str(ran.exception)


EVERYTHING = '''
from pathlib import Path
from pydantic import BaseModel
from agent_rl.api import Grade, Sandbox, Task, ToolCall, ToolError, ToolResult

class Everything:
    """Copy the secret of secret.txt into the answer."""

    class Options(BaseModel):
        words: Path
        shout: bool = False

    def __init__(self, options: Options, sandbox: Sandbox) -> None:
        self.options, self.sandbox, self.said = options, sandbox, ""

    @classmethod
    def tasks(cls, split: str, options: Options) -> list[dict]:
        return [{"id": f"{split}-{word}", "word": word} for word in options.words.read_text().split()]

    async def setup(self, task: Task) -> str:
        self.word = task.record["word"].upper() if self.options.shout else task.record["word"]
        await self.sandbox.exec(f"echo {self.word} > secret.txt", timeout=10)
        return "What is in secret.txt?"

    async def read(self) -> str:
        """Read secret.txt."""
        return (await self.sandbox.exec("cat secret.txt", timeout=10)).text

    async def answer(self, text: str) -> ToolResult:
        """Give the answer.

        Args:
            text: The secret.
        """
        if not text:
            raise ToolError("the answer is empty")
        self.said = text
        return ToolResult("", submitted=True)

    async def grade(self) -> Grade:
        right = self.said == self.word
        return Grade(float(right), right, log=f"said {self.said!r}")

    async def close(self) -> None:
        with Path("closed.txt").open("a") as file:
            file.write("closed\\n")

    @classmethod
    def solution(cls, task: Task) -> list[ToolCall]:
        return [ToolCall("read", {}), ToolCall("answer", {"text": task.record["word"].upper()})]
'''


@pytest.mark.bubblewrap
def test_class_of_tools_with_every_extension_of_the_tutorial(command: Command, tmp_path: Path) -> None:
    """A sandbox, options, a file beside the config, close, a Grade, and an installed package's entry point."""
    package = tmp_path / "site/everything-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: everything\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[agent_rl.envs]\nall-of-it = everything:Everything\n")
    (tmp_path / "site/everything.py").write_text(EVERYTHING)
    (tmp_path / "words.txt").write_text("cat dog owl")
    sys.path.insert(0, str(tmp_path / "site"))
    check(command, "all-of-it", words="words.txt", shout=True)
    assert "all-of-it" in command("envs", "list")
    assert Path("closed.txt").read_text().count("closed") > 4


DOORS = """
class Doors:
    opened = 0

    def schemas(self) -> list[dict]:
        return [{"type": "function", "function": {"name": "open", "description": "Open one door.", "parameters": {}}}]

    async def call(self, call: ToolCall) -> ToolResult:
        if call.name == "finish":
            return ToolResult("", submitted=True)
        if call.name != "open" or call.arguments:
            return ToolResult("call open without arguments", failed=True)
        self.opened += 1
        return ToolResult(f"{self.opened} open")

class DoorsEpisode:
    messages = [{"role": "user", "content": "Open two doors."}]

    def __init__(self) -> None:
        self.tools = Doors()

    async def grade(self) -> Grade:
        return Grade(self.tools.opened / 2, self.tools.opened == 2)
"""


def test_tools_may_be_any_object_with_schemas_and_call(command: Command) -> None:
    source = printed(2).replace("import EnvContext", "import EnvContext, ToolCall") + DOORS
    for old, new in (
        ('SentenceEpisode(task.record["length"])', "DoorsEpisode()"),
        ('["word " * task.record["length"]]', '[ToolCall("open", {})] * 2'),
    ):
        assert source.count(old) == 1
        source = source.replace(old, new)
    Path("doors.py").write_text(source)
    check(command, "doors:Sentences", count=2)


def test_audit_of_a_users_environment_is_in_the_doctors_report(command: Command) -> None:
    audit = """
    async def audit(self, task: Task) -> list[Finding]:
        return [Finding("cheap trick", task.id != "train-1", "an empty turn is not resolved")]
"""
    Path("audited.py").write_text(printed(2).replace("import EnvContext", "import EnvContext, Finding") + audit)
    write_config("audited:Sentences", count=2)
    ran = CliRunner().invoke(app, ["doctor", "config.yaml", "--tasks", "2"], env={"COLUMNS": "200"})
    assert "train-1" in ran.output, ran.output
    assert "cheap trick" in ran.output


WRONG = [
    (
        "start",
        "    @asynccontextmanager\n",
        "",
        "start returned a async_generator; decorate it with contextlib.asynccon",
    ),
    ("respond", "async def respond", "async def reply", "lacks tools or respond"),
    ("grade", "async def grade", "async def score", "lacks grade"),
    ("sync grade", "async def grade", "def grade", "grade returned a Grade at once: define it with async def"),
    ("float", "return Grade(reward=1 / (1 + missing), resolved=missing == 0)", "return 1.0", "grade returned a float"),
    ("text", 'return ToolResult(f"That has {self._words} words. Try again.")', 'return "no"', "respond returned a str"),
    ("sync prepare", "async def prepare", "def prepare", "prepare returned a NoneType at once: define it with async"),
    (
        "tasks",
        'Task(f"{split}-{i}", self.name, {"length": first + 2 * (i % 10)})',
        "{}",
        "returned a dict in its list; expect",
    ),
    (
        "no tasks",
        "for i in range(self._count)]",
        "for i in ()]",
        "returned no tasks; expected a list of at least one T",
    ),
    ("messages", '[{"role": "user", "content"', '[{"role": "user", "text"', "messages has"),
    ("exception", 'task.record["length"])', 'task.record["size"])', "KeyError: 'size' ("),
    ("name", '    name = "sentences"\n', "", "is not an environment, it lacks name"),
]


@pytest.mark.parametrize(("old", "new", "told"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_protocol_is_one_line_before_an_engine_starts(
    command: Command, monkeypatch: pytest.MonkeyPatch, old: str, new: str, told: str
) -> None:
    source = printed(2)
    assert source.count(old) == 1
    Path("wrong.py").write_text(source.replace(old, new))
    write_config("wrong:Sentences", count=2)
    monkeypatch.setattr("agent_rl.controller.rollout_runtime.open_engine", None)
    for arguments in (["envs", "check", "wrong:Sentences"], ["rollout", "config.yaml"], ["eval", "config.yaml"]):
        ran = CliRunner().invoke(app, arguments, env={"COLUMNS": "400"})
        said = ran.output + str(ran.exception)
        assert ran.exit_code, said
        assert told in said, said
