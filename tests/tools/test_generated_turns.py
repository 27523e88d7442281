"""Generated model turns in every format and every scaffold: none raises, and the time is linear in the text.

The ordinary suite runs a few thousand turns, ``pytest -m exhaustive`` 100,000 and times each.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from sandbox import ExecResult, Sandbox, SandboxFileError, SandboxSpec, TreeFile
from tools import ParseFailure, ToolCall, ToolCallFormat, ToolResult, ToolSet, parse_turn, swe_tools, tool_format
from tools.mini_swe_agent import mini_swe_agent_tools
from tools.openhands import openhands_tools
from tools.r2egym import r2egym_tools

SECONDS_PER_100_KB = 0.05
LARGE = 100_000
CALL_SECONDS = 0.5
"""Most processor time of a call, whose arguments and files have about 100 kB."""
SCAFFOLDS: dict[str, tuple[Callable[[Any], ToolSet], str]] = {
    "own, hermes": (lambda sandbox: swe_tools(sandbox, timeout=2.0), "hermes"),
    "own, xml": (lambda sandbox: swe_tools(sandbox, timeout=2.0), "xml"),
    "own, concise": (lambda sandbox: swe_tools(sandbox, style="concise", timeout=2.0), "hermes"),
    "r2egym": (lambda sandbox: r2egym_tools(sandbox, timeout=2.0), "r2egym"),
    "openhands": (lambda sandbox: openhands_tools(sandbox, timeout=2.0), "openhands"),
    "mini-swe-agent": (lambda sandbox: mini_swe_agent_tools(sandbox, timeout=2.0), "mini-swe-agent"),
}
TAGS = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "<function=execute_bash>",
        "<function=file_editor>\n",
        "</function>",
    ),
    *("<parameter=", "<parameter=path>", "<parameter=a>", "</parameter>", "<\\/parameter>", "<think>", "</think>"),
    *("```mswea_bash_command", "```mswea_bash_command\n", "\n```", "```", '{"name": "f", "arguments": {', "[", "]"),
    *("{", "}", '"', ":", ",", "=", ">", "<", "-", "\\", "\n", " ", "\t", "\r", "\x85", "\u2028", "\0", "\ud800", "é"),
    *("NaN", "1e999", "null", "elif a:\n    pass\n", "ls", "x", "1", "(" * 150, "<|im_end|>"),
)
NAMES = ("execute_bash", "file_editor", "str_replace_editor", "search", "finish", "bash", "fly", "", "a" * 300)
ARGUMENTS = (
    *("command", "cmd", "path", "file_text", "old_str", "new_str", "insert_line", "view_range", "search_term"),
    *("result", "concise", "enable_linting", "python_only", "view", "h", "help", "x y", ""),
)
DEEP = ("-" * 6000, "if a:\n    pass\n" + "elif a:\n    pass\n" * 6000, "x = 1\n")
SOUND = {
    "command": ("view", "view", "create", "str_replace", "insert", "undo_edit"),
    "path": ("/testbed/a.py", "/testbed/a.py", "a.py", "/testbed", "/testbed/b.py"),
    "file_text": DEEP,
    "old_str": ("a", "a = 1", "\n"),
    "new_str": DEEP,
    "insert_line": ("0", "1", 1, 10**6),
    "view_range": ("[1, 2]", "[2, -1]", [1, 1], "[3, 1]"),
    "concise": ("True", "False", True),
    "search_term": ("a", "[", "a\nb"),
    "cmd": ("true", "echo a"),
}
VALUES: tuple[Any, ...] = (
    *("view", "create", "str_replace", "insert", "undo_edit", "submit", "/testbed", "a.py", "/testbed/a.py", "..", "/"),
    *("a\nb", "", " ", "0", "-1", "1" * 5000, "[1, 2]", "[1, -1]", "[" * 994, "[" * 400 + "]" * 400, "True", "null"),
    *("-" * 6000, "elif a:\n    pass\n" * 6000, "x" * 300, "x/" * 3000, "%", "%s", "\0", "\ud800", "\udcff", "é", "-x"),
    *(None, True, 0, -1, 1 << 80, 1.5, float("inf"), float("nan"), [], [1, 2], [None], [[[]]], {}, {"a": [1]}),
)
OUTPUTS = (
    *(b"", b"\n", b"file\n", b"folder\n", b"nothing\n", b"folder\n/testbed\n", b"file\n/testbed/a.py\n", b"\xff\xfe\0"),
    *(b"folder\n/testbed\n./a.py:3\n./b:c\n", b"nothing\n/x\n", b"a.py:1:x\n", b"elif" * 20_000, b"\r\n" * 500),
    *(b"bash: line 1: /x: Permission denied\n", b"COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\nx"),
)
FILES = (
    *(b"", b"\n", b"a = 1\n", b"\xff\xfe", b"a\r\nb\r\n", b"\xef\xbb\xbfa = 1", b"\0", b"x = " + b"-" * 6000 + b"1\n"),
    *(b"if a:\n    pass\n" + b"elif a:\n    pass\n" * 6000, b"def f():\n" + b"    a\n" * 200, b"(" * 300, b"'" * 999),
)


class AnySandbox:
    """A sandbox whose commands print anything and whose files hold anything."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.id, self.spec = "any", SandboxSpec(workdir="/testbed")

    async def exec(self, command: str | Sequence[str], **options: Any) -> ExecResult:
        pick = self._random.choice
        code = pick((0, 0, 0, 1, 2, 3, 4, 126, 137, -9, 255))
        late, cut, killed = (pick((False, False, True)) for _ in range(3))
        return ExecResult(code, pick(OUTPUTS), pick(OUTPUTS), 0.1, timed_out=late, truncated=cut, oom_killed=killed)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        if self._random.random() < 0.3:
            raise SandboxFileError(f"{path}: not a regular file")
        return self._random.choice(FILES)

    async def read_tree(self, path: str, **options: Any) -> Mapping[str, TreeFile]:
        return {}

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing is open."""


def generated_call(pick: random.Random, schemas: Sequence[Mapping[str, Any]]) -> ToolCall:
    """A call of any tool with any arguments or, more often, one of a tool that there is with all that it needs."""
    count = pick.choice((0, 1, 2, 3, 4, 5, 80))
    names = pick.choices(ARGUMENTS, k=count) if count < 80 else [f"a{number}" for number in range(count)]
    any_arguments = {name: pick.choice(VALUES) for name in names}
    if pick.random() < 0.3:
        return ToolCall(pick.choice(NAMES), any_arguments)
    function = pick.choice(schemas)["function"]
    needed = {name: pick.choice(VALUES) for name in function["parameters"]["properties"] if pick.random() < 0.8}
    if pick.random() < 0.8 and function["name"] != "bash" and "cmd" not in needed:
        needed = {name: pick.choice(SOUND.get(name, VALUES[:4])) for name in needed}
    return ToolCall(function["name"], needed if pick.random() < 0.8 else {**any_arguments, **needed})


def generated_text(pick: random.Random, fmt: ToolCallFormat, schemas: Sequence[Mapping[str, Any]]) -> str:
    """A turn of pieces of tags, a rendered call, a damaged one, or one piece over and over."""
    kind = pick.random()
    if kind < 0.4:
        return "".join(pick.choices(TAGS, k=pick.randint(0, 30)))
    if kind < 0.42:
        piece = "".join(pick.choices(TAGS, k=pick.randint(1, 3)))
        text = piece * (LARGE // len(piece))
        return pick.choice(("{}", "<function=f>\n{}</function>", "<tool_call>{}</tool_call>")).format(text)
    call = generated_call(pick, schemas)
    try:
        text = fmt.render(call)
    except (KeyError, TypeError, ValueError):  # a call that the format cannot write
        text = str(call)
    if kind < 0.7:
        return text
    at = pick.randint(0, len(text))
    return text[:at] + pick.choice(TAGS) + text[at + pick.randint(0, 3) :]


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def check_linear(fmt: ToolCallFormat, text: str, schemas: Sequence[Mapping[str, Any]]) -> None:
    """The better of three times counts: a machine that does something else as well is no fault of the format."""
    most = SECONDS_PER_100_KB * max(1.0, len(text) / LARGE)
    for work in (lambda: fmt.parse(text), lambda: parse_turn(fmt, text, schemas)):
        assert any(cpu_seconds(work) < most for _ in range(3)), f"{fmt.name}: {text[:80]!r}, {len(text)} characters"


async def take_turns(name: str, seed: int, count: int, *, timed: bool) -> int:
    """Give ``count`` turns to the scaffold ``name``, as an episode does; how many of them held a call."""
    make, format_name = SCAFFOLDS[name]
    pick, fmt, called = random.Random(f"{name} {seed}"), tool_format(format_name), 0
    tools = make(AnySandbox(seed))
    schemas = tools.schemas()
    for number in range(count):
        if number % 50 == 0:
            tools = make(AnySandbox(seed + number))
        text = generated_text(pick, fmt, schemas)
        parsed = fmt.parse(text)
        parse_turn(fmt, text, schemas)
        if timed:
            check_linear(fmt, text, schemas)
        called += isinstance(parsed, ToolCall)
        for call in (parsed, generated_call(pick, schemas)):
            if not isinstance(call, ParseFailure):
                began = time.thread_time()
                assert isinstance((await tools.call(call)).text, str)
                assert not timed or time.thread_time() - began < CALL_SECONDS, str(call)[:200]
    return called


EACH = -(-100_000 // len(SCAFFOLDS))
LONG = [pytest.mark.exhaustive, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("name", SCAFFOLDS)
@pytest.mark.parametrize("count", [600, pytest.param(EACH, marks=LONG)])
async def test_no_generated_turn_raises(name: str, count: int) -> None:
    assert await take_turns(name, count, count, timed=count == EACH) > count // 20


@pytest.mark.bubblewrap
@pytest.mark.parametrize("name", SCAFFOLDS)
@pytest.mark.parametrize("count", [25, pytest.param(1000, marks=LONG)])
async def test_generated_calls_in_a_real_sandbox_have_results(sandbox: Sandbox, name: str, count: int) -> None:
    pick, (make, _) = random.Random(name), SCAFFOLDS[name]
    tools = make(sandbox)
    schemas = tools.schemas()
    for _ in range(count):
        assert isinstance(await tools.call(generated_call(pick, schemas)), ToolResult)
