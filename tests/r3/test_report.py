"""Mismatch figures against values worked out by hand, and their invariants."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3.report import (
    f_tau,
    js_divergence,
    k3_kl,
    logprob_abs_diff,
    mismatch_metrics,
    route_mismatch,
    token_mult_prob_error,
)
from r3.routing import Routing, RoutingError, Span, SpanKind

TRAINER = np.log(np.array([0.5, 0.1, 0.2], dtype=np.float32))
ENGINE = np.log(np.array([0.25, 0.1, 0.5], dtype=np.float32))


def k3(r: float) -> float:
    return r - 1 - math.log(r)


def test_figures_worked_out_by_hand() -> None:
    ratios = [2.0, 1.0, 0.4]
    assert k3_kl(TRAINER, ENGINE) == pytest.approx(np.mean([k3(r) for r in ratios]), rel=1e-6)
    assert token_mult_prob_error(TRAINER, ENGINE) == pytest.approx((2 + 1 + 2.5) / 3, rel=1e-6)
    assert logprob_abs_diff(TRAINER, ENGINE) == pytest.approx((math.log(2) + math.log(2.5)) / 3, rel=1e-6)
    assert f_tau(TRAINER, ENGINE, 1.5) == pytest.approx(2 / 3)
    assert f_tau(TRAINER, ENGINE, 2.2) == pytest.approx(1 / 3)
    mixed = [(0.5, 0.25, 0.375), (0.1, 0.1, 0.1), (0.2, 0.5, 0.35)]
    expected = np.mean([0.5 * k3(p / m) + 0.5 * k3(q / m) for p, q, m in mixed])
    assert js_divergence(TRAINER, ENGINE) == pytest.approx(expected, rel=1e-6)


def test_the_mask_picks_the_tokens() -> None:
    mask = np.array([False, False, True])
    assert k3_kl(TRAINER, ENGINE, mask) == pytest.approx(k3(0.4), rel=1e-6)
    assert set(mismatch_metrics(TRAINER, ENGINE, mask)) == {
        "k3_kl",
        "f_tau_2",
        "token_mult_prob_error",
        "js_divergence",
        "logprob_abs_diff",
    }


@given(st.lists(st.tuples(st.floats(-20, 0), st.floats(-20, 0)), min_size=1, max_size=30))
def test_none_is_negative_and_equal_log_probs_give_none(pairs: list[tuple[float, float]]) -> None:
    trainer, engine = (np.array(side) for side in zip(*pairs, strict=True))
    values = mismatch_metrics(trainer, engine)
    assert min(values.values()) >= 0
    assert values["token_mult_prob_error"] >= 1
    same = mismatch_metrics(engine, engine)
    assert same == {**dict.fromkeys(same, 0.0), "token_mult_prob_error": 1.0}


def test_tiny_differences_keep_their_digits() -> None:
    trainer = np.full(4, -1.0) + 1e-9
    assert k3_kl(trainer, np.full(4, -1.0)) == pytest.approx(0.5e-18, rel=1e-3)


@pytest.mark.parametrize(
    ("trainer", "engine", "mask", "message"),
    [
        (np.zeros(3), np.zeros(2), None, "differ"),
        (np.zeros(3), np.zeros(3), np.zeros(2, dtype=bool), "differ"),
        (np.zeros(3), np.zeros(3), np.zeros(3, dtype=bool), "no token"),
        (np.array([0.0, -np.inf]), np.zeros(2), None, "1 of 2 .* not finite"),
        (np.array([0.0, np.nan]), np.zeros(2), None, "1 of 2 .* not finite"),
    ],
)
def test_what_cannot_be_compared_raises(trainer: np.ndarray, engine: np.ndarray, mask: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        k3_kl(trainer, engine, mask)  # type: ignore[arg-type]


def routing(experts: list[list[list[int]]], present: list[bool] | None = None) -> Routing:
    array = np.array(experts, dtype=np.uint8)
    kept = np.array([True] * len(array) if present is None else present)
    return Routing(array, kept, (Span(0, len(array), "", "", SpanKind.SAMPLED),), num_experts=8)


def test_routes_are_compared_as_sets_where_both_are_present() -> None:
    first = routing([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 1], [2, 3]], [[0, 0], [0, 0]]], [True] * 3 + [False])
    second = routing([[[1, 0], [3, 2]], [[4, 5], [6, 0]], [[2, 1], [2, 0]], [[5, 6], [5, 6]]])
    found = route_mismatch(first, second)
    assert found.tokens == 3
    assert found.router == pytest.approx(3 / 6)
    assert found.token == pytest.approx(2 / 3)
    assert found.layers_a_token == pytest.approx(1.0)
    assert found.histogram.tolist() == [1, 1, 1]
    assert found.by_layer.tolist() == pytest.approx([1 / 3, 2 / 3])


def test_routes_of_different_shapes_are_not_compared() -> None:
    one = routing([[[0, 1]]])
    with pytest.raises(RoutingError, match="can't compare"):
        route_mismatch(one, replace(one, num_experts=9))
    with pytest.raises(RoutingError, match="no token"):
        route_mismatch(one, replace(one, present=np.array([False])))
