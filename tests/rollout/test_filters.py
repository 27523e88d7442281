from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.trajectories import trajectory

from agent_rl.rollout.filters import filter_metrics, length_report, masked_stops, teaches
from agent_rl.types import Group, StopReason, Trajectory

COMPACT = masked_stops("compact")


def group(*members: Trajectory) -> Group:
    return Group("t", members)


def test_the_stop_reasons_that_each_filter_masks() -> None:
    assert masked_stops("none") == frozenset()
    assert masked_stops("overlong") == {StopReason.CONTEXT_FULL}
    assert {StopReason.CONTEXT_FULL, StopReason.MAX_TURNS, StopReason.TIME_LIMIT} == COMPACT


@pytest.mark.parametrize("rewards", [(1.0, 1.0), (0.0, 0.0), (0.5, 0.5), (1.0,)])
def test_a_group_without_contrast_teaches_nothing(rewards: tuple[float, ...]) -> None:
    assert not teaches(group(*map(trajectory, rewards)))


def test_a_group_with_contrast_teaches() -> None:
    assert teaches(group(trajectory(1.0), trajectory(0.0), trajectory(0.0)))


def test_a_group_whose_every_trajectory_is_masked_teaches_nothing() -> None:
    long = group(trajectory(1.0, stop=StopReason.MAX_TURNS), trajectory(0.0, stop=StopReason.CONTEXT_FULL))
    assert not teaches(long, COMPACT)
    assert teaches(long, masked_stops("overlong")), "the one that ran out of turns is trained on"
    nothing_sampled = group(trajectory(1.0, sampled=0), trajectory(0.0, sampled=0))
    assert not teaches(nothing_sampled)


def test_the_metrics_of_a_hand_made_step() -> None:
    kept = [group(trajectory(1.0, 10), trajectory(0.0, 30), trajectory(0.0, 60, StopReason.MAX_TURNS))]
    discarded = [group(trajectory(1.0, 4), trajectory(1.0, 6)), group(trajectory(0.0, 100), trajectory(0.0, 90))]
    values = filter_metrics(kept, discarded, COMPACT)
    counts = {"groups_drawn": 3, "groups_discarded": 2, "discarded_solved": 1, "discarded_unsolved": 1}
    counts |= {"masked_trajectories": 1, "masked_token_fraction": 60 / 300, "length_ratio": 20 / (300 / 7)}
    lengths = {"trained_tokens_mean": 20, "discarded_tokens_mean": 50, "discarded_tokens_max": 100}
    expected = {**counts, **lengths, "discarded_tokens_p50": 48}
    assert {name: values[f"filter/{name}"] for name in expected} == pytest.approx(expected)


def test_the_length_ratio_is_one_without_trained_groups() -> None:
    assert filter_metrics([group(trajectory(0.0), trajectory(0.0))], [])["filter/length_ratio"] == 1.0
    assert filter_metrics([], [])["filter/length_ratio"] == 1.0


@given(
    st.lists(st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.integers(0, 9)), min_size=2, max_size=4), max_size=6)
)
def test_a_filter_that_leaves_nothing_out_has_ratio_one(drawn: list[list[tuple[float, int]]]) -> None:
    groups = [group(*(trajectory(reward, sampled) for reward, sampled in members)) for members in drawn]
    kept = [each for each in groups if teaches(each)]
    values = filter_metrics(kept, [])
    assert values["filter/groups_drawn"] == len(kept)
    if all(sampled for members in drawn for _, sampled in members):
        assert values["filter/length_ratio"] == pytest.approx(1.0)


def test_a_bias_of_lengths_beyond_the_noise_is_reported() -> None:
    rng = np.random.default_rng(0)
    unbiased = np.exp(rng.normal(0.0, 0.1, 40)).tolist()
    assert length_report(unbiased) is None
    biased = np.exp(rng.normal(0.3, 0.1, 40)).tolist()
    assert (line := length_report(biased)) is not None
    assert "over 40 steps" in line
    assert "1.3" in line
    assert length_report(biased[:4]) is None, "too few steps to tell"
    assert length_report([1.0] * 20) is None
    assert length_report([math.exp(-0.2 + 1e-3 * (at % 2)) for at in range(6)]) is not None
