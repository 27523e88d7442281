"""Tokens of an evaluation's requests.

The tokens of a built-in engine are counted exactly. A chat endpoint reports those of each request as ``usage``. They
are unknown for an endpoint that reports none, and for policies without a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

from agent_rl.types import Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of requests and of their tokens. ``cached`` tokens are part of ``prompt``, ``reasoning`` tokens of
    ``completion``."""

    requests: int = 0
    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0

    @classmethod
    def parse(cls, counts: Any) -> Usage | None:
        """The usage in a stored row, or None. Raises TypeError or ValueError for anything else."""
        if counts is None:
            return None
        usage = cls(**counts)
        if not all(isinstance(count, int) and count >= 0 for count in astuple(usage)):
            raise ValueError(f"usage {counts!r} has a value that is not a number of tokens")
        return usage

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.requests + other.requests,
            self.prompt + other.prompt,
            self.completion + other.completion,
            self.cached + other.cached,
            self.reasoning + other.reasoning,
        )


def usage_of(trajectory: Trajectory) -> Usage | None:
    """The sum over an episode's turns; None if one of them is unknown."""
    return total(map(usage_of_turn, trajectory.turns))


def usage_of_turn(turn: Turn) -> Usage | None:
    """The tokens of a turn's request; None if they are unknown."""
    if turn.usage is None:
        return Usage(1, turn.prompt_tokens, turn.completion_tokens, turn.cached_tokens, turn.thinking_tokens)
    return Usage(1, **turn.usage) if turn.usage else None


def total(usages: Iterable[Usage | None]) -> Usage | None:
    """The sum of ``usages``; None if one of them is unknown."""
    result = Usage()
    for usage in usages:
        if usage is None:
            return None
        result += usage
    return result
