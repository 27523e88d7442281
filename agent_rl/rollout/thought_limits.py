"""Measures and limits the thoughts at the start of a turn.

With ``rollout.max_thinking_tokens`` a request of a turn samples no more tokens than the limit allows. Thoughts that are
still open then are closed with the tokens of the model's family, and the turn continues after them (``p`` prompt, ``a``
sampled, ``c`` closing tokens, limit 3)::

    first request     p p p         samples a a a, finish length
    second request    p p p a a a c c         samples the rest of the turn
    loss_mask         0 0 0 1 1 1 0 0 1 1 1

The closing tokens are prompt tokens of the second request. So they have routes and no log-probs, as an observation has.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from agent_rl.rollout.initial_prompt import Renderer
from agent_rl.types import Completion, FinishReason, TokenIds


class ThoughtLength(NamedTuple):
    """Length of a turn's thoughts, with the marker that closes them; fields of ``agent_rl.types.Turn``."""

    thinking_tokens: int
    thinking_chars: int


def measure_thoughts(renderer: Renderer, tokens: TokenIds, text: str, closed: int = 0) -> ThoughtLength:
    """The thoughts in a turn's ``tokens``, whose text is ``text``. Thoughts that are not closed are the whole turn.
    ``closed``: the loop closed them with tokens up to this one; 0 if it did not."""
    if closed:
        return ThoughtLength(closed, len(renderer.decode(tokens[:closed])))
    reasoning = renderer.reasoning
    if not reasoning.begins(text):
        return ThoughtLength(0, 0)
    thoughts, close, _ = text.partition(reasoning.close)
    if not close:
        return ThoughtLength(len(tokens), len(text))
    return ThoughtLength(_prefix_with(renderer, tokens, reasoning.close), len(thoughts) + len(close))


def _prefix_with(renderer: Renderer, tokens: TokenIds, marker: str) -> int:
    """Length of the shortest prefix of ``tokens`` whose text has ``marker``; all tokens if none has."""
    # One more token never removes the marker, so the prefix is found by bisection.
    shorter = range(1, len(tokens))
    return 1 + bisect_left(shorter, True, key=lambda length: marker in renderer.decode(tokens[:length]))


class TurnBudget:
    """How many tokens the next request of a turn may sample, and when the turn's thoughts are closed.

    ``new_tokens``: limit of the turn's sampled tokens. ``context``: tokens that the sequence may still grow by.
    ``max_thinking_tokens``: limit of the tokens sampled in thoughts, without the marker that opens them; None: no
    limit. ``request``: limit of the tokens that the next request samples. ``closed``: length of the turn up to the end
    of the closing tokens, 0 if the loop did not close the thoughts. ``inserted``: number of closing tokens.
    """

    def __init__(self, renderer: Renderer, max_thinking_tokens: int | None, new_tokens: int, context: int) -> None:
        self._renderer, self._max_thinking_tokens = renderer, max_thinking_tokens
        self._new_tokens, self._context = new_tokens, context
        self.request = self.closed = self.inserted = 0

    @property
    def _remaining(self) -> int:
        return min(self._new_tokens, self._context)

    def close_thoughts(self, turn: TokenIds) -> TokenIds:
        """The tokens to append to ``turn`` before its next request: empty, or those that close its thoughts. Sets
        ``request``."""
        left = None if self.closed else self._thinking_left(turn)
        closing = self._renderer.end_of_thoughts if left == 0 else ()
        if len(closing) >= self._context:  # nothing could be sampled after them
            closing = ()
        if closing:
            self.closed, self.inserted = len(turn) + len(closing), len(closing)
            self._context -= len(closing)
        self.request = min(left or self._remaining, self._remaining)
        return closing

    def ends(self, completion: Completion) -> bool:
        """Whether the turn ends with ``completion``. An aborted request continues, and one that was only stopped by the
        limit of thoughts."""
        sampled = len(completion.tokens)
        self._new_tokens -= sampled
        self._context -= sampled
        if self._remaining < 1:
            return True
        if completion.finish is FinishReason.ABORT:
            return False
        return completion.finish is FinishReason.STOP or sampled < self.request

    def _thinking_left(self, turn: TokenIds) -> int | None:
        """Tokens that ``turn`` may still sample in thoughts; None if it is outside of them or they have no limit."""
        limit, reasoning = self._max_thinking_tokens, self._renderer.reasoning
        if limit is None:
            return None
        text = self._renderer.decode(turn)
        if reasoning.unclosed(text):
            opened = 0 if reasoning.prompt_opens else _prefix_with(self._renderer, turn, reasoning.open)
            return max(0, limit - len(turn) + opened)
        may_open = not reasoning.begins(text) and reasoning.open.startswith(text.lstrip())
        return limit + 1 if may_open else None
