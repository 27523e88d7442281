"""Two text formats of tool calls: Qwen's Hermes JSON and R2E-Gym's XML.

Both parsers are total: any text gives a :class:`ToolCall` or a :class:`ParseFailure` with one line for the agent. A
turn's *first* call is taken and what follows it is ignored, as R2E-Gym does; :func:`tools.turns.parse_turn` gives them
all. A leading ``<think>`` block is skipped, so that a call that is only thought about is not run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from sandbox.registry import Registry
from tools.errors import ToolFormatError
from tools.types import CallScanner, ParseFailure, ToolCall, ToolCallFormat

_SPACE = re.compile(r"\s*")
_ESCAPED = re.compile(r"<\\(\\*)/parameter>")


class HermesFormat:
    """``<tool_call>`` around a JSON object with ``name`` and ``arguments``, as Qwen models are trained to write it."""

    name = "hermes"
    _open, _close = "<tool_call>", "</tool_call>"
    # Raw newlines inside strings are let through (strict=False): models write them often and they are unambiguous.
    _decoder = json.JSONDecoder(strict=False, parse_constant=lambda text: _refuse_constant(text))

    def parse(self, text: str) -> ToolCall | ParseFailure:
        none = f"no tool call found; write {self._open}, a JSON object, {self._close}"
        return _first_call(self, text, none)

    def scan(self, answer: str, position: int) -> tuple[ToolCall, int, int] | ParseFailure | None:
        start = answer.find(self._open, position)
        if start < 0:
            return None
        body = _after_space(answer, start + len(self._open))
        try:
            value, end = self._decoder.raw_decode(answer, body)
        except json.JSONDecodeError as error:
            before = answer[body : error.pos].split("\n")
            where = f"line {len(before)} column {len(before[-1]) + 1}"
            return ParseFailure(f"bad JSON in the tool call, {where}: {error.msg}")
        except (ValueError, RecursionError) as error:
            return ParseFailure(f"bad JSON in the tool call: {_one_line(error)}")
        after = _after_space(answer, end)
        if not answer.startswith(self._close, after):
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

    Two layouts are read: tags on lines of their own, as R2E-Gym writes them and :meth:`describe` shows, and tags with
    nothing between them, as the starting model writes them. Calls are rendered in the second: a call of the starting
    model, parsed and rendered again, is the same text.

    Values are strings; others are written as JSON and read back by the tool's schema. The parser takes one leading and
    one trailing newline of a value away, so a value that begins or ends with a newline is written between two more.
    Everything else is kept to the character. Nothing is escaped but ``</parameter>`` inside a value, which is written
    ``<\/parameter>`` (one backslash more for each that is there already).
    """

    name = "xml"
    _function = re.compile(r"<function=([^<>\n]*)>")
    _parameter = re.compile(r"\s*<parameter=([^<>\n]*)>")
    _end = re.compile(r"\s*</function>")
    _writable = re.compile(r"[^<>\s]+")

    def parse(self, text: str) -> ToolCall | ParseFailure:
        return _first_call(self, text, "no tool call found; write <function=NAME>, its parameters, </function>")

    def scan(self, answer: str, position: int) -> tuple[ToolCall, int, int] | ParseFailure | None:
        opened = self._function.search(answer, position)
        if not opened:
            return None
        name = opened[1].strip()
        if not name:
            return ParseFailure("the tool call has no name; write <function=NAME>")
        arguments: dict[str, Any] = {}
        position = opened.end()
        while parameter := self._parameter.match(answer, position):
            key = parameter[1].strip()
            close = answer.find("</parameter>", parameter.end())
            if problem := _parameter_problem(key, close, arguments):
                return ParseFailure(problem)
            arguments[key] = _read_value(answer[parameter.end() : close])
            position = close + len("</parameter>")
        closed = self._end.match(answer, position)
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
    """The format ``name``, made of its registered class. Raises ``ToolFormatError`` where there is none to load."""
    make = TOOL_FORMATS.load(name)
    fmt: ToolCallFormat = make() if callable(make) else make
    missing = [part for part in ("name", "parse", "render", "describe") if not hasattr(fmt, part)]
    if missing:
        raise ToolFormatError(f"tool-call format {name!r} is no format, it lacks {', '.join(missing)}")
    return fmt


def _first_call(scanner: CallScanner, text: str, none: str) -> ToolCall | ParseFailure:
    """The first call of a turn; a failure of the reason ``none`` where it has none."""
    answer = _after_thinking(text)
    if isinstance(answer, ParseFailure):
        return answer
    found = scanner.scan(answer, 0)
    if found is None:
        return ParseFailure(none)
    return found if isinstance(found, ParseFailure) else found[0]


def _after_thinking(text: str) -> str | ParseFailure:
    if not text.lstrip().startswith("<think>"):
        return text
    _, closed, answer = text.partition("</think>")
    return answer if closed else ParseFailure("no tool call found; <think> is not closed")


def _after_space(text: str, position: int) -> int:
    """Where the white space ends that begins at ``position``."""
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
        orjson.dumps(value)  # half surrogate pairs and integers past 64 bits could not be kept on record
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
