"""Formats whose arguments are one JSON object: Hermes, Kimi-K2, DeepSeek-V3 and DeepSeek-V3.1."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from tools.formats.grammars import json_call
from tools.formats.turns import NAME, check_name, describe_as_json, first_call
from tools.types import CallBlock, Form, ParseFailure, ToolCall

_SPACE = re.compile(r"\s*")


class HermesFormat:
    """``<tool_call>`` around a JSON object with ``name`` and ``arguments``, as Qwen models are trained to write it."""

    name = "hermes"
    _open, _close = "<tool_call>", "</tool_call>"

    def parse(self, text: str) -> ToolCall | ParseFailure:
        return first_call(self, text, f"no tool call found; write {self._open}, a JSON object, {self._close}")

    def scan(self, content: str, position: int) -> CallBlock | ParseFailure | None:
        start = content.find(self._open, position)
        if start < 0:
            return None
        decoded = decode_json(content, start + len(self._open))
        if isinstance(decoded, ParseFailure):
            return decoded
        value, end = decoded
        after = _after_space(content, end)
        if not content.startswith(self._close, after):
            return ParseFailure(f"the tool call is not closed; write {self._close} after the JSON object")
        call = _call_from_json(value)
        return call if isinstance(call, ParseFailure) else ((call,), start, after + len(self._close))

    def render(self, call: ToolCall) -> str:
        body = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
        return f"{self._open}\n{body}\n{self._close}"

    def call_form(self, name: str, parameters: Mapping[str, Any]) -> Form:
        """See :class:`tools.types.ConstrainsCalls`."""
        return json_call(self.render, name, parameters)

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        example = '{"name": <tool name>, "arguments": <arguments as a JSON object>}'
        return describe_as_json(schemas, f"{self._open}\n{example}\n{self._close}")


class MarkedJsonFormat:
    """A section of calls: a marker, the tool's name, a marker, the JSON object of the arguments, a marker.

    A subclass gives the markers. Calls count inside a section only. The section's end may be missing.
    """

    name: str
    _section: tuple[str, str]
    _call: tuple[str, str, str]
    """The markers before the name, between name and arguments, and after the arguments."""

    def parse(self, text: str) -> ToolCall | ParseFailure:
        before, between, after = (marker.strip() for marker in self._call)
        written = f"{self._section[0]}{before}NAME{between}, a JSON object, {after}{self._section[1]}"
        return first_call(self, text, f"no tool call found; write {' '.join(written.split())}")

    def scan(self, content: str, position: int) -> CallBlock | ParseFailure | None:
        start = content.find(self._section[0], position)
        if start < 0:
            return None
        calls: list[ToolCall] = []
        end = start + len(self._section[0])
        opening = self._call[0]
        while content.startswith(opening, body := _after_space(content, end)):
            read = self._read(content, body + len(opening))
            if isinstance(read, ParseFailure):
                return (tuple(calls), start, end) if calls else read
            call, end = read
            calls.append(call)
        if not calls:
            return ParseFailure(f"no tool call follows {self._section[0]}; write {opening}NAME")
        after = _after_space(content, end)
        closed = content.startswith(self._section[1], after)
        return tuple(calls), start, after + len(self._section[1]) if closed else end

    def _read(self, content: str, position: int) -> tuple[ToolCall, int] | ParseFailure:
        _, between, close = (marker.strip() for marker in self._call)
        separator = content.find(between, position)
        name = "" if separator < 0 else self._read_name(content[position:separator].strip())
        if not NAME.fullmatch(name):
            return ParseFailure(f"the tool call has no name; write it before {between}")
        decoded = decode_json(content, separator + len(between))
        if isinstance(decoded, ParseFailure):
            return decoded
        arguments, end = decoded
        after = _after_space(content, end)
        if not content.startswith(close, after):
            return ParseFailure(f"the tool call is not closed; write {close} after the JSON object")
        call = make_call(name, arguments)
        return call if isinstance(call, ParseFailure) else (call, after + len(close))

    def render(self, call: ToolCall) -> str:
        """Raises ``ValueError`` for a name that cannot stand before the marker."""
        before, between, after = self._call
        check_name(call.name)
        body = json.dumps(dict(call.arguments), ensure_ascii=False)
        return f"{self._section[0]}{before}{self._write_name(call.name)}{between}{body}{after}{self._section[1]}"

    def call_form(self, name: str, parameters: Mapping[str, Any]) -> Form:
        """See :class:`tools.types.ConstrainsCalls`."""
        return json_call(self.render, name, parameters)

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        before, between, after = self._call
        example = f"{before}{self._write_name('NAME')}{between}<arguments as a JSON object>{after}"
        return describe_as_json(schemas, f"{self._section[0]}{example}{self._section[1]}")

    def _write_name(self, name: str) -> str:
        return name

    def _read_name(self, text: str) -> str:
        return text


class KimiFormat(MarkedJsonFormat):
    """Kimi-K2 to K2.5. The call's id ``functions.NAME:NUMBER`` has its name; the number is not kept."""

    name = "kimi"
    _section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    _call = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    _id = re.compile(r"(?:functions\.)?(.*?)(?::\d+)?")

    def _write_name(self, name: str) -> str:
        return f"functions.{name}:0"

    def _read_name(self, text: str) -> str:
        match = self._id.fullmatch(text)
        return match[1] if match else ""


class DeepSeekV3Format(MarkedJsonFormat):
    """DeepSeek-V3 and R1: a JSON code block."""

    name = "deepseek-v3"
    _section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    _call = ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>")


class DeepSeekV31Format(MarkedJsonFormat):
    """DeepSeek-V3.1."""

    name = "deepseek-v3.1"
    _section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    _call = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")


def decode_json(content: str, position: int) -> tuple[Any, int] | ParseFailure:
    """The JSON value at ``position``, after white space, and its end."""
    body = _after_space(content, position)
    try:
        value, end = _DECODER.raw_decode(content, body)
        orjson.dumps(value)  # half surrogate pairs and integers over 64 bits cannot be recorded
        return value, end
    except json.JSONDecodeError as error:
        before = content[body : error.pos].split("\n")
        return ParseFailure(f"bad JSON in the tool call, line {len(before)} column {len(before[-1]) + 1}: {error.msg}")
    except orjson.JSONEncodeError as error:
        return ParseFailure(f"the tool call holds a value that cannot be kept: {_one_line(error)}")
    except (ValueError, RecursionError) as error:
        return ParseFailure(f"bad JSON in the tool call: {_one_line(error)}")


def make_call(name: str, arguments: Any) -> ToolCall | ParseFailure:
    """A call with decoded JSON as its arguments."""
    return _call_from_json({"name": name, "arguments": arguments})


def _call_from_json(value: Any) -> ToolCall | ParseFailure:
    if not isinstance(value, dict):
        return ParseFailure('the tool call must be a JSON object with "name" and "arguments"')
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not name:
        return ParseFailure('the tool call has no "name"; it must be a string')
    if not isinstance(arguments, dict):
        return ParseFailure('"arguments" of the tool call must be a JSON object')
    return ToolCall(name, arguments)


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


# strict=False accepts raw newlines in strings: models write them often, and they are unambiguous.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)


def _after_space(text: str, position: int) -> int:
    """The end of the white space that begins at ``position``."""
    space = _SPACE.match(text, position)
    assert space is not None, "the pattern also matches the empty text"
    return space.end()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
