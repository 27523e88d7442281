"""Two text formats of tool calls: Qwen's Hermes JSON and R2E-Gym's XML.

Both parsers are total: any text gives a :class:`ToolCall` or a :class:`ParseFailure` with one line for the agent. As in
R2E-Gym, ``parse`` takes the *first* call of a turn and ignores the rest; :func:`parse_turn` returns all calls. Parsers
are given the text outside of the model's thoughts (:mod:`tools.reasoning`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from sandbox.registry import Registry
from tools.reasoning import THINK, Reasoning, split_reasoning, unclosed_failure
from tools.schema import accepts_string
from tools.types import CallScanner, ParsedTurn, ParseFailure, ToolCall, ToolCallFormat, ToolFormatError

_SPACE = re.compile(r"\s*")
_ESCAPED = re.compile(r"<\\(\\*)/parameter>")


class HermesFormat:
    """``<tool_call>`` around a JSON object with ``name`` and ``arguments``, as Qwen models are trained to write it."""

    name = "hermes"
    _open, _close = "<tool_call>", "</tool_call>"
    # strict=False accepts raw newlines in strings: models write them often, and they are unambiguous.
    _decoder = json.JSONDecoder(strict=False, parse_constant=lambda text: _refuse_constant(text))

    def parse(self, text: str) -> ToolCall | ParseFailure:
        return _first_call(self, text, f"no tool call found; write {self._open}, a JSON object, {self._close}")

    def scan(self, content: str, position: int) -> tuple[ToolCall, int, int] | ParseFailure | None:
        start = content.find(self._open, position)
        if start < 0:
            return None
        body = _after_space(content, start + len(self._open))
        try:
            value, end = self._decoder.raw_decode(content, body)
        except json.JSONDecodeError as error:
            before = content[body : error.pos].split("\n")
            position_text = f"line {len(before)} column {len(before[-1]) + 1}"
            return ParseFailure(f"bad JSON in the tool call, {position_text}: {error.msg}")
        except (ValueError, RecursionError) as error:
            return ParseFailure(f"bad JSON in the tool call: {_one_line(error)}")
        after = _after_space(content, end)
        if not content.startswith(self._close, after):
            return ParseFailure(f"the tool call is not closed; write {self._close} after the JSON object")
        call = _call_from_json(value)
        return call if isinstance(call, ParseFailure) else (call, start, after + len(self._close))

    def render(self, call: ToolCall) -> str:
        body = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
        return f"{self._open}\n{body}\n{self._close}"

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        tools = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
        example = '{"name": <tool name>, "arguments": <arguments as a JSON object>}'
        return (
            f"# Tools\n\nYou may call these tools, one call a turn:\n<tools>\n{tools}\n</tools>\n\n"
            f"Write a call as\n{self._open}\n{example}\n{self._close}"
        )


class XmlFormat:
    r"""``<function=NAME>`` around ``<parameter=ARG>value</parameter>``, one of each argument.

    The parser reads two layouts: each tag on its own line, as R2E-Gym writes and :meth:`describe` shows, and tags
    without space between them, as the demo model writes. Calls are rendered in the second layout, so that a call of the
    demo model is unchanged when it is parsed and rendered.

    Values are strings; other types are written as JSON, and the tool's schema converts them back. The parser removes
    one leading and one trailing newline of a value; the renderer adds both to a value that begins or ends with a
    newline. It escapes only ``</parameter>`` inside a value, as ``<\/parameter>`` (one more backslash for each existing
    one).
    """

    name = "xml"
    _function = re.compile(r"<function=([^<>\n]*)>")
    _parameter = re.compile(r"\s*<parameter=([^<>\n]*)>")
    _end = re.compile(r"\s*</function>")
    _writable = re.compile(r"[^<>\s]+")

    def parse(self, text: str) -> ToolCall | ParseFailure:
        return _first_call(self, text, "no tool call found; write <function=NAME>, its parameters, </function>")

    def scan(self, content: str, position: int) -> tuple[ToolCall, int, int] | ParseFailure | None:
        opened = self._function.search(content, position)
        if not opened:
            return None
        name = opened[1].strip()
        if not name:
            return ParseFailure("the tool call has no name; write <function=NAME>")
        arguments: dict[str, Any] = {}
        position = opened.end()
        while parameter := self._parameter.match(content, position):
            key = parameter[1].strip()
            close = content.find("</parameter>", parameter.end())
            if problem := _parameter_problem(key, close, arguments):
                return ParseFailure(problem)
            arguments[key] = _read_value(content[parameter.end() : close])
            position = close + len("</parameter>")
        closed = self._end.match(content, position)
        if not closed:
            return ParseFailure(f"<function={name}> is not closed; only parameters may stand before </function>")
        return ToolCall(name, arguments), opened.start(), closed.end()

    def render(self, call: ToolCall) -> str:
        """Raises ``ValueError`` for a tool or argument name that a tag cannot hold."""
        for name in (call.name, *call.arguments):
            if not self._writable.fullmatch(name):
                raise ValueError(f"the name {name!r} cannot be written in a tag: it is empty or has a space, < or >")
        parameters = [f"<parameter={key}>{_write_value(value)}</parameter>" for key, value in call.arguments.items()]
        return f"<function={call.name}>{''.join(parameters)}</function>"

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        tools = "\n\n".join(_describe_function(schema["function"]) for schema in schemas)
        example = "<function=NAME>\n<parameter=ARG>value</parameter>\n</function>"
        return f"You may call these tools, one call a turn:\n\n{tools}\n\nWrite a call as\n{example}"


TOOL_FORMATS = Registry(
    "tool-call format",
    "agent_rl.tool_formats",
    {
        "hermes": "tools.formats:HermesFormat",
        "xml": "tools.formats:XmlFormat",
        "r2egym": "tools.r2egym:R2EGymFormat",
        "mini-swe-agent": "tools.mini_swe_agent:MiniSweAgentFormat",
        "openhands": "tools.openhands:OpenHandsFormat",
    },
    ToolFormatError,
)


def tool_format(name: str) -> ToolCallFormat:
    """An instance of the registered format ``name``. Raises ``ToolFormatError`` if it cannot be loaded."""
    factory = TOOL_FORMATS.load(name)
    fmt: ToolCallFormat = factory() if callable(factory) else factory
    missing = [part for part in ("name", "parse", "render", "describe") if not hasattr(fmt, part)]
    if missing:
        raise ToolFormatError(f"tool-call format {name!r} lacks {', '.join(missing)}")
    return fmt


def parse_turn(
    fmt: ToolCallFormat, text: str, schemas: Sequence[Mapping[str, Any]], reasoning: Reasoning = THINK
) -> ParsedTurn:
    """Split a model's turn into reasoning, text and calls, for an agent program that speaks a chat API.

    ``schemas`` are the OpenAI function schemas of the offered tools. Without schemas the text is not searched for
    calls. A string argument whose schema requires another type is read as JSON.
    """
    thoughts, said = split_reasoning(text, reasoning)
    content = said.strip()
    if not schemas:
        return ParsedTurn(thoughts, content)
    if reasoning.unclosed(text):
        return ParsedTurn(thoughts, failure=unclosed_failure(reasoning).reason)
    calls, text_around, failure = _scan_calls(fmt, content)
    typed = tuple(with_typed_arguments(call, schemas) for call in calls)
    return ParsedTurn(thoughts, text_around.strip() if calls else content, typed, failure)


def with_typed_arguments(call: ToolCall, schemas: Sequence[Mapping[str, Any]]) -> ToolCall:
    """``call`` with string arguments converted to the types of the tool's schema where they are valid JSON."""
    named = (each["function"] for each in schemas if each["function"].get("name") == call.name)
    function: Mapping[str, Any] = next(named, {})
    properties = (function.get("parameters") or {}).get("properties") or {}
    known = {name: schema for name, schema in properties.items() if isinstance(schema, dict)}
    arguments = {name: _convert(value, known.get(name, {})) for name, value in call.arguments.items()}
    return replace(call, arguments=arguments)


def _convert(value: Any, schema: Mapping[str, Any]) -> Any:
    if not isinstance(value, str) or accepts_string(schema):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return value


def _scan_calls(fmt: ToolCallFormat, content: str) -> tuple[list[ToolCall], str, str | None]:
    """The calls, the text around them, and the reason if there are none."""
    if not isinstance(fmt, CallScanner):
        call = fmt.parse(content)
        return ([], content, call.reason) if isinstance(call, ParseFailure) else ([call], content, None)
    calls: list[ToolCall] = []
    text, position = "", 0
    while match := fmt.scan(content, position):
        if isinstance(match, ParseFailure):
            break
        call, start, end = match
        calls.append(call)
        text, position = text + content[position:start], end
    if calls:
        return calls, text + content[position:], None
    parsed = fmt.parse(content)
    return [], content, parsed.reason if isinstance(parsed, ParseFailure) else None


def _first_call(scanner: CallScanner, text: str, failure: str) -> ToolCall | ParseFailure:
    """The first call of ``text``, or a failure with the reason ``failure``."""
    match = scanner.scan(text, 0)
    if match is None:
        return ParseFailure(failure)
    return match if isinstance(match, ParseFailure) else match[0]


def _after_space(text: str, position: int) -> int:
    """The end of the white space that begins at ``position``."""
    space = _SPACE.match(text, position)
    assert space is not None, "the pattern also matches the empty text"
    return space.end()


def _call_from_json(value: Any) -> ToolCall | ParseFailure:
    if not isinstance(value, dict):
        return ParseFailure('the tool call must be a JSON object with "name" and "arguments"')
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not name:
        return ParseFailure('the tool call has no "name"; it must be a string')
    if not isinstance(arguments, dict):
        return ParseFailure('"arguments" of the tool call must be a JSON object')
    try:
        orjson.dumps(value)  # half surrogate pairs and integers over 64 bits cannot be recorded
    except TypeError as error:
        return ParseFailure(f"the tool call holds a value that cannot be kept: {_one_line(error)}")
    return ToolCall(name, arguments)


def _parameter_problem(key: str, close: int, seen: Mapping[str, Any]) -> str | None:
    if not key:
        return "a parameter has no name; write <parameter=ARG>"
    if close < 0:
        return f"<parameter={key}> is not closed; write </parameter> after its value"
    return f"parameter {key} is given twice" if key in seen else None


def _write_value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = re.sub(r"<(\\*)/parameter>", r"<\1\\/parameter>", text)
    return f"\n{text}\n" if text.startswith("\n") or text.endswith("\n") else text


def _read_value(raw: str) -> str:
    text = raw.removeprefix("\n").removesuffix("\n")
    return _ESCAPED.sub(r"<\1/parameter>", text) if "\\" in text else text


def _describe_function(function: Mapping[str, Any]) -> str:
    lines = [f"{function['name']}: {function['description']}"]
    parameters = function["parameters"]
    for name, schema in parameters["properties"].items():
        choices = f" {'|'.join(map(str, schema['enum']))}" if "enum" in schema else ""
        need = "required" if name in parameters["required"] else "optional"
        kind = f"{schema.get('type', 'value')}{choices}, {need}"
        lines.append(f"  {name} ({kind}): {schema.get('description', '')}".rstrip(": "))
    return "\n".join(lines)


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
