"""Turns as a conversation: what the agent thought, said and called, in each shipped tool-call format."""

from __future__ import annotations

from typing import Any

import pytest

from agent_rl.rollout.readable_turns import MAX_CHARS, conversation
from tools.formats import TOOL_FORMATS, tool_format
from tools.types import ToolCall

ARGUMENTS = {"command": "ls -l"}


def turn(text: str, tool: str | None = "bash", thinking_chars: int = 0) -> dict[str, Any]:
    return {"text": text, "tool": tool, "arguments": ARGUMENTS if tool else {}, "thinking_chars": thinking_chars}


@pytest.mark.parametrize("name", TOOL_FORMATS.built_in)
def test_calls_of_every_shipped_format_are_read(name: str) -> None:
    call = tool_format(name).render(ToolCall("bash", ARGUMENTS))
    (spoken,) = conversation([turn(call)])
    assert spoken == {"thoughts": "", "said": spoken["said"], "calls": [{"name": "bash", "arguments": ARGUMENTS}]}
    assert "ls -l" not in spoken["said"]


def test_thoughts_and_text_stand_apart_from_the_call() -> None:
    thoughts = "<think>Where?</think>"
    text = f"{thoughts}I look." + tool_format("hermes").render(ToolCall("bash", ARGUMENTS))
    for thinking_chars in (0, len(thoughts)):
        (spoken,) = conversation([turn(text, thinking_chars=thinking_chars)])
        assert (spoken["thoughts"], spoken["said"]) == ("Where?", "I look.")
        assert spoken["calls"] == [{"name": "bash", "arguments": ARGUMENTS}]


def test_a_call_that_is_not_in_the_text_stands_beside_it() -> None:
    """As the calls of a chat endpoint."""
    assert conversation([turn("I look."), turn("Done.", tool=None)]) == [
        {"thoughts": "", "said": "I look.", "calls": [{"name": "bash", "arguments": ARGUMENTS}]},
        {"thoughts": "", "said": "Done.", "calls": []},
    ]


def test_a_turn_without_a_call_keeps_its_text() -> None:
    call = tool_format("xml").render(ToolCall("bash", ARGUMENTS))
    spoken = conversation([turn(call), turn("<function=bash", tool=None), turn("x" * (MAX_CHARS + 1), tool=None)])
    assert [(one["said"][:14], one["calls"]) for one in spoken[1:]] == [("<function=bash", []), ("x" * 14, [])]
