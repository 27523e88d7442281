"""Measures the thoughts at the start of a sampled turn."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from agent_rl.rollout.initial_prompt import Renderer
from agent_rl.types import TokenIds


class ThoughtLength(NamedTuple):
    """Length of a turn's thoughts, with the marker that closes them; fields of ``agent_rl.types.Turn``."""

    thinking_tokens: int
    thinking_chars: int


def measure_thoughts(renderer: Renderer, sampled: TokenIds, text: str) -> ThoughtLength:
    """The thoughts in ``sampled``, whose text is ``text``. Thoughts that are not closed are the whole turn."""
    reasoning = renderer.reasoning
    if not reasoning.begins(text):
        return ThoughtLength(0, 0)
    thoughts, close, _ = text.partition(reasoning.close)
    if not close:
        return ThoughtLength(len(sampled), len(text))
    # One more token never removes the marker, so the shortest prefix that has it is found by bisection.
    before = bisect_left(range(len(sampled)), True, key=lambda last: close in renderer.decode(sampled[: last + 1]))
    return ThoughtLength(before + 1, len(thoughts) + len(close))
