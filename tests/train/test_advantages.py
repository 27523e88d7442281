"""Group-relative advantages."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support import trajectories

from agent_rl.config import Baseline, OverlongConfig, TrainConfig
from agent_rl.config.advantages import AdvantageSpec
from agent_rl.controller.advantages import Centered, build_samples, group_advantages, overlong_penalty
from agent_rl.errors import TrainerError
from agent_rl.types import Group, StopReason, Trajectory, VersionSpan
from r3.routing import Routing, Span, SpanKind, append_span, validate
from sandbox import registry as plugins


def routing(*present: bool) -> Routing:
    """Rows of two layers, top-1 of four; absent where ``present`` says so."""
    mask = np.array(present)
    spans: list[Span] = []
    for row, known in enumerate(present):
        append_span(spans, Span(row, row + 1, "0", "e", SpanKind.SAMPLED if known else SpanKind.MISSING))
    return Routing(np.where(mask, 3, 0).astype(np.uint8).repeat(2).reshape(-1, 2, 1), mask, tuple(spans), 4)


WHOLE, HOLED = routing(True, True, True, False), routing(True, False, True, False)


def trajectory(reward: float | None, token: int = 1) -> Trajectory:
    stop = StopReason.SUBMITTED if reward is not None else StopReason.SANDBOX_FAILURE
    made, tokens = trajectories.trajectory(reward or 0.0, stop=stop), np.full(4, token, np.int32)
    mask = np.array([False, False, True, True])
    return replace(made, tokens=tokens, loss_mask=mask, logprobs=np.zeros(4, np.float32), reward=reward, versions=())


def group(*rewards: float | None) -> Group:
    return Group("t", tuple(trajectory(reward, token=i) for i, reward in enumerate(rewards)))


TWO, TWO_GROUPS = [(1, 0), (0.2, 0, 0.1)], np.array([0.5, -0.5, 0.1, -0.1, 0.0])
EQUAL, REWARDS = [(1, 0), (1, 1, 1), (0, 0)], np.array([1, 0, 1, 1, 1, 0, 0])
FLAT = [(0, 1, 0, 1), (0.5, 0.5, 0.5, 0.5)]


@pytest.mark.parametrize(
    ("rewards", "options", "expected"),
    [
        ([(1, 0, 0, 0)], {"eps": 0}, np.array([0.75, -0.25, -0.25, -0.25]) / 0.1875**0.5),
        ([(1, 0, 0.5, 0)], {"baseline": "leave_one_out", "scale": "none"}, [1 - 0.5 / 3, -0.5, 0.5 - 1 / 3, -0.5]),
        (TWO, {"scale": "none"}, TWO_GROUPS),
        (TWO, {"scale": "batch", "eps": 0}, TWO_GROUPS / TWO_GROUPS.std()),
        # The baseline of the batch, as in REINFORCE++: a group of equal rewards is trained too.
        (EQUAL, {"baseline": "batch", "scale": "batch", "eps": 0}, (REWARDS - REWARDS.mean()) / REWARDS.std()),
        (EQUAL, {"baseline": "batch", "scale": "none"}, REWARDS - REWARDS.mean()),
        ([(1, 1), (1,)], {"baseline": "batch", "scale": "batch"}, []),
        ([], {"baseline": "batch", "scale": "batch"}, []),
        (FLAT, {"baseline": "batch", "scale": "batch", "eps": 0}, [-(2**0.5), 2**0.5, -(2**0.5), 2**0.5, 0, 0, 0, 0]),
        (FLAT, {"baseline": "batch", "scale": "none"}, [-0.5, 0.5, -0.5, 0.5, 0, 0, 0, 0]),
        # MaxRL: a group that is solved seldom counts for more; one with a mean below 0 has no effect.
        ([(1, 0, 0, 0), (1, 1, 0, 1), (-1, 0)], {"scale": "mean", "eps": 0}, [3, -1, -1, -1, 1 / 3, 1 / 3, -1, 1 / 3]),
    ],
)
def test_advantages_by_hand(rewards: list[tuple[float, ...]], options: dict[str, Any], expected: Any) -> None:
    result = build_samples([group(*each) for each in rewards], **options)
    assert [sample.advantage for sample in result.samples] == pytest.approx(list(expected))


def test_maxrl_equals_skyrls_function() -> None:
    """compute_maxrl_advantage of SkyRL a956457: (score - mean) / (mean + 1e-6) within a prompt."""
    rewards = [0.3, 1.0, 0.0, 0.7, 0.2]
    mean = sum(rewards) / len(rewards)
    expected = [(reward - mean) / (mean + 1e-6) for reward in rewards]
    assert group_advantages(rewards, scale="mean") == pytest.approx(expected, rel=1e-12)


def middle(rewards_n: Any) -> float:
    return float(np.median(rewards_n))


def by_range(centered: Centered) -> Any:
    return centered.values_n / np.ptp(centered.rewards_n)


MIDDLE, RANGE = AdvantageSpec("test_parts:middle"), AdvantageSpec("test_parts:by_range", over="batch")
"""A baseline and a scale as another package would bring them."""


def test_a_baseline_and_a_scale_of_another_package_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "test_parts", sys.modules[__name__])
    point = EntryPoint("middle", "test_parts:MIDDLE", "agent_rl.baselines")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == point.group else [])
    chosen = TrainConfig(baseline="middle", advantage_scale="test_parts:RANGE")
    assert not chosen.learns_from_equal_rewards
    made = build_samples([group(0, 1, 4), group(2, 2)], baseline=chosen.baseline, scale=chosen.advantage_scale)
    assert [sample.advantage for sample in made.samples] == pytest.approx([-0.25, 0, 0.75, 0, 0])
    with pytest.raises(ValidationError, match=r"train\.baseline: unknown baseline 'midle': did you mean 'middle'"):
        TrainConfig(baseline="midle")
    with pytest.raises(ValidationError, match=r"train\.advantage_scale: advantage scale 'test_parts:TWO' is a list"):
        TrainConfig(advantage_scale="test_parts:TWO")


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=16))
def test_advantages_are_finite_ordered_like_rewards_and_sum_to_zero(rewards: list[float]) -> None:
    advantages = group_advantages(rewards)
    assert np.isfinite(advantages).all()
    assert abs(advantages.sum()) < 1e-6 * len(rewards)
    assert (np.diff(advantages[np.argsort(rewards)]) >= 0).all()


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 16))
def test_equal_rewards_give_exactly_zero(reward: float, count: int) -> None:
    assert not group_advantages([reward] * count).any()


def test_groups_without_variance_are_dropped_and_counted() -> None:
    assert build_samples([group(1, 0), group(0, 0)], baseline="batch").zero_variance_groups == 0
    result = build_samples([group(1, 0), group(1, 1), group(0, 0, 0), group(0, 1)])
    assert [sample.advantage for sample in result.samples] == pytest.approx([1, -1, -1, 1], rel=1e-5)
    assert [int(sample.tokens[0]) for sample in result.samples] == [0, 1, 0, 1]
    counted = {"train/zero_variance_groups": 2.0, "train/samples": 4.0}
    assert result.metrics == counted | {"train/overlong_penalty": 0.0, "r3/dropped_samples": 0.0}


def test_a_trajectory_without_reward_is_refused() -> None:
    with pytest.raises(TrainerError, match="task t: a trajectory with stop reason sandbox_failure has no reward"):
        build_samples([group(1, None)])


def test_a_nan_reward_is_refused() -> None:
    with pytest.raises(TrainerError, match="finite"):
        group_advantages([1.0, float("nan")])


def long(reward: float, sampled: int, stop: StopReason = StopReason.SUBMITTED) -> Trajectory:
    """A trajectory of ``sampled`` tokens after a prompt of two."""
    tokens, mask = np.zeros(sampled + 2, np.int32), np.arange(sampled + 2) >= 2
    return replace(trajectory(reward), tokens=tokens, loss_mask=mask, logprobs=tokens.astype(np.float32), stop=stop)


def by_token(values: list[float], tokens: list[int]) -> list[float]:
    """Values normalized over tokens."""
    flat = np.repeat(values, tokens)
    return [(value - flat.mean()) / flat.std() for value in values]


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "batch"])
def test_the_batchs_deviation_is_over_sampled_tokens(baseline: Baseline) -> None:
    """REINFORCE++, eq. 10, which the ranks also use after they subtract a KL from the reward."""
    groups = [Group("t", (long(0, 1), long(1, 7)))]
    found = build_samples(groups, baseline=baseline, scale="batch", eps=0).samples
    assert [sample.advantage for sample in found] == pytest.approx(by_token([-0.5, 0.5], [1, 7]))
    assert found[0].advantage == pytest.approx(-(7**0.5))
    left = build_samples(groups, baseline="mean", scale="batch", normalized=False).samples
    assert [sample.advantage for sample in left] == [-0.5, 0.5], "the ranks normalize later"


def test_the_batchs_deviation_includes_equal_groups_and_masked_trajectories() -> None:
    groups = [Group("t", (long(1, 3), long(0, 5, StopReason.CONTEXT_FULL))), group(1, 1), group(0, 0)]
    expected = by_token([0.5, -0.5, 0, 0, 0, 0], [3, 5, 2, 2, 2, 2])
    found = build_samples(groups, scale="batch", masked={StopReason.CONTEXT_FULL}, eps=0)
    assert [sample.advantage for sample in found.samples] == pytest.approx([expected[0], *expected[2:]])
    assert found.zero_variance_groups == 0


def test_the_overlong_penalty_rises_linearly() -> None:
    """DAPO, eq. 13: a limit of 100 tokens and a buffer of 20."""
    overlong = OverlongConfig(buffer=20, penalty=0.5)
    taken = [overlong_penalty(tokens, 100, overlong) for tokens in (10, 80, 85, 90, 100, 120)]
    assert taken == pytest.approx([0, 0, 0.125, 0.25, 0.5, 0.5])
    assert overlong_penalty(100, 100, OverlongConfig()) == 0
    groups = [Group("t", (long(1, 83), long(1, 10)))]
    assert build_samples(groups).samples == ()
    found = build_samples(groups, scale="none", penalty=lambda tokens: overlong_penalty(tokens, 100, overlong))
    assert [sample.advantage for sample in found.samples] == pytest.approx([-0.0625, 0.0625])
    assert found.overlong_penalty == pytest.approx(0.0625)


def routed(*members: tuple[float, Routing | None]) -> Group:
    return Group("t", tuple(replace(trajectory(reward), routing=routing) for reward, routing in members))


def test_trajectories_with_missing_routes_are_dropped_before_advantages_are_computed() -> None:
    groups = [
        routed((1, WHOLE), (0, HOLED), (0, WHOLE), (0, None)),
        routed((1, HOLED), (0, WHOLE)),  # one is left: nothing to compare it with
        routed((1, WHOLE), (0, WHOLE)),
    ]
    result = build_samples(groups, drop_missing=True)
    assert [sample.advantage for sample in result.samples] == pytest.approx([1, -1, 1, -1], rel=1e-5)
    assert all(sample.routing is WHOLE for sample in result.samples)
    assert (result.zero_variance_groups, len(result.samples), result.dropped) == (1, 4, 3)
    assert len(build_samples(groups).samples) == 8


def test_a_trajectory_without_routes_gets_absent_rows_if_others_have_routes() -> None:
    first, second = build_samples([routed((1, HOLED), (0, None))]).samples
    assert first.routing is HOLED
    assert second.routing is not None
    validate(second.routing)
    assert second.routing.experts.shape == HOLED.experts.shape
    assert not second.routing.present.any()
    assert [sample.routing for sample in build_samples([routed((1, None), (0, None))]).samples] == [None, None]


def test_a_trajectory_without_sampled_tokens_counts_but_is_no_sample() -> None:
    idle = replace(trajectory(0), loss_mask=np.zeros(4, np.bool_))
    result = build_samples([Group("t", (trajectory(1), idle))])
    assert [sample.advantage for sample in result.samples] == pytest.approx([1], rel=1e-5)


def test_a_tokens_lag_counts_from_the_weights_before_the_step() -> None:
    spans = (VersionSpan(1, 2, "3"), VersionSpan(2, 4, "5"))
    group = Group("t", tuple(replace(trajectory(reward), versions=spans) for reward in (1, 0)))
    lags = [sample.lag for sample in build_samples([group], published=6).samples]
    sampled = group.trajectories[0].loss_mask
    for lag in lags:
        np.testing.assert_array_equal(lag, np.where(sampled, [0, 3, 1, 1], 0))
    assert [sample.lag for sample in build_samples([group]).samples] == [None, None]
