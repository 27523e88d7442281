"""Ends a reply at the first stop sequence of its request, and finds where a strict call begins.

An engine without a tokenizer cannot search for text. So a request with stop sequences is sampled in pieces of
:data:`PIECE` tokens, and the text of the reply is searched after each piece. Tokens after the one that completes a stop
sequence are dropped, as an engine's own search would not sample them. Example: stop sequence ``</code>``, tokens
separated by ``|``::

    sampled    print|(1)|</|code|>\\n|Observation|: 1
    kept       print|(1)|</|code|>\\n                     trained, and context of the next reply
    shown      print(1)                                  what the program receives
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from agent_rl.rollout.initial_prompt import Renderer
from agent_rl.types import TokenIds
from tools import Reasoning
from tools.split_reasoning import split_reasoning

PIECE = 128
"""Tokens of one engine request: at most so many are sampled in vain after a stop sequence."""


class FoundStop(NamedTuple):
    """The stop sequence ``text`` at character ``start`` of a reply."""

    start: int
    text: str

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def find_stop(text: str, stops: Sequence[str], reasoning: Reasoning) -> FoundStop | None:
    """The stop sequence that the reply ``text`` completes first after its thoughts."""
    content = len(text) - len(split_reasoning(text, reasoning)[1])
    found = [FoundStop(start, stop) for stop in stops if (start := text.find(stop, content)) >= 0]
    return min(found, key=lambda stop: (stop.end, stop.start), default=None)


def tokens_until_stop(renderer: Renderer, tokens: TokenIds, stops: Sequence[str]) -> int | None:
    """Number of ``tokens`` up to the one that completes a stop sequence; None without a stop sequence."""
    text = renderer.decode(tokens)
    if (found := find_stop(text, stops, renderer.reasoning)) is None:
        return None
    until_stop = text[: found.end]
    shorter = range(1, len(tokens))
    return 1 + bisect_left(shorter, True, key=lambda length: renderer.decode(tokens[:length]).startswith(until_stop))


def tokens_of(renderer: Renderer, tokens: TokenIds, found: FoundStop) -> tuple[int, int]:
    """The number of the token with the first character of ``found``, and how many ``tokens`` say nothing after it."""

    def until(end: int) -> int:
        return bisect_right(range(len(tokens)), end, key=lambda length: len(renderer.decode(tokens[:length]))) - 1

    return until(found.start), until(found.end)
