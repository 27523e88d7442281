"""An engine that returns scripted tokens: with routes, for tests and benchmarks of the loop around it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from agent_rl.errors import EngineRejected
from agent_rl.types import Completion, FinishReason, SamplingParams, TokenIds
from r3.kept_tokens import KeptTokens
from r3.payload import RouteLayout
from r3.routing import Routing, Span, SpanKind, narrowest_dtype

Policy = Callable[[str, int, TokenIds], Sequence[int]]
"""``(session, turn, tokens so far) -> tokens to "sample"``. May raise an engine error to simulate one."""


class ScriptedEngine:
    """Implements ``agent_rl.engine.types.Engine`` without a model.

    ``policy`` returns the sampled tokens. ``layout`` is the shape of the routes (None: no routes available). Row i is
    :func:`scripted_rows` of i, so a misplaced row is detected. Every sampled token has log-prob ``logprob``. A response
    takes ``latency`` seconds. ``calls`` counts responses, ``rows_sent`` rows of routes.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        layout: RouteLayout | None = None,
        latency: float = 0.0,
        logprob: float = -0.5,
        weight_version: str = "scripted",
    ) -> None:
        self._policy = policy
        self._layout = layout
        self._latency = latency
        self._logprob = logprob
        self._turns: Counter[str] = Counter()
        self._rows: NDArray[np.unsignedinteger] | None = None
        self.weight_version = weight_version
        self.calls = 0
        self.rows_sent = 0

    async def generate(
        self, tokens: TokenIds, sampling: SamplingParams, *, routes_from: int | None, session: str
    ) -> Completion:
        """The session's next turn, truncated at ``sampling.max_new_tokens`` with finish ``length``."""
        started = time.perf_counter()
        scripted = tuple(self._policy(session, self._turns[session], tokens))
        routing = self._routing(routes_from, len(tokens), min(len(scripted), sampling.max_new_tokens))
        if self._latency:
            await asyncio.sleep(self._latency)
        self._turns[session] += 1
        self.calls += 1
        sampled = scripted[: sampling.max_new_tokens]
        return Completion(
            tokens=sampled,
            logprobs=(self._logprob,) * len(sampled),
            finish=FinishReason.STOP if len(sampled) == len(scripted) else FinishReason.LENGTH,
            weight_version=self.weight_version,
            engine="scripted",
            routing=routing,
            kept=KeptTokens.from_rows([[token, token + 1] for token in sampled]) if sampling.keep_mask else None,
            cached_tokens=routes_from or 0,
            seconds=time.perf_counter() - started,
        )

    def _routing(self, routes_from: int | None, prompt: int, completion: int) -> Routing | None:
        if routes_from is None:
            return None
        if self._layout is None:
            raise EngineRejected("routes requested from a scripted engine without a layout")
        stop = prompt + completion - 1
        if not 0 <= routes_from <= prompt:
            raise EngineRejected(f"routes requested from row {routes_from}, expected a row in [0, {prompt}]")
        experts = self._rows_before(max(stop, routes_from), self._layout)[routes_from:]
        self.rows_sent += len(experts)
        sampled_from = min(max(prompt - 1 - routes_from, 0), len(experts))
        spans = (
            Span(0, sampled_from, self.weight_version, "scripted", SpanKind.PREFILLED),
            Span(sampled_from, len(experts), self.weight_version, "scripted", SpanKind.SAMPLED),
        )
        present = np.ones(len(experts), dtype=np.bool_)
        return Routing(
            experts, present, tuple(span for span in spans if span.start < span.stop), self._layout.num_experts
        )

    def _rows_before(self, stop: int, layout: RouteLayout) -> NDArray[np.unsignedinteger]:
        """Rows 0 to ``stop`` of a table that doubles when it is too short."""
        if self._rows is None or len(self._rows) < stop:
            self._rows = scripted_rows(0, 2 * stop, layout)
        return self._rows[:stop]


def scripted_rows(start: int, stop: int, layout: RouteLayout) -> NDArray[np.unsignedinteger]:
    """Rows ``start`` to ``stop``, ``[stop - start, moe_layers, top_k]``: distinct experts per row, and no two equal
    rows.

    The first expert of each layer is a digit of the row's number in base ``num_experts``; the others follow it. So up
    to ``num_experts ** moe_layers`` rows are distinguishable.
    """
    rows = np.arange(start, stop, dtype=np.int64)[:, None, None]
    # Digits beyond bit 62 are 0 for every row number; the clipped power yields 0 there.
    powers = [min(layout.num_experts**layer, 1 << 62) for layer in range(len(layout.moe_layer_ids))]
    digits = rows // np.array(powers, dtype=np.int64)[None, :, None]
    experts = (digits + np.arange(layout.top_k)[None, None, :]) % layout.num_experts
    return experts.astype(narrowest_dtype(layout.num_experts))
