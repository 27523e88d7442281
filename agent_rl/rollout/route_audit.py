"""Audits a running engine: requests the routes of a finished trajectory cached_run and compares them.

::

    1 % of finished trajectories ──┬── the same prompt                  rows from the prefix cache: equal rows
                                   └── the same prompt without cache    rows of a prefill: equal up to rounding

The probe tests an idle engine once. The audit detects errors that occur only under load or after hours: slots of the
route buffer reused by another request, or rows of a CUDA graph or rank that captures nothing. It does not detect a row
that is wrong in the same way each time.

Rows from the cache may belong to a sibling that sampled the same tokens at the same time; they differ by rounding. Rows
computed by another engine, with other weights or after a retraction are not compared.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from agent_rl.engine.sglang import SGLangEngine
from agent_rl.errors import EngineError
from agent_rl.types import Completion, RouteAudit, Trajectory
from r3.routing import Routing, SpanKind

_COMPARED = (SpanKind.SAMPLED, SpanKind.PREFILLED)


class Auditor:
    """Returns a ``share`` of the finished trajectories with ``audit`` set, the others unchanged.

    If the engine fails, the trajectory is returned without an audit. ``chance`` returns numbers in [0, 1).
    """

    def __init__(self, engine: SGLangEngine, share: float, *, chance: Callable[[], float] = random.random) -> None:
        self._engine, self._share, self._chance = engine, share, chance

    async def __call__(self, trajectory: Trajectory, session: str) -> Trajectory:
        """``session`` is the session that sampled the trajectory, so that the same engine is used."""
        routing = trajectory.routing
        if routing is None or trajectory.stop.infrastructure or self._chance() >= self._share:
            return trajectory
        tokens = trajectory.tokens.tolist()
        try:
            cached_run = await self._engine.prefill(tokens, session=session, afresh=False)
            afresh = await self._engine.prefill(tokens, session=session, afresh=True)
        except EngineError:
            return trajectory
        return replace(trajectory, audit=await asyncio.to_thread(compare, routing, cached_run, afresh))


def compare(routing: Routing, cached_run: Completion, afresh: Completion) -> RouteAudit:
    """Compare a trajectory's ``routing`` with a run that may use the prefix cache and a run without cache."""
    cached = _differing(routing, cached_run, 0, cached_run.cached_tokens)
    prefilled = _differing(routing, afresh, afresh.cached_tokens, routing.tokens)
    return RouteAudit(cached.size, int(cached.sum()), prefilled.size, int(prefilled.sum()))


def _differing(routing: Routing, completion: Completion, start: int, stop: int) -> NDArray[np.bool_]:
    """``[compared rows, moe_layers]``: which expert sets in rows ``[start, stop)`` differ."""
    if completion.routing is None or completion.retractions:
        return np.zeros((0, routing.moe_layers), np.bool_)
    rows = _comparable(routing, completion)[: completion.routing.tokens]
    rows[:start] = rows[stop:] = False
    (chosen,) = rows.nonzero()
    mine, now = routing.experts[chosen], completion.routing.experts[chosen]
    differ = (mine != now).any(axis=2)
    differ[differ] = (np.sort(mine[differ], axis=1) != np.sort(now[differ], axis=1)).any(axis=1)
    return differ


def _comparable(routing: Routing, completion: Completion) -> NDArray[np.bool_]:
    """``[tokens]``: the rows that the engine of ``completion`` computed with its present weights."""
    rows = np.zeros(routing.tokens, np.bool_)
    for span in routing.spans:
        same = (span.engine, span.weight_version) == (completion.engine, completion.weight_version)
        rows[span.start : span.stop] = same and span.kind in _COMPARED
    return rows


def audit_metrics(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """``r3/audit_*`` of the audited ``trajectories``; empty if there are none."""
    audits = [trajectory.audit for trajectory in trajectories if trajectory.audit is not None]
    if not audits:
        return {}
    metrics = {"r3/audit_trajectories": float(len(audits))}
    if cached := sum(audit.cached for audit in audits):
        metrics["r3/audit_cached_mismatch"] = sum(audit.cached_differing for audit in audits) / cached
    if prefilled := sum(audit.prefilled for audit in audits):
        metrics["r3/audit_mismatch"] = sum(audit.prefilled_differing for audit in audits) / prefilled
    return metrics
