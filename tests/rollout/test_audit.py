"""Which of a trajectory's rows are compared with what an engine answers later, and what is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.trajectories import trajectory

from agent_rl.errors import EngineUnreachable
from agent_rl.rollout.route_audit import Auditor, audit_metrics, compare
from agent_rl.types import Completion, FinishReason, RouteAudit, StopReason, TokenIds, Trajectory
from r3.routing import Routing, Span, SpanKind

ROWS, LAYERS, EXPERTS = 12, 3, 16


def routing(spans: list[Span] | None = None) -> Routing:
    """Ten rows whose experts tell rows and layers apart; the last two are absent."""
    first = (np.arange(ROWS)[:, None] + np.arange(LAYERS)) % EXPERTS
    experts = np.stack([first, (first + 5) % EXPERTS], axis=2).astype(np.uint8)
    spans = spans or [Span(0, 6, "1", "a", SpanKind.PREFILLED), Span(6, 10, "1", "a", SpanKind.SAMPLED)]
    return Routing(experts, np.arange(ROWS) < 10, (*spans, Span(10, 12, "", "", SpanKind.MISSING)), EXPERTS)


def answer(cached: int, experts: Any = None, **changes: Any) -> Completion:
    """The rows asked for again, all but the last; ``cached`` of them out of the cache."""
    rows = routing().experts[: ROWS - 1] if experts is None else experts[: ROWS - 1]
    again = Routing(rows, np.ones(ROWS - 1, np.bool_), (), EXPERTS)
    made = Completion((), (), FinishReason.LENGTH, "1", "a", again, cached_tokens=cached)
    return replace(made, **changes)


def shifted(rows: slice) -> Any:
    """The experts with those of ``rows`` wrong in one of three layers."""
    experts = routing().experts.copy()
    experts[rows, 1] = (experts[rows, 1] + 1) % EXPERTS
    return experts


def test_equal_rows_are_equal_in_whatever_order() -> None:
    flipped = routing().experts[:, :, ::-1]
    assert compare(routing(), answer(9, flipped), answer(0, flipped)) == RouteAudit(9 * LAYERS, 0, 10 * LAYERS, 0)


def test_what_came_out_of_the_cache_and_what_was_computed_are_told_apart() -> None:
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
def test_rows_of_other_weights_other_engines_and_retractions_are_left_out(spans: list[Span], rows: int) -> None:
    assert compare(routing(spans), answer(10), answer(0)) == RouteAudit(rows * LAYERS, 0, rows * LAYERS, 0)


def test_answers_of_other_weights_other_engines_and_retractions_make_no_alarm() -> None:
    wrong = shifted(slice(0, 12))
    for changes in ({"weight_version": "2"}, {"engine": "b"}, {"retractions": 1}, {"routing": None}):
        given = answer(10, wrong, **changes)
        assert compare(routing(), given, replace(given, cached_tokens=0)) == RouteAudit(0, 0, 0, 0)


class Told:
    """Answers what it is told, and notes what it was asked."""

    def __init__(self, *answers: Completion | Exception) -> None:
        self._answers, self.asked = list(answers), list[tuple[int, str, bool]]()

    async def prefill(self, tokens: TokenIds, *, session: str, afresh: bool) -> Completion:
        self.asked.append((len(tokens), session, afresh))
        given = self._answers.pop(0)
        if isinstance(given, Exception):
            raise given
        return given


def finished(**changes: Any) -> Trajectory:
    return replace(trajectory(1.0), tokens=np.arange(ROWS, dtype=np.int32), routing=routing(), **changes)


async def test_a_share_is_audited_on_the_engine_that_sampled() -> None:
    chances = iter([0.02, 0.005])
    engine = Told(answer(9), answer(0))
    audit = Auditor(engine, 0.01, chance=lambda: next(chances))
    assert (await audit(finished(), "s-1")).audit is None
    assert (await audit(finished(), "s-2")).audit == RouteAudit(9 * LAYERS, 0, 10 * LAYERS, 0)
    assert engine.asked == [(ROWS, "s-2", False), (ROWS, "s-2", True)]


@pytest.mark.parametrize("changes", [{"routing": None}, {"stop": StopReason.SANDBOX_FAILURE, "reward": None}])
async def test_what_has_no_routes_or_failed_is_not_audited(changes: dict[str, Any]) -> None:
    given = replace(finished(), **changes)
    assert await Auditor(Told(), 1.0)(given, "s") is given


async def test_an_engine_that_fails_an_audit_costs_no_trajectory() -> None:
    given = finished()
    assert await Auditor(Told(answer(9), EngineUnreachable("gone")), 1.0)(given, "s") is given


def test_a_step_without_audits_has_no_such_metric() -> None:
    assert audit_metrics([finished()]) == {}
    audits = [RouteAudit(0, 0, 30, 3), RouteAudit(0, 0, 10, 1)]
    found = audit_metrics([finished(audit=audit) for audit in audits])
    assert found == {"r3/audit_trajectories": 2, "r3/audit_mismatch": 0.1}
