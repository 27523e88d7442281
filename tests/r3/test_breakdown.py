"""The breakdown by turn and weight version: every position under its own label, and under no other."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3.mismatch.breakdown import Pair, mismatch_report
from r3.mismatch.report import mismatch_metrics
from r3.routing import Routing, Span, SpanKind

EXPERTS = 6
# The example of the module: two turns, the second with weights of another version.
SAMPLED = np.array([0, 0, 0, 1, 1, 0, 0, 1, 1], dtype=bool)
TURNS = np.array([1, 1, 1, 1, 1, 2, 2, 2, 2])
SPANS = (
    Span(0, 4, "9", "a", SpanKind.SAMPLED),
    Span(4, 8, "10", "b", SpanKind.SAMPLED),
    Span(8, 9, "", "", SpanKind.MISSING),
)


def example(differing_rows: tuple[int, ...] = (), off_by: dict[int, float] | None = None) -> Pair:
    """The example, with both experts of ``differing_rows`` exchanged and log-probs ``off_by`` so much."""
    experts = np.tile(np.array([0, 1], np.uint8), (9, 1, 1))
    engine = Routing(experts, np.arange(9) < 8, SPANS, EXPERTS)
    used = experts.copy()
    used[list(differing_rows)] = [2, 3]
    logprobs = np.where(SAMPLED, -1.0, 0.0)
    ours = logprobs.copy()
    for token, amount in (off_by or {}).items():
        ours[token] += amount
    return Pair(ours, logprobs, SAMPLED, TURNS, replace(engine, experts=used), engine)


@pytest.mark.parametrize(("row", "turn", "version"), [(0, 1, "9"), (3, 1, "9"), (4, 2, "10"), (7, 2, "10")])
def test_a_row_counts_for_the_turn_and_weights_that_computed_it(row: int, turn: int, version: str) -> None:
    report = mismatch_report([example(differing_rows=(row,))])
    assert [*report.by_turn, *report.by_weight_version] == [1, 2, "9", "10"], "in the order of their numbers"
    parts = {**report.by_turn, **report.by_weight_version}
    assert {key for key, part in parts.items() if part.routes and part.routes.router} == {turn, version}


@pytest.mark.parametrize(("token", "turn", "version"), [(3, 1, "9"), (4, 1, "9"), (7, 2, "10"), (8, 2, "10")])
def test_a_log_prob_counts_for_its_tokens_turn_and_the_weights_that_gave_it(
    token: int, turn: int, version: str
) -> None:
    report = mismatch_report([example(off_by={token: 0.5})])
    parts = {**report.by_turn, **report.by_weight_version}
    off = {key for key, part in parts.items() if part.logprobs and part.logprobs.metrics["k3_kl"].value > 0}
    assert off == {turn, version}
    assert report.total.logprobs.metrics["logprob_abs_diff"].value == pytest.approx(0.5 / 4)


def test_the_last_row_and_unsampled_tokens_are_not_compared() -> None:
    pair = example(differing_rows=(8,), off_by={0: 1.0, 5: 1.0})
    everywhere = np.ones(9, bool)
    ours, theirs = (replace(routes, present=everywhere) for routes in (pair.routes, pair.reference_routes))
    report = mismatch_report([replace(pair, routes=ours, reference_routes=theirs)])
    assert (report.total.routes.tokens, report.total.routes.router) == (8, 0)
    assert report.total.logprobs.metrics["k3_kl"].value == 0


@st.composite
def pairs(draw: st.DrawFn) -> list[Pair]:
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        tokens = draw(st.integers(2, 12))
        cut = draw(st.integers(1, tokens - 1))
        spans = (Span(0, cut, "1", "", SpanKind.SAMPLED), Span(cut, tokens, "2", "", SpanKind.SAMPLED))
        experts = generator.random((2, tokens, 2, EXPERTS)).argsort(axis=-1)[..., :2].astype(np.uint8)
        present = generator.random(tokens) < 0.8
        sampled = generator.random(tokens) < 0.5
        sampled[0], sampled[-1] = False, True
        routes = [Routing(side, present, spans, EXPERTS) for side in experts]
        turns = np.sort(generator.integers(1, 4, tokens))
        found.append(Pair(generator.normal(size=tokens), generator.normal(size=tokens), sampled, turns, *routes))
    return found


@settings(deadline=None, max_examples=40)
@given(pairs())
def test_parts_add_up_to_the_whole_and_each_is_that_of_its_positions_alone(sequences: list[Pair]) -> None:
    report = mismatch_report(sequences)
    total = report.total
    for parts in (report.by_turn.values(), report.by_weight_version.values()):
        assert sum(part.logprobs.tokens for part in parts if part.logprobs) == total.logprobs.tokens
        routes = [part.routes for part in parts if part.routes]
        assert sum(part.tokens for part in routes) == (total.routes.tokens if total.routes else 0)
        if total.routes:
            assert sum(part.experts for part in routes).tolist() == total.routes.experts.tolist()  # type: ignore[union-attr]
    values = {name: estimate.value for name, estimate in total.logprobs.metrics.items()}
    expected = metrics_of(sequences, [pair.sampled for pair in sequences])
    assert values == pytest.approx({name: expected[name] for name in values})
    for turn, part in report.by_turn.items():
        if part.logprobs:
            alone = metrics_of(sequences, [pair.sampled & (pair.turns == turn) for pair in sequences])
            assert part.logprobs.metrics["k3_kl"].value == pytest.approx(alone["k3_kl"])


def metrics_of(pairs: list[Pair], masks: list[np.ndarray]) -> dict[str, float]:
    ours = np.concatenate([pair.logprobs[mask] for pair, mask in zip(pairs, masks, strict=True)])
    theirs = np.concatenate([pair.reference_logprobs[mask] for pair, mask in zip(pairs, masks, strict=True)])
    return mismatch_metrics(ours, theirs)


def test_the_report_is_plain_json() -> None:
    written = mismatch_report([example(differing_rows=(2,))]).to_json()
    again = json.loads(json.dumps(written, allow_nan=False))
    assert again == written
    assert again["by_turn"]["1"]["routes"]["router"] == 0.25
    assert again["total"]["logprobs"]["metrics"]["k3_kl"]["low"] is None, "one sequence gives no interval"
