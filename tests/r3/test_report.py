"""Mismatch figures against values worked out by hand and naive references, and their invariants."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3.mismatch import report
from r3.routing import Routing, RoutingError, Span, SpanKind

TRAINER = np.log(np.array([0.5, 0.1, 0.2], dtype=np.float32))
ENGINE = np.log(np.array([0.25, 0.1, 0.5], dtype=np.float32))


def k3(r: float) -> float:
    return r - 1 - math.log(r)


def test_figures_worked_out_by_hand() -> None:
    ratios = [2.0, 1.0, 0.4]
    assert report.k3_kl(TRAINER, ENGINE) == pytest.approx(np.mean([k3(r) for r in ratios]), rel=1e-6)
    assert report.token_mult_prob_error(TRAINER, ENGINE) == pytest.approx((2 + 1 + 2.5) / 3, rel=1e-6)
    assert report.logprob_abs_diff(TRAINER, ENGINE) == pytest.approx((math.log(2) + math.log(2.5)) / 3, rel=1e-6)
    assert report.f_tau(TRAINER, ENGINE, 1.5) == pytest.approx(2 / 3)
    assert report.f_tau(TRAINER, ENGINE, 2.2) == pytest.approx(1 / 3)
    mixed = [(0.5, 0.25, 0.375), (0.1, 0.1, 0.1), (0.2, 0.5, 0.35)]
    expected = np.mean([0.5 * k3(p / m) + 0.5 * k3(q / m) for p, q, m in mixed])
    assert report.js_divergence(TRAINER, ENGINE) == pytest.approx(expected, rel=1e-6)


def test_the_mask_picks_the_tokens() -> None:
    mask = np.array([False, False, True])
    assert report.k3_kl(TRAINER, ENGINE, mask) == pytest.approx(k3(0.4), rel=1e-6)
    assert report.mismatch_metrics(TRAINER, ENGINE)["logprob_abs_diff_max"] == pytest.approx(math.log(2.5), rel=1e-6)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-20, 0), st.floats(-20, 0)), min_size=1, max_size=30))
def test_none_is_negative_and_equal_log_probs_give_none(pairs: list[tuple[float, float]]) -> None:
    trainer, engine = (np.array(side) for side in zip(*pairs, strict=True))
    values = report.mismatch_metrics(trainer, engine)
    assert min(values.values()) >= 0
    assert values["token_mult_prob_error"] >= 1
    same = report.mismatch_metrics(engine, engine)
    assert same == {**dict.fromkeys(same, 0.0), "token_mult_prob_error": 1.0}


def test_tiny_differences_keep_their_digits() -> None:
    trainer = np.full(4, -1.0) + 1e-9
    assert report.k3_kl(trainer, np.full(4, -1.0)) == pytest.approx(0.5e-18, rel=1e-3)


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
        report.k3_kl(trainer, engine, mask)  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.lists(st.floats(-8, 8), min_size=1, max_size=40), st.lists(st.floats(1, 100), min_size=1, max_size=8))
def test_the_curve_is_the_share_of_tokens_beyond_each_factor(log_r: list[float], taus: list[float]) -> None:
    values = np.array(log_r)
    curve = report.f_tau_curve(values, taus)
    for tau, share in zip(taus, curve, strict=True):
        beyond = sum(abs(value) > math.log(tau) for value in log_r)
        assert share == pytest.approx(beyond / len(log_r), abs=1e-12)
        assert share == pytest.approx(report.f_tau(values, np.zeros(len(values)), tau), abs=1e-12)
    assert (np.diff(report.f_tau_curve(values)) <= 0).all(), "F falls with tau"
    assert 2.0 in report.TAUS


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-3, 3)), min_size=1, max_size=40))
def test_estimates_are_the_plain_means_within_their_interval(tokens: list[tuple[int, float]]) -> None:
    sequence, log_r = (np.array(side) for side in zip(*tokens, strict=True))
    found = report.logprob_mismatch(log_r.astype(float), sequence)
    expected = report.mismatch_metrics(log_r.astype(float), np.zeros(len(log_r)))
    del expected["logprob_abs_diff_max"]  # no mean
    assert {name: estimate.value for name, estimate in found.metrics.items()} == pytest.approx(expected)
    assert (found.tokens, found.sequences) == (len(tokens), len(set(sequence.tolist())))
    for name, estimate in found.metrics.items():
        if found.sequences == 1:
            assert math.isnan(estimate.low)
            assert math.isnan(estimate.high)
            continue
        means = [
            report.mismatch_metrics(log_r[sequence == which], np.zeros((sequence == which).sum()))[name]
            for which in set(sequence.tolist())
        ]
        assert min(means) - 1e-9 <= estimate.low <= estimate.high <= max(means) + 1e-9


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Sequences of tokens that share an effect: the interval of 95 % must widen with it, or it would cover far less."""
    generator, covered = np.random.default_rng(0), 0
    for _ in range(100):
        means = generator.normal(1.0, 1.0, size=60)
        sums, counts = means * 50 + generator.normal(0, 50**0.5, 60), np.full(60, 50.0)
        estimate = report.estimate_ratios({"mean": sums}, counts)["mean"]
        covered += estimate.low < 1.0 < estimate.high
    assert 88 <= covered <= 99


def test_tables_of_as_many_sequences_get_the_same_draws() -> None:
    one, other = np.arange(12.0).reshape(6, 2), np.arange(6.0)[:, None]
    np.testing.assert_array_equal(report.resampled_sums(one)[:, 0], 2 * report.resampled_sums(other)[:, 0])
    assert report.resampled_sums(np.ones((6, 1))).tolist() == [[6.0]] * 1000


def test_routes_of_different_shapes_are_not_compared() -> None:
    one = Routing(np.array([[[0, 1]]], np.uint8), np.ones(1, bool), (Span(0, 1, "", "", SpanKind.SAMPLED),), 8)
    with pytest.raises(RoutingError, match="can't compare"):
        report.differing_experts(one, replace(one, num_experts=9))
    with pytest.raises(RoutingError, match="no token"):
        report.route_mismatch(
            report.differing_experts(one, replace(one, present=np.array([False]))), np.zeros(0, int), top_k=2
        )


@st.composite
def route_pairs(draw: st.DrawFn) -> tuple[Routing, Routing]:
    """Two routings of one shape; rows mostly equal, some absent on either side."""
    tokens, layers, experts = draw(st.integers(1, 8)), draw(st.integers(1, 3)), draw(st.integers(3, 6))
    top_k = draw(st.integers(1, experts))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    first, other = generator.random((2, tokens, layers, experts)).argsort(axis=-1)[..., :top_k].astype(np.uint8)
    second = np.where(generator.random((tokens, layers, 1)) < 0.6, first[..., ::-1], other)
    spans = (Span(0, tokens, "", "", SpanKind.SAMPLED),)
    present = generator.random((2, tokens)) < 0.8
    present[:, 0] = True
    return Routing(first, present[0], spans, experts), Routing(second, present[1], spans, experts)


@settings(deadline=None)
@given(route_pairs(), st.integers(1, 3))
def test_route_figures_are_those_of_a_naive_count(pair: tuple[Routing, Routing], sequences: int) -> None:
    first, second = pair
    rows = [row for row in range(first.tokens) if first.present[row] and second.present[row]]
    naive = [
        [len(set(a.tolist()) - set(b.tolist())) for a, b in zip(first.experts[row], second.experts[row], strict=True)]
        for row in rows
    ]
    differ = report.differing_experts(first, second)
    assert differ.tolist() == naive == report.differing_experts(second, first).tolist()
    sequence = np.arange(len(rows)) % sequences
    found = report.route_mismatch(differ, sequence, first.top_k)
    flat = [count for row in naive for count in row]
    assert found.router == pytest.approx(sum(count > 0 for count in flat) / len(flat))
    layers = [sum(count > 0 for count in row) for row in naive]
    assert found.layers.tolist() == [layers.count(n) for n in range(first.moe_layers + 1)]
    assert found.by_layer.tolist() == pytest.approx(np.mean(np.array(naive) > 0, axis=0).tolist())
    assert found.experts.tolist() == [
        [column.count(n) for n in range(first.top_k + 1)] for column in zip(*naive, strict=True)
    ]
    assert found.token == pytest.approx(sum(count > 0 for count in layers) / len(layers))
    means = [np.mean([n for n, s in zip(layers, sequence, strict=True) if s == which]) for which in set(sequence)]
    assert found.sequence == pytest.approx(np.mean(means))
    assert found.by_sequence.sum(axis=1).tolist() == pytest.approx(means)
