"""Calls that end no episode: each fault was met by a model, or is one that its repetition loop writes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from support.call_formats import MARKERS

from sandbox import Sandbox
from tools import ToolCall, ToolResult, ToolSet, parse_turn, swe_tools, tool_format
from tools.formats import TOOL_FORMATS
from tools.mini_swe_agent import mini_swe_agent_tools
from tools.openhands import openhands_tools
from tools.r2egym import r2egym_tools
from tools.schema import MAX_NESTING
from tools.text import elements, through_last

SCAFFOLDS: dict[str, Callable[[Sandbox], ToolSet]] = {
    "own": swe_tools,
    "r2egym": r2egym_tools,
    "openhands": openhands_tools,
    "mini-swe-agent": mini_swe_agent_tools,
}
ELIFS = "if a:\n    pass\n" + "elif a:\n    pass\n" * 6000
DEEP = {"elif lines": ELIFS, "minus signs": "x = " + "-" * 6000 + "1\n", "brackets": "x = " + "(" * 150 + ")" * 150}


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


async def say(tools: ToolSet, tool: str, **arguments: Any) -> ToolResult:
    return await tools.call(ToolCall(tool, arguments))


@pytest.mark.bubblewrap
@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
async def test_a_file_too_deep_for_pythons_parser_is_shown(sandbox: Sandbox, text: str) -> None:
    await sandbox.write_files({"/testbed/deep.py": text.encode()})
    tools = r2egym_tools(sandbox)
    edit = {"path": "deep.py", "enable_linting": "True", "command": "insert", "insert_line": "0", "new_str": "a = 1"}
    for arguments in ({"command": "view", "path": "deep.py", "concise": "True"}, edit):
        result = await say(tools, "file_editor", **arguments)
        assert "Execution output of [file_editor]:" in result.text
    made = await say(tools, "file_editor", command="create", path="new.py", file_text=text, enable_linting="True")
    assert "Unhandled exception" in made.text or "File created" in made.text


@pytest.mark.bubblewrap
@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ({"view_range": "[" * 994}, "Parameter 'view_range' is expected to be an array."),
        ({"view_range": "[" * 900 + "]" * 900}, "Parameter 'view_range' is expected to be an array."),
        ({"view_range": nested(900)}, f"argument 'view_range' is nested more than {MAX_NESTING} levels deep"),
        ({"insert_line": None}, "Parameter 'insert_line' is expected to be an integer."),
        ({"insert_line": [1]}, "Parameter 'insert_line' is expected to be an integer."),
        ({"insert_line": float("inf")}, "Parameter 'insert_line' is expected to be an integer."),
    ],
)
async def test_openhands_refuses_wrong_numbers_and_lists(
    sandbox: Sandbox, arguments: dict[str, Any], answer: str
) -> None:
    call = {"command": "view", "path": "/testbed", **arguments}
    assert answer in (await say(openhands_tools(sandbox), "str_replace_editor", **call)).text


@pytest.mark.bubblewrap
@pytest.mark.parametrize("scaffold", SCAFFOLDS)
@pytest.mark.parametrize("levels", [MAX_NESTING, MAX_NESTING + 1, 900, 100_000])
async def test_deeply_nested_arguments_have_a_result(sandbox: Sandbox, scaffold: str, levels: int) -> None:
    tools = SCAFFOLDS[scaffold](sandbox)
    for schema in tools.schemas():
        for name in schema["function"]["parameters"]["properties"]:
            call = {"command": "view", "path": "/testbed", name: nested(levels)}
            assert (await say(tools, schema["function"]["name"], **call)).text or levels


@pytest.mark.bubblewrap
async def test_a_search_below_a_directory_with_a_newline_in_its_name_has_a_result(sandbox: Sandbox) -> None:
    await sandbox.write_files({"/testbed/a\nb/c.py": b"needle\n"})
    assert (await say(r2egym_tools(sandbox), "search", search_term="needle", path="/testbed/a\nb")).text


@pytest.mark.bubblewrap
async def test_a_text_that_occurs_a_million_times_is_refused_at_once(sandbox: Sandbox) -> None:
    await sandbox.write_files({"/testbed/a.txt": b"a\n" * 500_000})
    began = time.thread_time()
    result = await say(swe_tools(sandbox), "file_editor", command="str_replace", path="a.txt", old_str="a", new_str="b")
    assert "occurs 500000 times in /testbed/a.txt, at lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ..." in result.text
    assert time.thread_time() - began < 1


def seconds(read: Callable[[], object]) -> float:
    began = time.thread_time()
    read()
    return time.thread_time() - began


TURN = "<function=file_editor>\n{}</function>"
FLOODS = {
    "parameters without an end": TURN.format("<parameter=a>" * 8000),
    "parameters without a bracket": "<function=f>" + "<parameter=" * 9000 + "></function>",
    "spaces of a parameter": TURN.format("<parameter=" + " " * 104_000 + ">"),
    "functions without a bracket": "<function=" * 10_400,
    "functions without a line end": "<function=" * 10_400 + ">",
    "functions without an end": "<function=f>\n" * 8000,
    "blocks without an end": "```mswea_bash_command\n" * 5000,
    "newlines of a block": "```mswea_bash_command" + "\n" * 104_000,
    "calls": '<tool_call>{"name": "f"}</tool_call>' * 3000,
    "markers of every format": "".join(MARKERS) * (104_000 // len("".join(MARKERS))),
}


@pytest.mark.parametrize("name", TOOL_FORMATS.built_in)
@pytest.mark.parametrize("text", FLOODS.values(), ids=FLOODS)
def test_a_turn_of_104_kb_is_read_in_linear_time(name: str, text: str) -> None:
    """A format that searches for the same missing tag again and again takes seconds."""
    fmt, schemas = tool_format(name), [{"type": "function", "function": {"name": "f"}}]
    assert seconds(lambda: fmt.parse(text)) < 0.5
    assert seconds(lambda: parse_turn(fmt, text, schemas)) < 0.5


@pytest.mark.parametrize("name", TOOL_FORMATS.built_in)
def test_104_kb_of_one_marker_are_read_in_linear_time(name: str) -> None:
    fmt = tool_format(name)
    for marker in MARKERS:
        assert seconds(partial(fmt.parse, marker * (104_000 // len(marker)))) < 0.5


def test_elements_stop_at_a_tag_that_has_no_end() -> None:
    opening = re.compile("<p=([^>]+)>")
    assert list(elements("<p=a>1</p> x <p=b><p=c></p><p=d>", opening, "</p>")) == [("a", "1"), ("b", "<p=c>")]
    assert through_last("a>b>c", ">") == "a>b>"
    assert through_last("abc", ">") == ""
