"""The engine as the loop sees it: what samples, and what evaluates a finished sequence again; and a server of ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from agent_rl.types import Completion, SamplingParams, TokenIds
from r3.routing import Routing


class Engine(Protocol):
    """Samples a continuation of ``tokens``. Backends: an SGLang server over HTTP, or a script."""

    async def generate(
        self, tokens: TokenIds, sampling: SamplingParams, *, routes_from: int | None, session: str
    ) -> Completion:
        """Sample after ``tokens``.

        ``routes_from`` is the first row of routes wanted, or None for none; the answer's ``routing`` then has exactly
        ``len(tokens) + len(completion) - 1 - routes_from`` rows, or is None where the engine sent none: whether that
        may be is the caller's to say. ``session`` names the episode (keeps it on its engine).
        A request that the engine gave up is answered with what came until then and ``finish`` ABORT.
        Raises one of :mod:`agent_rl.errors`' engine errors once the retry budget is spent.
        """
        ...


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a server reports about itself. ``kv_dtype``: what it keeps keys and values in, ``auto`` for ``dtype``."""

    url: str
    model: str
    weight_version: str
    captures_routes: bool
    dtype: str
    kv_dtype: str
    max_total_tokens: int


@dataclass(frozen=True, slots=True)
class Scores:
    """A sequence's teacher-forced log-probs at temperature 1, each token's given those before it (0 for the first), and
    the version of the weights that gave them. ``routing``: all rows but the last token's, where they were asked for."""

    logprobs: tuple[float, ...]
    weight_version: str
    routing: Routing | None = None


class Scorer(Protocol):
    """Evaluates a whole sequence."""

    async def rescore(self, tokens: TokenIds, *, session: str) -> Scores:
        """Compute all of ``tokens`` afresh, no cached prefix used. ``session`` spreads evaluations over engines.

        Raises one of :mod:`agent_rl.errors`' engine errors once the retry budget is spent.
        """
        ...


class Server(Protocol):
    """A server that is ours to start, here or on another machine."""

    async def start(self) -> str:
        """Start it and wait until it is healthy; its address. Raises EngineStartError."""
        ...

    def death(self) -> str | None:
        """Why it is dead, in one line; None while it lives."""
        ...

    async def stop(self) -> None:
        """End all of its processes. Idempotent."""
        ...
