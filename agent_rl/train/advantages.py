"""Groups to samples: GRPO's group-relative advantages. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent_rl.errors import TrainerError
from agent_rl.types import Group, Sample, Trajectory


@dataclass(frozen=True, slots=True)
class GroupSamples:
    """The samples of a step's groups, and how many groups taught nothing because all their rewards were equal."""

    samples: tuple[Sample, ...]
    groups: int
    zero_variance_groups: int

    @property
    def metrics(self) -> dict[str, float]:
        """``train/zero_variance_groups`` and ``train/samples``."""
        return {
            "train/zero_variance_groups": float(self.zero_variance_groups),
            "train/samples": float(len(self.samples)),
        }


def group_advantages(rewards: Sequence[float], *, eps: float = 1e-6) -> NDArray[np.float64]:
    """``(r - mean) / (std + eps)`` with the population's std (GRPO, arXiv 2402.03300, section 4.1.2), ``[n]``.

    Exactly 0 where all rewards are equal, also where their mean is not representable.
    """
    rewards_n = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(rewards_n).all():
        raise TrainerError(f"rewards must be finite numbers, got {list(rewards)}")
    if rewards_n.size == 0 or np.ptp(rewards_n) == 0:
        return np.zeros_like(rewards_n)
    return (rewards_n - rewards_n.mean()) / (rewards_n.std() + eps)


def samples_of(groups: Sequence[Group], *, eps: float = 1e-6) -> GroupSamples:
    """One sample a trajectory, its advantage taken within its group; groups without variance are dropped and counted.

    Raises TrainerError where a trajectory has no reward: an infrastructure failure must not reach the trainer.
    """
    samples: list[Sample] = []
    zero_variance = 0
    for group in groups:
        advantages = group_advantages([_reward(group, trajectory) for trajectory in group.trajectories], eps=eps)
        if not advantages.any():
            zero_variance += 1
            continue
        samples.extend(_sample(t, float(a)) for t, a in zip(group.trajectories, advantages, strict=True))
    return GroupSamples(tuple(samples), len(groups), zero_variance)


def _reward(group: Group, trajectory: Trajectory) -> float:
    if trajectory.reward is None:
        raise TrainerError(f"task {group.task_id}: a trajectory that ended as {trajectory.stop} has no reward")
    return trajectory.reward


def _sample(trajectory: Trajectory, advantage: float) -> Sample:
    return Sample(
        tokens=trajectory.tokens,
        loss_mask=trajectory.loss_mask,
        logprobs=trajectory.logprobs,
        advantage=advantage,
        routing=trajectory.routing,
    )
