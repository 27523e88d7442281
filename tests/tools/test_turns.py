"""A turn in its parts: thoughts, text, all calls, and the types that a tool's schema wants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.call_formats import JSON_FORMATS, TAG_FORMATS

from tools import ParsedTurn, ParseFailure, ToolCall, parse_turn, tool_format
from tools.formats.harmony import HARMONY

ALL = (*JSON_FORMATS, *TAG_FORMATS)
PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "line": {"type": ["integer", "null"]}},
    "required": ["path"],
}
SCHEMA = [{"type": "function", "function": {"name": "view", "description": "", "parameters": PARAMETERS}}]
VIEW = ToolCall("view", {"path": "3", "line": 3})


@pytest.mark.parametrize("name", [name for name in ALL if name != "harmony"])
def test_all_calls_are_found_with_the_text_around_them(name: str) -> None:
    fmt = tool_format(name)
    one, two = fmt.render(VIEW), fmt.render(ToolCall("bash", {"command": "ls\n</tool_call>\n"}))
    spoken = parse_turn(fmt, f"<think>\nwhy </x>\n</think>\n\nFirst\n{one}\nthen {two} done", SCHEMA)
    assert spoken.reasoning == "why </x>"
    assert spoken.calls == (VIEW, ToolCall("bash", {"command": "ls\n</tool_call>\n"}))
    assert (spoken.text, spoken.failure) == ("First\n\nthen  done", None)


@pytest.mark.parametrize("name", ["hermes", "xml", "glm"])
def test_a_malformed_call_leaves_all_text_and_a_reason(name: str) -> None:
    fmt = tool_format(name)
    broken = "I see. " + fmt.render(VIEW)[:-3]
    failure = fmt.parse(broken)
    assert isinstance(failure, ParseFailure)
    assert parse_turn(fmt, broken, SCHEMA) == ParsedTurn("", broken, (), failure.reason)
    good = parse_turn(fmt, fmt.render(VIEW) + broken, SCHEMA)
    assert (good.calls, good.failure) == ((VIEW,), None)


def test_calls_of_one_section_are_all_found() -> None:
    for name, section in (("minimax", "minimax:tool_call"), ("deepseek-dsml", "｜DSML｜function_calls")):
        fmt, joint = tool_format(name), f"\n</{section}>\n<{section}>"
        text = (fmt.render(VIEW) + "\n" + fmt.render(VIEW)).replace(joint, "")
        assert text.count(section) == 2
        assert parse_turn(fmt, text, SCHEMA) == ParsedTurn(calls=(VIEW, VIEW))


def test_pythons_words_are_values_where_the_schema_takes_no_text() -> None:
    properties = {"all": {"type": "boolean"}, "text": {"type": "string"}, "line": {"type": ["integer", "null"]}}
    schema = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    fmt, call = tool_format("qwen3-coder"), ToolCall("f", {"all": "True", "text": "True", "line": "None"})
    assert parse_turn(fmt, fmt.render(call), schema).calls == (
        ToolCall("f", {"all": True, "text": "True", "line": None}),
    )


def test_harmonys_channels_are_thoughts_text_and_calls() -> None:
    fmt = tool_format("harmony")
    thought = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
    said = f"<|channel|>commentary<|message|>First.<|end|><|start|>assistant{fmt.render(VIEW)}"
    assert parse_turn(fmt, thought + said, SCHEMA, HARMONY) == ParsedTurn("so", "First.", (VIEW,))
    assert parse_turn(fmt, f"{thought}<|channel|>final<|message|>Yes.", [], HARMONY) == ParsedTurn("so", "Yes.")
    assert parse_turn(fmt, thought + fmt.render(VIEW), SCHEMA, HARMONY) == ParsedTurn("so", "", (VIEW,))
    unclosed = parse_turn(fmt, "<|channel|>analysis<|message|>so " + fmt.render(VIEW), SCHEMA, HARMONY)
    assert unclosed.calls == ()


def test_a_malformed_call_after_another_one_of_its_section_is_text() -> None:
    fmt = tool_format("minimax")
    text = fmt.render(VIEW).replace("</invoke>\n", '</invoke>\n<invoke name="view">\n')
    assert parse_turn(fmt, text, SCHEMA) == ParsedTurn(text='<invoke name="view">\n</minimax:tool_call>', calls=(VIEW,))


def test_without_tools_a_call_is_text() -> None:
    text = "see <function=bash></function>"
    assert parse_turn(tool_format("xml"), text, []) == ParsedTurn("", text)


def test_thoughts_without_an_end_hold_no_call() -> None:
    fmt = tool_format("hermes")
    cut = parse_turn(fmt, "<think>so " + fmt.render(VIEW), SCHEMA)
    assert (cut.text, cut.calls) == ("", ())
    assert cut.failure == "no tool call found; <think> is not closed"


@given(st.sampled_from([*ALL, "openhands", "r2egym", "mini-swe-agent"]), st.text())
def test_the_first_parsed_call_is_the_loops_call(name: str, text: str) -> None:
    fmt = tool_format(name)
    spoken, parsed = parse_turn(fmt, text, SCHEMA), fmt.parse(text.strip())
    if "</think>" not in text and "<think>" not in text:
        assert (spoken.calls[:1] == (parsed,)) == isinstance(parsed, ToolCall)
