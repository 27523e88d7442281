"""Groups to samples: group-relative advantages. numpy only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agent_rl.config import AdvantageScale, Baseline, OverlongConfig
from agent_rl.errors import TrainerError
from agent_rl.types import Branch, Group, Sample, StopReason, TrainingDecision, TrainingStatus, Trajectory
from r3.routing import Routing, Span, SpanKind


@dataclass(frozen=True, slots=True)
class GroupSamples:
    """The samples of a step's groups; how many groups taught nothing because all their rewards were equal; how many
    trajectories were left out for want of routes; and what a trajectory's length took from its reward, the mean.

    ``verdicts``: what became of every trajectory, in the order of groups and members; ``origins``: for each sample, the
    place of its trajectory in that order, and the number of its branch."""

    samples: tuple[Sample, ...]
    groups: int
    zero_variance_groups: int
    dropped: int = 0
    overlong_penalty: float = 0.0
    verdicts: tuple[TrainingDecision, ...] = ()
    origins: tuple[tuple[int, int], ...] = ()

    @property
    def metrics(self) -> dict[str, float]:
        """``train/zero_variance_groups``, ``train/samples``, ``train/overlong_penalty``, ``r3/dropped_samples``."""
        return {
            "train/zero_variance_groups": float(self.zero_variance_groups),
            "train/samples": float(len(self.samples)),
            "train/overlong_penalty": self.overlong_penalty,
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
    penalty: Callable[[int], float] = lambda tokens: 0.0,
    normalized: bool = True,
    by_sequence: bool = True,
    published: int | None = None,
    eps: float = 1e-6,
) -> GroupSamples:
    """One sample a branch of a trajectory, whose advantage is taken within its group; groups without variance are
    dropped and counted.

    A trajectory of several branches counts once, wherever trajectories are counted. ``by_sequence``: the loss is the
    mean over sequences of each one's mean; a branch then weighs as its share of its trajectory's sampled tokens, so
    that the trajectory's mean is taken, whatever branch a token is in.

    ``scale`` "batch" normalizes over all the step's sampled tokens, ``(A - mean) / std``, and ``baseline`` "batch"
    compares with the mean of all the step's rewards: both together are REINFORCE++ (arXiv 2501.03262, eq. 10, whose
    advantages are those of tokens), the first alone is its variant with a baseline, the group's mean. A group of equal
    rewards teaches under either, and counts for mean and deviation; then only a step of equal rewards is dropped.
    ``normalized`` False leaves that division to the ranks, who take a KL from the advantages first. ``penalty``: what
    is taken from the reward of a trajectory of so many tokens (:func:`overlong_penalty`). A trajectory in which
    nothing was sampled counts for its group's advantages and is no sample. Where the engine sent the routes of some
    tokens only, the others' rows are absent and the trainer routes those tokens itself; with ``drop_missing`` such a
    trajectory is left out before advantages are taken, as if it had not been run, and a group that keeps fewer than 2
    teaches nothing. One that ended in a way that is ``masked`` counts for its group's advantages and is no sample: its
    tokens are in no term of the loss and in nothing it is divided by (overlong filtering: DAPO, arXiv 2503.14476,
    section 3.4). ``published``: the version of the weights that the step begins with, from which every token's lag is
    counted; without it samples have none. Raises TrainerError where a trajectory has no reward: an infrastructure
    failure must not reach the trainer.
    """
    like = next((t.routing for group in groups for t in group.trajectories if t.routing is not None), None)
    missing = [[drop_missing and t.routes_missing > 0 for t in group.trajectories] for group in groups]
    members_of = [
        [t for t, missed in zip(group.trajectories, own, strict=True) if not missed]
        for group, own in zip(groups, missing, strict=True)
    ]
    dropped = sum(map(sum, missing))
    taken = [[penalty(max(len(branch.tokens) for branch in t.branches)) for t in members] for members in members_of]
    rewards = [
        [_reward(group, t) - less for t, less in zip(members, own, strict=True)]
        for group, members, own in zip(groups, members_of, taken, strict=True)
    ]
    advantages = _advantages(rewards, baseline, scale, eps)
    teaching = [bool(own.any()) for own in advantages]
    if "batch" in (baseline, scale):
        teaching = [any(teaching)] * len(groups)
    if scale == "batch" and normalized:
        advantages = _over_tokens(members_of, advantages, eps)
    judged = iter(
        TrainingDecision(_fate(t, teaches, masked), advantage)
        for members, own, teaches in zip(members_of, advantages, teaching, strict=True)
        for t, advantage in zip(members, own.tolist(), strict=True)
    )
    verdicts = tuple(
        TrainingDecision(TrainingStatus.DROPPED) if missed else next(judged) for own in missing for missed in own
    )
    everything = [t for group in groups for t in group.trajectories]
    made = [
        ((at, branch), sample)
        for at, (t, verdict) in enumerate(zip(everything, verdicts, strict=True))
        if verdict.training_status is TrainingStatus.TRAINED and verdict.advantage is not None
        for branch, sample in _samples(at, t, verdict.advantage, like, by_sequence, published)
    ]
    samples, origins = tuple(sample for _, sample in made), tuple(origin for origin, _ in made)
    mean_taken = float(np.mean([less for own in taken for less in own] or [0.0]))
    return GroupSamples(samples, len(groups), teaching.count(False), dropped, mean_taken, verdicts, origins)


def overlong_penalty(tokens: int, limit: int, overlong: OverlongConfig) -> float:
    """What is taken from the reward of a trajectory of ``tokens``: nothing up to ``overlong.buffer`` before ``limit``,
    from there in a straight line up to ``overlong.penalty`` at it (DAPO, arXiv 2503.14476, eq. 13, of whole
    trajectories). 0 without a buffer."""
    over = tokens - (limit - overlong.buffer)
    return overlong.penalty * min(over / overlong.buffer, 1.0) if overlong.buffer and over > 0 else 0.0


def _over_tokens(
    members_of: Sequence[Sequence[Trajectory]], advantages: Sequence[NDArray[np.float64]], eps: float
) -> list[NDArray[np.float64]]:
    """``(A - mean) / (std + eps)``, both over the sampled tokens of all trajectories; ``[n]`` a group."""
    tokens = np.array([_sampled(t) for members in members_of for t in members], float)
    if not tokens.any():
        return list(advantages)
    flat = np.concatenate(advantages)
    mean = np.average(flat, weights=tokens)
    std = np.sqrt(np.average((flat - mean) ** 2, weights=tokens))
    return [(own - mean) / (std + eps) for own in advantages]


def _advantages(
    rewards: Sequence[Sequence[float]], baseline: Baseline, scale: AdvantageScale, eps: float
) -> list[NDArray[np.float64]]:
    """Advantages a group, ``[n]`` each; by the batch's mean they are those of one large group."""
    if baseline != "batch":
        return [group_advantages(group, baseline=baseline, scale=scale, eps=eps) for group in rewards]
    flat = group_advantages([reward for group in rewards for reward in group], scale="none")
    return np.split(flat, np.cumsum([len(group) for group in rewards]))[:-1]


def _fate(trajectory: Trajectory, teaches: bool, masked: Collection[StopReason]) -> TrainingStatus:
    if not trajectory.sampled_tokens:
        return TrainingStatus.EMPTY
    if trajectory.stop in masked:
        return TrainingStatus.MASKED
    return TrainingStatus.TRAINED if teaches else TrainingStatus.UNIFORM


def _reward(group: Group, trajectory: Trajectory) -> float:
    if trajectory.reward is None:
        raise TrainerError(f"task {group.task_id}: a trajectory that ended as {trajectory.stop} has no reward")
    return trajectory.reward


def _sampled(trajectory: Trajectory) -> int:
    """Its sampled tokens that have a token before them."""
    return sum(int(branch.loss_mask[1:].sum()) for branch in trajectory.branches)


def _samples(
    number: int,
    trajectory: Trajectory,
    advantage: float,
    like: Routing | None,
    by_sequence: bool,
    published: int | None,
) -> list[tuple[int, Sample]]:
    """The branches in which anything is trained, with their numbers. ``like`` is another trajectory's routing, whose
    shape one that got no routes at all is given."""
    old, whole = _old_logprobs(trajectory), max(1, _sampled(trajectory))
    both = enumerate(zip(trajectory.branches, old, strict=True))
    branches = [(at, branch, own) for at, (branch, own) in both if branch.loss_mask.any()]
    return [
        (
            at,
            Sample(
                tokens=branch.tokens,
                loss_mask=branch.loss_mask,
                logprobs=branch.logprobs,
                advantage=advantage,
                routing=_absent_rows(len(branch.tokens), like) if branch.routing is None and like else branch.routing,
                weight=int(branch.loss_mask[1:].sum()) / whole if by_sequence and len(branches) > 1 else 1.0,
                old_logprobs=own,
                trajectory=number if len(branches) > 1 else None,
                lag=None if published is None else _lag(branch, published),
            ),
        )
        for at, branch, own in branches
    ]


def _old_logprobs(trajectory: Trajectory) -> list[NDArray[np.float32] | None]:
    """``[S]`` a branch: the rescored means, 0 where nothing was sampled; None where it was not rescored."""
    branches = trajectory.branches
    if trajectory.rescored is None:
        return [None] * len(branches)
    means = np.split(trajectory.rescored.mean, np.cumsum([branch.sampled_tokens for branch in branches])[:-1])
    old: list[NDArray[np.float32] | None] = []
    for branch, mean in zip(branches, means, strict=True):
        values = np.zeros(len(branch.tokens), np.float32)
        values[branch.loss_mask] = mean
        old.append(values)
    return old


def _lag(branch: Branch, published: int) -> NDArray[np.int32]:
    """``[S]``: how many updates before ``published`` the weights are that sampled a token."""
    lag = np.zeros(len(branch.tokens), np.int32)
    for span in branch.versions:
        lag[span.start : span.stop] = published - int(span.version)
    return np.where(branch.loss_mask, lag, np.int32(0))


def _absent_rows(tokens: int, like: Routing) -> Routing:
    """A routing of ``tokens`` rows of which none is known, in the shape of ``like``."""
    experts = np.zeros((tokens, like.moe_layers, like.top_k), like.experts.dtype)
    return Routing(experts, np.zeros(tokens, np.bool_), (Span(0, tokens, "", "", SpanKind.MISSING),), like.num_experts)
