"""A running engine's routes asked for again: what the rows are now that a trajectory was sampled with.

::

    a finished trajectory, one in a hundred ──┬── its prompt as it stands    rows out of the prefix cache: the same rows
                                              └── the same, no cache used    rows of a prefill: the same up to rounding

The probe asks an engine that does nothing else, once. What goes wrong only under load, or after hours, shows here:
slots of the route buffer that were given to another request, rows of a graph or a rank that captures nothing. A row
that is wrong in the same way each time it is computed does not show.

Rows out of the cache may be a sibling's, where several sampled the same tokens at once: those differ by rounding too.
What another engine or other weights computed, and what was computed again after a retraction, is not compared.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agent_rl.errors import EngineError
from agent_rl.types import Completion, RouteAudit, TokenIds, Trajectory
from r3.routing import Routing, SpanKind

_COMPARED = (SpanKind.SAMPLED, SpanKind.PREFILLED)


class Prefiller(Protocol):
    """Computes a sequence whose every token is given."""

    async def prefill(self, tokens: TokenIds, *, session: str, afresh: bool) -> Completion:
        """The routes of ``tokens`` (a token is sampled after them); ``afresh`` takes no prefix from the cache.

        Raises one of :mod:`agent_rl.errors`' engine errors once the retry budget is spent.
        """
        ...


class Auditor:
    """Gives a ``share`` of finished trajectories back with their ``audit``, the others as they are.

    Where the engine fails meanwhile there is no audit, and nothing is lost. ``chance`` gives numbers in [0, 1).
    """

    def __init__(self, engine: Prefiller, share: float, *, chance: Callable[[], float] = random.random) -> None:
        self._engine, self._share, self._chance = engine, share, chance

    async def __call__(self, trajectory: Trajectory, session: str) -> Trajectory:
        """``session`` is the one that sampled it, so that the engine asked is the one that answered then."""
        held = trajectory.routing
        if held is None or trajectory.stop.infrastructure or self._chance() >= self._share:
            return trajectory
        tokens = trajectory.tokens.tolist()
        try:
            again = await self._engine.prefill(tokens, session=session, afresh=False)
            afresh = await self._engine.prefill(tokens, session=session, afresh=True)
        except EngineError:
            return trajectory
        return replace(trajectory, audit=await asyncio.to_thread(compare, held, again, afresh))


def compare(held: Routing, again: Completion, afresh: Completion) -> RouteAudit:
    """``held`` are a trajectory's rows; ``again`` what its tokens give now, ``afresh`` the same without a cache."""
    cached = _differing(held, again, 0, again.cached_tokens)
    prefilled = _differing(held, afresh, afresh.cached_tokens, held.tokens)
    return RouteAudit(cached.size, int(cached.sum()), prefilled.size, int(prefilled.sum()))


def _differing(held: Routing, answer: Completion, start: int, stop: int) -> NDArray[np.bool_]:
    """``[compared rows, moe_layers]``: which of the sets in rows ``[start, stop)`` differ."""
    if answer.routing is None or answer.retractions:
        return np.zeros((0, held.moe_layers), np.bool_)
    rows = _comparable(held, answer)[: answer.routing.tokens]
    rows[:start] = rows[stop:] = False
    (chosen,) = rows.nonzero()
    mine, now = held.experts[chosen], answer.routing.experts[chosen]
    differ = (mine != now).any(axis=2)
    differ[differ] = (np.sort(mine[differ], axis=1) != np.sort(now[differ], axis=1)).any(axis=1)
    return differ


def _comparable(held: Routing, answer: Completion) -> NDArray[np.bool_]:
    """``[tokens]``: the rows that the engine of ``answer`` computed with the weights that it has now."""
    rows = np.zeros(held.tokens, np.bool_)
    for span in held.spans:
        same = (span.engine, span.weight_version) == (answer.engine, answer.weight_version)
        rows[span.start : span.stop] = same and span.kind in _COMPARED
    return rows


def audit_metrics(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """``r3/audit_*`` of those among ``trajectories`` that were audited; empty where none was."""
    audits = [trajectory.audit for trajectory in trajectories if trajectory.audit is not None]
    if not audits:
        return {}
    metrics = {"r3/audit_trajectories": float(len(audits))}
    if cached := sum(audit.cached for audit in audits):
        metrics["r3/audit_cached_mismatch"] = sum(audit.cached_differing for audit in audits) / cached
    if prefilled := sum(audit.prefilled for audit in audits):
        metrics["r3/audit_mismatch"] = sum(audit.prefilled_differing for audit in audits) / prefilled
    return metrics
