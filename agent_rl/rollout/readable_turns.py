"""The turns of a trajectory as a conversation: thoughts, text and calls.

The calls are read by the first shipped tool-call format that finds the recorded call in the text. The format in the
run's config is not loaded: a foreign config may name any code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.formats import TOOL_FORMATS, parse_turn, tool_format
from tools.types import CallScanner, ToolCall, ToolCallFormat

Json = dict[str, Any]
MAX_CHARS = 200_000
"""Longer turns are not parsed."""
_ANY_TOOL: tuple[Json] = ({"function": {}},)


def conversation(turns: Sequence[Mapping[str, Any]]) -> list[Json]:
    """The ``thoughts``, ``said`` text and ``calls`` of each turn."""
    fmt = _format_of(turns)
    return [_spoken(turn, fmt) for turn in turns]


def _spoken(turn: Mapping[str, Any], fmt: ToolCallFormat | None) -> Json:
    """One turn. Without a format, the recorded call stands beside the whole text."""
    thoughts, content = _split(turn)
    recorded = [{"name": turn["tool"], "arguments": turn["arguments"]}] if turn["tool"] else []
    if fmt is None or len(content) > MAX_CHARS:
        return {"thoughts": thoughts, "said": content, "calls": recorded}
    parsed = parse_turn(fmt, content, _ANY_TOOL)
    calls = [{"name": call.name, "arguments": call.arguments} for call in parsed.calls]
    said = parsed.text if parsed.text or calls or parsed.reasoning else content
    if not isinstance(fmt, CallScanner):  # its calls are still in the text
        said = said.replace("".join(map(fmt.render, parsed.calls)), "").strip()
    return {"thoughts": thoughts or parsed.reasoning, "said": said, "calls": calls or recorded}


def _split(turn: Mapping[str, Any]) -> tuple[str, str]:
    """The thoughts without the common markers, and the rest of the text."""
    text, count = turn["text"], turn.get("thinking_chars", 0)
    thoughts = text[:count].strip().removeprefix("<think>").removesuffix("</think>").strip()
    return thoughts, text[count:]


def _format_of(turns: Sequence[Mapping[str, Any]]) -> ToolCallFormat | None:
    """The format of the first turn with a recorded call; None if no shipped format reads it."""
    called = next((turn for turn in turns if turn["tool"] and len(turn["text"]) <= MAX_CHARS), None)
    if called is None or not isinstance(called["arguments"], Mapping):
        return None
    recorded, content = (called["tool"], set(called["arguments"])), _split(called)[1]
    for fmt in map(tool_format, TOOL_FORMATS.built_in):
        call = fmt.parse(content)
        if isinstance(call, ToolCall) and (call.name, set(call.arguments)) == recorded:
            return fmt
    return None
