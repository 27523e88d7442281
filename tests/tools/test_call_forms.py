"""The forms of calls: every format's form accepts the calls that it renders, and nothing that it parses differently."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools import ToolCall, tool_format
from tools.formats import TOOL_FORMATS
from tools.formats.grammars import without_rules
from tools.types import ConstrainsCalls, Form, ToolCallFormat

FORMATS = [tool_format(name) for name in TOOL_FORMATS.built_in]
GENERAL = [fmt for fmt in FORMATS if fmt.name != "mini-swe-agent"]
PARAMETERS = {
    "type": "object",
    "properties": {
        "command": {"type": "string"},
        "mode": {"enum": ["fast", "slow"]},
        "lines": {"type": "array", "items": {"type": "integer"}},
        "deep": {"type": ["boolean", "null"]},
    },
    "required": ["command", "lines"],
}
texts = st.text(st.characters(codec="utf-8", exclude_characters="<>`\\\n"), max_size=20).map(str.strip)
values = {
    "command": texts,
    "mode": st.sampled_from(["fast", "slow"]),
    "lines": st.lists(st.integers(-9, 99)),
    "deep": st.sampled_from([True, False, None]),
}
calls = st.fixed_dictionaries(
    {key: values[key] for key in ("command", "lines")}, optional={key: values[key] for key in ("mode", "deep")}
).map(lambda call: {key: call[key] for key in PARAMETERS["properties"] if key in call})


def pattern(form: Form) -> str:
    """The form as a regular expression, with any JSON in place of JSON of a schema."""
    match form["type"]:
        case "const_string":
            return re.escape(form["value"])
        case "sequence":
            return "".join(map(pattern, form["elements"]))
        case "or":
            return f"(?:{'|'.join(map(pattern, form['elements']))})"
        case "optional":
            return f"(?:{pattern(form['content'])})?"
        case "any_text":
            return f"(?:(?!{'|'.join(map(re.escape, form['excludes']))})[\\s\\S])*"
        case kind:
            assert kind == "json_schema"
            return r"[\s\S]+"


def form_of(fmt: ToolCallFormat, parameters: dict[str, Any]) -> Form:
    assert isinstance(fmt, ConstrainsCalls)
    return fmt.call_form("bash", parameters)


@pytest.mark.parametrize("fmt", GENERAL, ids=lambda fmt: fmt.name)
@settings(max_examples=25)
@given(arguments=calls)
def test_a_rendered_call_has_the_form(fmt: ToolCallFormat, arguments: dict[str, Any]) -> None:
    written = fmt.render(ToolCall("bash", arguments))
    if fmt.name == "harmony":  # the token that ends the turn is no part of the form
        written = written.removesuffix("<|call|>")
    if fmt.name == "openhands":  # it writes other types as Python does
        arguments = {key: json.dumps(value) if key in ("lines", "deep") else value for key, value in arguments.items()}
        written = fmt.render(ToolCall("bash", arguments))
    assert re.fullmatch(pattern(form_of(fmt, PARAMETERS)), written)


@pytest.mark.parametrize("fmt", GENERAL, ids=lambda fmt: fmt.name)
def test_the_markers_of_a_format_cannot_be_in_a_text(fmt: ToolCallFormat) -> None:
    form = form_of(fmt, {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]})
    if "json_schema" in json.dumps(form):
        return
    written = fmt.render(ToolCall("bash", {"command": "ls"}))
    assert re.fullmatch(pattern(form), written)
    assert not re.fullmatch(pattern(form), written.replace("ls", "l</parameter>s</arg_value>s</｜DSML｜parameter>"))


def test_mini_swe_agent_writes_one_command() -> None:
    fmt = tool_format("mini-swe-agent")
    one = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    form = form_of(fmt, one)
    assert re.fullmatch(pattern(form), fmt.render(ToolCall("bash", {"command": "ls\ncat a"})))
    assert not re.fullmatch(pattern(form), fmt.render(ToolCall("bash", {"command": "ls\n```\n"})))
    with pytest.raises(ValueError, match="mini-swe-agent writes calls of the tool bash with the one argument command"):
        form_of(fmt, PARAMETERS)


@pytest.mark.parametrize("fmt", GENERAL, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("rule", ["pattern", "minLength"])
def test_rules_for_a_text_between_tags_are_refused(fmt: ToolCallFormat, rule: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", rule: "1"}}, "required": ["a"]}
    if "{" in fmt.render(ToolCall("bash", {})):
        assert form_of(fmt, schema)
        return
    with pytest.raises(ValueError, match=f"argument 'a': {rule} of a text between tags is not supported"):
        form_of(fmt, schema)
    assert form_of(fmt, without_rules(schema))


@pytest.mark.parametrize("name", ["qwen3-coder", "glm", "kimi", "harmony"])
def test_a_name_that_cannot_be_written_is_refused(name: str) -> None:
    fmt = tool_format(name)
    assert isinstance(fmt, ConstrainsCalls)
    with pytest.raises(ValueError, match="cannot be written in a tag"):
        fmt.call_form("a b", PARAMETERS)
