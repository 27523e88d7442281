from __future__ import annotations

import json
import sys
from importlib.metadata import EntryPoint

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.call_formats import JSON_FORMATS, MARKERS, TAG_FORMATS

from sandbox import registry as plugins
from tools import (
    HermesFormat,
    ParseFailure,
    ToolCall,
    ToolCallFormat,
    ToolFormatError,
    XmlFormat,
    parse_call,
    tool_format,
)

FORMATS = [tool_format(name) for name in (*JSON_FORMATS, *TAG_FORMATS)]
NAMES = st.from_regex(r"[A-Za-z_][\w.-]{0,12}", fullmatch=True)
PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=", "<function=f>", "</function>", "<parameter=a>", "</parameter>"),
        *("<\\/parameter>", "<\\\\/parameter>", "<think>", "</think>", "\n", " ", '"', "\\", "{", "}", "[", ",", ":"),
        *MARKERS,
        *("name", "arguments", "NaN", "1" * 5000, "\r\n", "\x85", "\u2028", "if a < b:\n    return 'x'\n"),
    ]
)
CODE = st.lists(st.one_of(PIECES, st.text(max_size=8)), max_size=10).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | CODE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(CODE, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@given(name=NAMES, arguments=st.dictionaries(NAMES, CODE, max_size=4), after=CODE)
def test_a_rendered_call_is_read_back_to_the_character(
    fmt: ToolCallFormat, name: str, arguments: dict[str, str], after: str
) -> None:
    call = ToolCall(name, arguments)
    assert fmt.parse(fmt.render(call)) == call
    thoughts = f"<think>\n{fmt.render(ToolCall('no', {}))}\n</think>"
    assert parse_call(fmt, f"{thoughts}\nI call:\n{fmt.render(call)}{after}") == call


@pytest.mark.parametrize("fmt", [tool_format(name) for name in JSON_FORMATS], ids=lambda fmt: fmt.name)
@given(name=NAMES, arguments=st.dictionaries(CODE, JSON, max_size=4))
def test_arguments_in_an_object_keep_any_json(fmt: ToolCallFormat, name: str, arguments: dict[str, object]) -> None:
    call = ToolCall(name, arguments)
    assert fmt.parse(fmt.render(call)) == call


@given(name=NAMES, arguments=st.dictionaries(NAMES, JSON, max_size=4))
def test_dsml_keeps_any_json(name: str, arguments: dict[str, object]) -> None:
    call, fmt = ToolCall(name, arguments), tool_format("deepseek-dsml")
    assert fmt.parse(fmt.render(call)) == call


@pytest.mark.parametrize("name", [name for name in TAG_FORMATS if name != "deepseek-dsml"])
@given(arguments=st.dictionaries(NAMES, JSON.filter(lambda value: not isinstance(value, str)), max_size=4))
def test_tags_hold_other_values_as_json(name: str, arguments: dict[str, object]) -> None:
    fmt = tool_format(name)
    call = fmt.parse(fmt.render(ToolCall("f", arguments)))
    assert isinstance(call, ToolCall)
    assert {name: json.loads(value) for name, value in call.arguments.items()} == arguments


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@given(text=CODE)
def test_any_text_gives_a_call_or_one_line(fmt: ToolCallFormat, text: str) -> None:
    rendered = fmt.render(ToolCall("f", {"a": "HERE"}))
    for candidate in (text, rendered.replace("HERE", text), rendered.partition("HERE")[0] + text, rendered + text):
        parsed = fmt.parse(candidate)
        assert isinstance(parsed, ToolCall | ParseFailure)
        if isinstance(parsed, ParseFailure):
            assert parsed.reason
            assert "\n" not in parsed.reason


def hermes(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


def kimi(text: str) -> str:
    return f"<|tool_calls_section_begin|><|tool_call_begin|>{text}<|tool_calls_section_end|>"


WRONG = {
    "hermes": [
        ("I am done.", "no tool call found; write <tool_call>"),
        (hermes('{"name": "f", }'), "bad JSON in the tool call, line 1 column 15: Expecting property name"),
        (hermes('\n{"name": "f"\n "arguments": {}}'), "line 2 column 2: Expecting ',' delimiter"),
        ('<tool_call>{"name": "f", "arguments": {}}', "not closed; write </tool_call>"),
        (hermes('{"name": "f", "arguments": {}} so'), "not closed"),
        (hermes('{"arguments": {}}'), 'has no "name"'),
        (hermes('{"name": "", "arguments": {}}'), 'has no "name"'),
        (hermes('{"name": "f", "arguments": "x"}'), '"arguments" of the tool call must be'),
        (hermes("[1]"), "must be a JSON object"),
        (hermes('{"name": "f", "arguments": {"a": NaN}}'), "NaN is no JSON"),
        (hermes('{"name": "f", "arguments": {"a": "\\ud800"}}'), "cannot be kept"),
        (hermes('{"name": "f", "arguments": {"a": 99999999999999999999}}'), "cannot be kept"),
        (hermes("[" * 100_000), "bad JSON"),
        (hermes("1" * 5000), "bad JSON"),
    ],
    "xml": [
        ("I am done.", "no tool call found; write <function=NAME>"),
        ("<function=>\n</function>", "has no name"),
        ("<function=f>\n<parameter=a>x", "<parameter=a> is not closed"),
        ("<function=f>\n<parameter=a>x</parameter>", "<function=f> is not closed"),
        ("<function=f>\nwords</function>", "only parameters may stand before </function>"),
        ("<function=f>\n<parameter=>x</parameter></function>", "parameter has no name"),
        ("<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>", "parameter a is given twice"),
    ],
    "qwen3-coder": [
        (
            "<function=f></function>",
            "no tool call found; write <tool_call><function=NAME>, its parameters, </function>",
        ),
        ("<tool_call>\n<function=f>\n</tool_call>", "<function=f> is not closed"),
    ],
    "glm": [
        ("f<arg_key>a</arg_key>", "no tool call found; write <tool_call>NAME, its parameters, </tool_call>"),
        ('<tool_call>{"name": "f"}</tool_call>', "has no name; write <tool_call>NAME"),
        ("<tool_call>f<arg_key>a</arg_key></tool_call>", "only parameters may stand before </tool_call>"),
        ("<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>", "not closed; write </arg_value> after its value"),
    ],
    "minimax": [
        ('<invoke name="f"></invoke>', "no tool call found; write <minimax:tool_call>"),
        ('<minimax:tool_call><invoke name=""></invoke>', 'has no name; write <invoke name="NAME">'),
    ],
    "deepseek-dsml": [
        ("so", "no tool call found; write <｜DSML｜function_calls>"),
        (
            '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a">1</｜DSML｜parameter>',
            "only parameters may stand before </｜DSML｜invoke>",
        ),
    ],
    "kimi": [
        ("so", "no tool call found; write <|tool_calls_section_begin|>"),
        ("<|tool_calls_section_begin|>so", "no tool call follows <|tool_calls_section_begin|>"),
        (kimi("<|tool_call_argument_begin|>{}<|tool_call_end|>"), "has no name; write it before"),
        (
            kimi("functions.f:0<|tool_call_argument_begin|>{<|tool_call_end|>"),
            "bad JSON in the tool call, line 1 column 2",
        ),
        (kimi("functions.f:0<|tool_call_argument_begin|>{}"), "not closed; write <|tool_call_end|>"),
        (kimi("functions.f:0<|tool_call_argument_begin|>[]<|tool_call_end|>"), '"arguments" of the tool call must be'),
    ],
    "harmony": [
        ("<|channel|>final<|message|>so", "no tool call found; write a message to=functions.NAME"),
        ("<|channel|>analysis to=functions.f<|message|>{}<|call|>", "no tool call found"),
        ("<|channel|>commentary to=functions.f<|message|>{} so<|call|>", "only a JSON object may stand in the message"),
        ("<|channel|>commentary to=functions.f<|message|>so<|call|>", "bad JSON"),
        ("<|channel|>commentary to=functions.f<|call|><|start|>assistant<|channel|>final<|message|>{}", "no tool call"),
    ],
}


@pytest.mark.parametrize(("name", "text", "reason"), [(name, *case) for name in WRONG for case in WRONG[name]])
def test_a_malformed_call_gives_the_reason(name: str, text: str, reason: str) -> None:
    parsed = tool_format(name).parse(text)
    assert isinstance(parsed, ParseFailure)
    assert reason in parsed.reason


def test_xml_reads_tags_on_their_own_lines_and_writes_them_without_white_space() -> None:
    lines = (
        "<function=file_editor>\n<parameter=command>str_replace</parameter>\n"
        "<parameter=old_str>\n    a\n    b\n</parameter>\n<parameter=insert_line>3</parameter>\n</function>"
    )
    call = ToolCall("file_editor", {"command": "str_replace", "old_str": "    a\n    b", "insert_line": "3"})
    assert XmlFormat().parse(lines) == call
    assert XmlFormat().render(call) == (
        "<function=file_editor><parameter=command>str_replace</parameter>"
        "<parameter=old_str>    a\n    b</parameter><parameter=insert_line>3</parameter></function>"
    )


@pytest.mark.parametrize("value", ["  x < y  ", "\n  x < y  \n", "\n  x < y  ", "  x < y  \n"])
def test_xml_takes_one_newline_off_either_end(value: str) -> None:
    text = f"<function=f>\n  <parameter=a>{value}</parameter>\n</function>"
    assert XmlFormat().parse(text) == ToolCall("f", {"a": "  x < y  "})


WRITTEN = {
    "qwen3-coder": "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=n>\n[1]\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm": "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value><arg_key>n</arg_key><arg_value>[1]</arg_value>"
    "</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">x</parameter>\n'
    '<parameter name="n">[1]</parameter>\n</invoke>\n</minimax:tool_call>',
    "deepseek-dsml": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">[1]</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"a": "x", "n": [1]}<|tool_call_end|><|tool_calls_section_end|>',
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"a": "x", "n": [1]}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
    '{"a": "x", "n": [1]}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "harmony": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "x", "n": [1]}<|call|>',
}


@pytest.mark.parametrize(("name", "text"), WRITTEN.items(), ids=WRITTEN)
def test_a_call_is_written_as_the_familys_template_writes_it(name: str, text: str) -> None:
    assert tool_format(name).render(ToolCall("f", {"a": "x", "n": [1]})) == text
    assert "NAME" in tool_format(name).describe([])


READ = {
    "GLM-4.5's newlines": (
        "glm",
        "I look.\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value> x\n</arg_value>\n</tool_call>",
        ToolCall("f", {"a": " x\n"}),
    ),
    "a GLM call without arguments": ("glm", "<tool_call>f</tool_call>", ToolCall("f", {})),
    "a Kimi id without a prefix": (
        "kimi",
        kimi("f:12<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ToolCall("f", {}),
    ),
    "a section without an end": (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        ToolCall("f", {}),
    ),
    "a marker in an argument": (
        "kimi",
        kimi('functions.f:0<|tool_call_argument_begin|>{"a": "<|tool_call_end|>"}<|tool_call_end|>'),
        ToolCall("f", {"a": "<|tool_call_end|>"}),
    ),
    "DSML that says JSON and is not": (
        "deepseek-dsml",
        '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">yes'
        "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
        ToolCall("f", {"a": "yes"}),
    ),
    "thoughts before a harmony call": (
        "harmony",
        "<|channel|>analysis<|message|>to=functions.g<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": "<|end|>"}',
        ToolCall("f", {"a": "<|end|>"}),
    ),
    "a harmony recipient before the channel": (
        "harmony",
        " to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
        ToolCall("f", {}),
    ),
    "a harmony call without arguments": (
        "harmony",
        "<|channel|>commentary to=functions.f<|message|><|call|>",
        ToolCall("f", {}),
    ),
}


@pytest.mark.parametrize(("name", "text", "call"), READ.values(), ids=READ)
def test_other_forms_that_models_write_are_read(name: str, text: str, call: ToolCall) -> None:
    assert tool_format(name).parse(text) == call


def test_xml_cannot_write_a_name_that_a_tag_cannot_hold() -> None:
    with pytest.raises(ValueError, match="cannot be written in a tag"):
        XmlFormat().render(ToolCall("f", {"a b": "x"}))


def test_hermes_takes_a_call_without_arguments_and_raw_newlines() -> None:
    assert HermesFormat().parse('<tool_call>{"name": "finish"}</tool_call>') == ToolCall("finish", {})
    text = '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>'
    assert HermesFormat().parse(text) == ToolCall("f", {"a": "x\ny"})


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(
        ToolFormatError, match=r"unknown tool-call format 'xlm': did you mean 'xml'\? \(registered: deepseek-dsml, "
    ):
        tool_format("xlm")


class Shouted(XmlFormat):
    """A format as another package would bring it."""

    name = "shouted"


def test_a_format_of_another_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tests_shouted_format", sys.modules[__name__])
    point = EntryPoint("shouted", "tests_shouted_format:Shouted", "agent_rl.tool_formats")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == point.group else [])
    assert tool_format("shouted").name == tool_format("tests_shouted_format:Shouted").name == "shouted"
    with pytest.raises(ToolFormatError, match=r"registered: deepseek-dsml, .*, shouted, xml"):
        tool_format("zzz")
    with pytest.raises(ToolFormatError, match="lacks name, parse, render, describe"):
        tool_format("tests_shouted_format:NAMES")
