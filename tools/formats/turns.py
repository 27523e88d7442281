"""Reads a whole turn in any format, and what the formats share.

``parse`` takes the *first* call of a turn and ignores the rest, as R2E-Gym does; :func:`parse_turn` returns all calls.
Parsers are given the text outside of the model's thoughts (:mod:`tools.split_reasoning`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from tools.schema import accepts_string
from tools.split_reasoning import THINK, Reasoning, split_reasoning, unclosed_failure
from tools.types import CallScanner, MarksText, ParsedTurn, ParseFailure, ToolCall, ToolCallFormat

# Qwen3-Coder's template writes these values as Python does, so that its models write them too.
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
NAME = re.compile(r"[^\s<>]+")
"""A name that can stand between markers."""


def parse_turn(
    fmt: ToolCallFormat, text: str, schemas: Sequence[Mapping[str, Any]], reasoning: Reasoning = THINK
) -> ParsedTurn:
    """Split a model's turn into reasoning, text and calls, for an agent program that speaks a chat API.

    ``schemas`` are the OpenAI function schemas of the offered tools. Without schemas the text is not searched for
    calls. A string argument whose schema requires another type is read as JSON.
    """
    thoughts, said = split_reasoning(text, reasoning)
    content = said.strip()
    plain = fmt.plain_text if isinstance(fmt, MarksText) else str
    if not schemas:
        return ParsedTurn(thoughts, plain(content))
    if reasoning.unclosed(text):
        return ParsedTurn(thoughts, failure=unclosed_failure(reasoning).reason)
    calls, text_around, failure = _scan_calls(fmt, content)
    typed = tuple(with_typed_arguments(call, schemas) for call in calls)
    return ParsedTurn(thoughts, plain(text_around), typed, failure)


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
        return _PYTHON_WORDS.get(value, value)


def first_call(scanner: CallScanner, text: str, failure: str) -> ToolCall | ParseFailure:
    """The first call of ``text``, or a failure with the reason ``failure``."""
    match = scanner.scan(text, 0)
    if match is None:
        return ParseFailure(failure, words=True)
    return match if isinstance(match, ParseFailure) else match[0][0]


def check_name(name: str) -> None:
    """Raises ``ValueError`` for the name of a tool or an argument that cannot stand between markers."""
    if not NAME.fullmatch(name):
        raise ValueError(f"the name {name!r} cannot be written in a tag: it is empty or has a space, < or >")


def describe_as_json(schemas: Sequence[Mapping[str, Any]], example: str) -> str:
    """A description with the schemas as JSON, for models that are trained to read it."""
    tools = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    listed = f"# Tools\n\nYou may call these tools, one call a turn:\n<tools>\n{tools}\n</tools>"
    return f"{listed}\n\nWrite a call as\n{example}"


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
        found, start, end = match
        calls += found
        text, position = text + content[position:start], end
    if calls:
        return calls, (text + content[position:]).strip(), None
    parsed = fmt.parse(content)
    return [], content, parsed.reason if isinstance(parsed, ParseFailure) else None
