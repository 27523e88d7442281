"""Group-relative advantages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.errors import TrainerError
from agent_rl.train.advantages import group_advantages, samples_of
from agent_rl.types import Group, StopReason, Trajectory


def trajectory(reward: float | None, token: int = 1) -> Trajectory:
    stop = StopReason.SUBMITTED if reward is not None else StopReason.SANDBOX_FAILURE
    return Trajectory(
        task_id="t",
        env="mini",
        tokens=np.full(4, token, np.int32),
        loss_mask=np.array([False, False, True, True]),
        logprobs=np.zeros(4, np.float32),
        routing=None,
        stop=stop,
        reward=reward,
        resolved=bool(reward),
        turns=(),
        messages=(),
        weight_versions=(),
    )


def group(*rewards: float | None) -> Group:
    return Group("t", tuple(trajectory(reward, token=i) for i, reward in enumerate(rewards)))


def test_by_hand() -> None:
    # mean 0.25, population std sqrt(0.1875)
    assert group_advantages([1, 0, 0, 0], eps=0) == pytest.approx([0.75 / 0.1875**0.5] + [-0.25 / 0.1875**0.5] * 3)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=16))
def test_properties(rewards: list[float]) -> None:
    advantages = group_advantages(rewards)
    assert np.isfinite(advantages).all()
    assert abs(advantages.sum()) < 1e-6 * len(rewards)
    if len(set(rewards)) == 1:
        assert not advantages.any()
    assert (np.diff(advantages[np.argsort(rewards)]) >= 0).all()


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 16))
def test_equal_rewards_give_exactly_zero(reward: float, count: int) -> None:
    assert not group_advantages([reward] * count).any()


def test_groups_without_variance_are_dropped_and_counted() -> None:
    result = samples_of([group(1, 0), group(1, 1), group(0, 0, 0), group(0, 1)])
    assert [sample.advantage for sample in result.samples] == pytest.approx([1, -1, -1, 1], rel=1e-5)
    assert [int(sample.tokens[0]) for sample in result.samples] == [0, 1, 0, 1]
    assert result.metrics == {"train/zero_variance_groups": 2.0, "train/samples": 4.0}


def test_a_trajectory_without_reward_never_passes() -> None:
    with pytest.raises(TrainerError, match="task t: a trajectory that ended as sandbox_failure has no reward"):
        samples_of([group(1, None)])


def test_a_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(TrainerError, match="finite"):
        group_advantages([1.0, float("nan")])
