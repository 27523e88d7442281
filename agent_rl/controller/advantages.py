"""Groups to samples: group-relative advantages. numpy only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agent_rl.config import AdvantageScale, Baseline
from agent_rl.errors import TrainerError
from agent_rl.types import Group, Sample, StopReason, Trajectory
from r3.routing import Routing, Span, SpanKind


@dataclass(frozen=True, slots=True)
class GroupSamples:
    """The samples of a step's groups; how many groups taught nothing because all their rewards were equal; and how many
    trajectories were left out for want of routes."""

    samples: tuple[Sample, ...]
    groups: int
    zero_variance_groups: int
    dropped: int = 0

    @property
    def metrics(self) -> dict[str, float]:
        """``train/zero_variance_groups``, ``train/samples`` and ``r3/dropped_samples``."""
        return {
            "train/zero_variance_groups": float(self.zero_variance_groups),
            "train/samples": float(len(self.samples)),
            "r3/dropped_samples": float(self.dropped),
        }


def group_advantages(
    rewards: Sequence[float],
    *,
    baseline: Literal["mean", "leave_one_out"] = "mean",
    scale: AdvantageScale = "group",
    eps: float = 1e-6,
) -> NDArray[np.float64]:
    """Each reward less its baseline, ``[n]``, divided by the group's standard deviation where ``scale`` is "group".

    ``mean``: ``(r - mean) / (std + eps)`` with the population's std (GRPO, arXiv 2402.03300, section 4.1.2); without
    the division Dr.GRPO's (arXiv 2503.20783). ``leave_one_out``: the mean of the *other* rewards is the baseline (RLOO,
    arXiv 2402.14740), which is n / (n - 1) times as far away. Exactly 0 where all rewards are equal, also where their
    mean is not representable.
    """
    rewards_n = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(rewards_n).all():
        raise TrainerError(f"rewards must be finite numbers, got {list(rewards)}")
    if rewards_n.size == 0 or np.ptp(rewards_n) == 0:
        return np.zeros_like(rewards_n)
    centred_n = rewards_n - rewards_n.mean()
    if baseline == "leave_one_out":
        centred_n *= rewards_n.size / (rewards_n.size - 1)
    return centred_n / (rewards_n.std() + eps) if scale == "group" else centred_n


def samples_of(
    groups: Sequence[Group],
    *,
    baseline: Baseline = "mean",
    scale: AdvantageScale = "group",
    drop_missing: bool = False,
    masked: Collection[StopReason] = (),
    eps: float = 1e-6,
) -> GroupSamples:
    """One sample a trajectory, its advantage taken within its group; groups without variance are dropped and counted.

    ``scale`` "batch" divides by the standard deviation of all the step's advantages, and ``baseline`` "batch" compares
    with the mean of all the step's rewards: both together are REINFORCE++'s ``(r - mean) / std`` over the global batch
    (arXiv 2501.03262, eq. 10), the first alone is its variant with a baseline, the group's mean. A trajectory in which
    nothing was sampled counts for its group's advantages and is no sample. Where the engine sent the routes of some
    tokens only, the others' rows are absent and the trainer routes those tokens itself; with ``drop_missing`` such a
    trajectory is left out before advantages are taken, as if it had not been run, and a group that keeps fewer than 2
    teaches nothing. One that ended in a way that is ``masked`` counts for its group's advantages and is no sample: its
    tokens are in no term of the loss and in nothing it is divided by (overlong filtering: DAPO, arXiv 2503.14476,
    section 3.4). Raises TrainerError where a trajectory has no reward: an infrastructure failure must not reach the
    trainer.
    """
    like = next((t.routing for group in groups for t in group.trajectories if t.routing is not None), None)
    kept: list[tuple[Trajectory, float]] = []
    members_of = [[t for t in group.trajectories if not (drop_missing and t.routes_missing)] for group in groups]
    dropped = sum(len(group.trajectories) for group in groups) - sum(map(len, members_of))
    rewards = [[_reward(group, t) for t in members] for group, members in zip(groups, members_of, strict=True)]
    zero_variance = 0
    for members, advantages in zip(members_of, _advantages(rewards, baseline, scale, eps), strict=True):
        if not advantages.any():
            zero_variance += 1
            continue
        kept.extend((t, a) for t, a in zip(members, advantages.tolist(), strict=True) if _trained(t, masked))
    spread = float(np.std([advantage for _, advantage in kept])) + eps if scale == "batch" and kept else 1.0
    samples = tuple(_sample(t, advantage / spread, like) for t, advantage in kept)
    return GroupSamples(samples, len(groups), zero_variance, dropped)


def _advantages(
    rewards: Sequence[Sequence[float]], baseline: Baseline, scale: AdvantageScale, eps: float
) -> list[NDArray[np.float64]]:
    """Advantages a group, ``[n]`` each; by the batch's mean they are those of one large group."""
    if baseline != "batch":
        return [group_advantages(group, baseline=baseline, scale=scale, eps=eps) for group in rewards]
    flat = group_advantages([reward for group in rewards for reward in group], scale="none")
    return np.split(flat, np.cumsum([len(group) for group in rewards]))[:-1]


def _trained(trajectory: Trajectory, masked: Collection[StopReason]) -> bool:
    return trajectory.stop not in masked and bool(trajectory.loss_mask.any())


def _reward(group: Group, trajectory: Trajectory) -> float:
    if trajectory.reward is None:
        raise TrainerError(f"task {group.task_id}: a trajectory that ended as {trajectory.stop} has no reward")
    return trajectory.reward


def _sample(trajectory: Trajectory, advantage: float, like: Routing | None) -> Sample:
    """``like`` is another trajectory's routing, whose shape one that got no routes at all is given."""
    routing = trajectory.routing
    if routing is None and like is not None:
        routing = _absent_rows(len(trajectory.tokens), like)
    return Sample(
        tokens=trajectory.tokens,
        loss_mask=trajectory.loss_mask,
        logprobs=trajectory.logprobs,
        advantage=advantage,
        routing=routing,
        old_logprobs=_old_logprobs(trajectory),
    )


def _old_logprobs(trajectory: Trajectory) -> NDArray[np.float32] | None:
    """``[S]``: the rescored means, 0 where nothing was sampled; None where it was not rescored."""
    if trajectory.rescored is None:
        return None
    old = np.zeros(len(trajectory.tokens), np.float32)
    old[trajectory.loss_mask] = trajectory.rescored.mean
    return old


def _absent_rows(tokens: int, like: Routing) -> Routing:
    """A routing of ``tokens`` rows of which none is known, in the shape of ``like``."""
    experts = np.zeros((tokens, like.moe_layers, like.top_k), like.experts.dtype)
    return Routing(experts, np.zeros(tokens, np.bool_), (Span(0, tokens, "", "", SpanKind.MISSING),), like.num_experts)
