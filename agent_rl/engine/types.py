"""The engine's interfaces: sampling, evaluating a finished sequence, and starting a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from agent_rl.types import Completion, SamplingParams, TokenIds, TopTokens
from r3.routing import Routing


class Engine(Protocol):
    """Samples a continuation of ``tokens``: an SGLang server over HTTP, or a script."""

    async def generate(
        self, tokens: TokenIds, sampling: SamplingParams, *, routes_from: int | None, session: str
    ) -> Completion:
        """Sample after ``tokens``.

        ``routes_from``: the first row of routes to return, or None for no routes. The result's ``routing`` has exactly
        ``len(tokens) + len(completion) - 1 - routes_from`` rows, or is None if the engine sent none; the caller decides
        whether that is an error. ``session`` names the episode and keeps it on its engine. An aborted request returns
        the tokens sampled so far with ``finish`` ABORT. Raises one of :mod:`agent_rl.errors`' engine errors once the
        retry budget is spent.
        """
        ...


@runtime_checkable
class Constraining(Protocol):
    """An engine that can constrain a reply. Optional."""

    async def grammar(self, form: Mapping[str, Any]) -> str:
        """``form`` (:mod:`tools.formats.grammars`) as :attr:`SamplingParams.grammar`.

        Raises GrammarRefused for a form that no grammar expresses, GrammarsUnsupported if the engine has none.
        """
        ...


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A server's report about itself. ``kv_dtype``: data type of keys and values, ``auto`` for ``dtype``."""

    url: str
    model: str
    weight_version: str
    captures_routes: bool
    dtype: str
    kv_dtype: str
    max_total_tokens: int


@dataclass(frozen=True, slots=True)
class Scores:
    """Teacher-forced log-probs of a sequence at temperature 1 (0 for the first token), and the version of the
    weights. ``routing``: all rows but the last, if requested. ``top``: if requested, the most likely tokens in place of
    each token but the first."""

    logprobs: tuple[float, ...]
    weight_version: str
    routing: Routing | None = None
    top: TopTokens | None = None


class Server(Protocol):
    """A server that we start, on this machine or another."""

    @property
    def gpus(self) -> Sequence[str]:
        """The GPUs of its tensor ranks by name, as in ``CUDA_VISIBLE_DEVICES``; empty on a CPU or another machine."""
        ...

    async def start(self) -> str:
        """Start the server and wait until it is healthy; returns its address. Raises EngineStartError."""
        ...

    def death(self) -> str | None:
        """Why the server is dead, in one line; None while it runs."""
        ...

    async def stop(self) -> None:
        """End all of its processes. Idempotent."""
        ...
