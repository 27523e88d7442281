"""An audit compares the rows of a trajectory with those that an engine returns later."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from support.trajectories import trajectory

from agent_rl.errors import EngineUnreachable
from agent_rl.rollout.route_audit import Auditor, audit_metrics, compare
from agent_rl.types import Completion, FinishReason, RouteAudit, StopReason, Trajectory
from r3.routing import Routing, Span, SpanKind

ROWS, LAYERS, EXPERTS = 12, 3, 16


def routing(spans: list[Span] | None = None) -> Routing:
    """Ten rows whose experts tell rows and layers apart; the last two are absent."""
    first = (np.arange(ROWS)[:, None] + np.arange(LAYERS)) % EXPERTS
    experts = np.stack([first, (first + 5) % EXPERTS], axis=2).astype(np.uint8)
    spans = spans or [Span(0, 6, "1", "a", SpanKind.PREFILLED), Span(6, 10, "1", "a", SpanKind.SAMPLED)]
    return Routing(experts, np.arange(ROWS) < 10, (*spans, Span(10, 12, "", "", SpanKind.MISSING)), EXPERTS)


def answer(cached: int, experts: Any = None, **changes: Any) -> Completion:
    """The rows requested again, all but the last; ``cached`` of them from the cache."""
    rows = routing().experts[: ROWS - 1] if experts is None else experts[: ROWS - 1]
    again = Routing(rows, np.ones(ROWS - 1, np.bool_), (), EXPERTS)
    made = Completion((), (), FinishReason.LENGTH, "1", "a", again, cached_tokens=cached)
    return replace(made, **changes)


def shifted(rows: slice) -> Any:
    """The experts with those of ``rows`` wrong in one of three layers."""
    experts = routing().experts.copy()
    experts[rows, 1] = (experts[rows, 1] + 1) % EXPERTS
    return experts


def test_the_order_of_experts_in_a_row_does_not_matter() -> None:
    flipped = routing().experts[:, :, ::-1]
    assert compare(routing(), answer(9, flipped), answer(0, flipped)) == RouteAudit(9 * LAYERS, 0, 10 * LAYERS, 0)


def test_cached_and_computed_rows_are_counted_separately() -> None:
    again, afresh = answer(8, shifted(slice(7, 12))), answer(2, shifted(slice(0, 5)))
    assert compare(routing(), again, afresh) == RouteAudit(8 * LAYERS, 1, 8 * LAYERS, 3)


@pytest.mark.parametrize(
    ("spans", "rows"),
    [
        ([Span(0, 6, "0", "a", SpanKind.PREFILLED), Span(6, 10, "1", "a", SpanKind.SAMPLED)], 4),
        ([Span(0, 6, "1", "b", SpanKind.PREFILLED), Span(6, 10, "1", "a", SpanKind.SAMPLED)], 4),
        ([Span(0, 6, "1", "a", SpanKind.PREFILLED), Span(6, 10, "1", "a", SpanKind.RECOMPUTED)], 6),
    ],
)
def test_rows_of_other_weights_or_engines_and_retractions_are_left_out(spans: list[Span], rows: int) -> None:
    assert compare(routing(spans), answer(10), answer(0)) == RouteAudit(rows * LAYERS, 0, rows * LAYERS, 0)


def test_responses_of_other_weights_or_engines_and_retractions_count_nothing() -> None:
    wrong = shifted(slice(0, 12))
    for changes in ({"weight_version": "2"}, {"engine": "b"}, {"retractions": 1}, {"routing": None}):
        given = answer(10, wrong, **changes)
        assert compare(routing(), given, replace(given, cached_tokens=0)) == RouteAudit(0, 0, 0, 0)


def engine(*responses: Completion | Exception) -> Any:
    return SimpleNamespace(prefill=AsyncMock(side_effect=responses))


def finished(**changes: Any) -> Trajectory:
    return replace(trajectory(1.0), tokens=np.arange(ROWS, dtype=np.int32), routing=routing(), **changes)


async def test_a_fraction_is_audited_on_the_engine_that_sampled() -> None:
    chances = iter([0.02, 0.005])
    sampled_by = engine(answer(9), answer(0))
    audit = Auditor(sampled_by, 0.01, chance=lambda: next(chances))
    assert (await audit(finished(), "s-1")).audit is None
    assert (await audit(finished(), "s-2")).audit == RouteAudit(9 * LAYERS, 0, 10 * LAYERS, 0)
    requests = [call.kwargs for call in sampled_by.prefill.await_args_list]
    assert requests == [{"session": "s-2", "afresh": False}, {"session": "s-2", "afresh": True}]


@pytest.mark.parametrize("changes", [{"routing": None}, {"stop": StopReason.SANDBOX_FAILURE, "reward": None}])
async def test_failed_trajectories_and_those_without_routes_are_not_audited(changes: dict[str, Any]) -> None:
    given = replace(finished(), **changes)
    assert await Auditor(engine(), 1.0)(given, "s") is given


async def test_a_failed_audit_keeps_the_trajectory() -> None:
    given = finished()
    assert await Auditor(engine(answer(9), EngineUnreachable("gone")), 1.0)(given, "s") is given


def test_a_step_without_audits_has_no_such_metric() -> None:
    assert audit_metrics([finished()]) == {}
    audits = [RouteAudit(0, 0, 30, 3), RouteAudit(0, 0, 10, 1)]
    found = audit_metrics([finished(audit=audit) for audit in audits])
    assert found == {"r3/audit_trajectories": 2, "r3/audit_mismatch": 0.1}
