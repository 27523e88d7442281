"""A call in a model's thoughts is no call, whoever opened the thoughts."""

from __future__ import annotations

import pytest

from tools import ParsedTurn, ParseFailure, Reasoning, ToolCall, parse_call, parse_turn, split_reasoning, tool_format
from tools.formats import TOOL_FORMATS

WRITTEN = Reasoning("<think>", "</think>", prompt_opens=False)
OPENED = Reasoning("<think>", "</think>", prompt_opens=True)
SCHEMA = [{"type": "function", "function": {"name": "bash", "description": "", "parameters": {"type": "object"}}}]
CALL = ToolCall("bash", {"command": "rm -rf /testbed"})
FORMATS = sorted(TOOL_FORMATS.built_in)


@pytest.mark.parametrize(
    ("reasoning", "text", "parts"),
    [
        (WRITTEN, "<think>\nso\n</think>\nyes", ("so", "\nyes")),
        (WRITTEN, "so\n</think>\nyes", ("", "so\n</think>\nyes")),
        (WRITTEN, "yes", ("", "yes")),
        (OPENED, "so\n</think>\nyes", ("so", "\nyes")),
        (OPENED, "<think>so</think>yes</think>", ("so", "yes</think>")),
        (OPENED, "still thinking", ("still thinking", "")),
        (WRITTEN, " <think>still", ("still", "")),
    ],
)
def test_a_turn_is_split_into_thoughts_and_content(reasoning: Reasoning, text: str, parts: tuple[str, str]) -> None:
    assert split_reasoning(text, reasoning) == parts


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_in_thoughts_that_the_prompt_opened_is_not_executed(name: str) -> None:
    fmt = tool_format(name)
    thought = f"I could run\n{fmt.render(CALL)}\nbut no."
    assert isinstance(parse_call(fmt, f"{thought}\n</think>\n\nDone.", OPENED), ParseFailure)
    assert parse_call(fmt, thought, OPENED) == ParseFailure("no tool call found; <think> is not closed")
    assert parse_call(fmt, f"{thought}\n</think>\n\n{fmt.render(CALL)}", OPENED) == CALL
    assert parse_turn(fmt, f"{thought}\n</think>\n\nDone.", SCHEMA, OPENED).calls == ()
    assert parse_turn(fmt, thought, SCHEMA, OPENED).calls == ()


def test_a_call_keeps_a_closing_marker_in_its_text() -> None:
    fmt, call = tool_format("xml"), ToolCall("bash", {"command": "echo '</think>'"})
    assert parse_call(fmt, fmt.render(call), WRITTEN) == call
    assert parse_turn(fmt, fmt.render(call), SCHEMA, WRITTEN) == ParsedTurn(calls=(call,))
