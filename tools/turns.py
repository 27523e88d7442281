"""A model's turn in its parts, for an agent program that speaks a chat API: thoughts, text, and all calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from tools.schema import accepts_string
from tools.types import CallScanner, ParseFailure, Spoken, ToolCall, ToolCallFormat

_THINK, _THOUGHT = "<think>", "</think>"


def parse_turn(fmt: ToolCallFormat, text: str, schemas: Sequence[Mapping[str, Any]]) -> Spoken:
    """The parts of ``text``. ``schemas`` are those of the tools that were offered, as OpenAI functions: without any, no
    calls are looked for; where one wants another type than a string, a string is read as JSON, as text formats write.
    """
    reasoning, answer, closed = split_thoughts(text)
    if not schemas:
        return Spoken(reasoning, answer)
    if not closed:
        return Spoken(reasoning, answer, failure=f"no tool call found; {_THINK} is not closed")
    calls, said, failure = _calls(fmt, answer)
    typed = tuple(typed_call(call, schemas) for call in calls)
    return Spoken(reasoning, said.strip() if calls else answer, typed, failure)


def split_thoughts(text: str) -> tuple[str, str, bool]:
    """``(thoughts, answer, closed)``: a turn may begin with thoughts, or go on with those that its prompt opened.
    ``closed`` is False for thoughts without an end; they have no answer."""
    before, closed, after = text.partition(_THOUGHT)
    opened = before.lstrip().startswith(_THINK)
    thoughts = before.lstrip().removeprefix(_THINK).strip()
    if closed:
        return thoughts, after.strip(), True
    return (thoughts, "", False) if opened else ("", text.strip(), True)


def typed_call(call: ToolCall, schemas: Sequence[Mapping[str, Any]]) -> ToolCall:
    """``call`` with the types that its tool's schema wants, where its strings are JSON of such."""
    named = (each["function"] for each in schemas if each["function"].get("name") == call.name)
    function: Mapping[str, Any] = next(named, {})
    properties = (function.get("parameters") or {}).get("properties") or {}
    wanted = {name: schema for name, schema in properties.items() if isinstance(schema, dict)}
    arguments = {name: _typed(value, wanted.get(name, {})) for name, value in call.arguments.items()}
    return replace(call, arguments=arguments)


def _typed(value: Any, schema: Mapping[str, Any]) -> Any:
    if not isinstance(value, str) or accepts_string(schema):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return value


def _calls(fmt: ToolCallFormat, answer: str) -> tuple[list[ToolCall], str, str | None]:
    """The calls, the text around them, and why there are none."""
    if not isinstance(fmt, CallScanner):
        call = fmt.parse(answer)
        return ([], answer, call.reason) if isinstance(call, ParseFailure) else ([call], answer, None)
    calls: list[ToolCall] = []
    said, position = "", 0
    while found := fmt.scan(answer, position):
        if isinstance(found, ParseFailure):
            break
        call, start, end = found
        calls.append(call)
        said, position = said + answer[position:start], end
    if calls:
        return calls, said + answer[position:], None
    parsed = fmt.parse(answer)
    return [], answer, parsed.reason if isinstance(parsed, ParseFailure) else None
