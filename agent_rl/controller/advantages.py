"""Advantages of trajectories: converts groups to samples. Uses only numpy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from agent_rl.config import OverlongConfig
from agent_rl.config.advantages import BASELINES, SCALES, Over, baseline_spec, scale_spec
from agent_rl.config.objectives import Aggregation
from agent_rl.controller.turn_credit import Credit, by_turn, observations, split
from agent_rl.errors import TrainerError
from agent_rl.types import (
    Branch,
    Group,
    Sample,
    StopReason,
    TrainingDecision,
    TrainingStatus,
    Trajectory,
    drawn_mask,
)
from r3.routing import Routing, Span, SpanKind


@dataclass(frozen=True, slots=True)
class GroupSamples:
    """The samples of a step's groups. ``zero_variance_groups``: groups without effect because all their rewards were
    equal; ``dropped``: trajectories without routes; ``overlong_penalty``: mean length penalty per trajectory.

    ``decisions``: one per trajectory, in the order of groups and members; with rewards of turns the mean advantage over
    its tokens. ``origins``: for each sample the index of its trajectory in that order and the number of its branch.
    ``turn_reward``: the mean reward of a turn; None where advantages are by trajectory.
    """

    samples: tuple[Sample, ...]
    groups: int
    zero_variance_groups: int
    dropped: int = 0
    overlong_penalty: float = 0.0
    decisions: tuple[TrainingDecision, ...] = ()
    origins: tuple[tuple[int, int], ...] = ()
    turn_reward: float | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """``train/zero_variance_groups``, ``train/samples``, ``train/overlong_penalty``, ``r3/dropped_samples``, and
        ``train/turn_reward_mean``."""
        return ({} if self.turn_reward is None else {"train/turn_reward_mean": self.turn_reward}) | {
            "train/zero_variance_groups": float(self.zero_variance_groups),
            "train/samples": float(len(self.samples)),
            "train/overlong_penalty": self.overlong_penalty,
            "r3/dropped_samples": float(self.dropped),
        }


@dataclass(frozen=True, slots=True)
class Centered:
    """The input of a scale, ``[n]`` each: ``values_n``, rewards less their baseline; ``rewards_n``; ``tokens_n``,
    sampled tokens. ``eps`` is added to a divisor."""

    values_n: NDArray[np.float64]
    rewards_n: NDArray[np.float64]
    tokens_n: NDArray[np.float64]
    eps: float


BaselineFormula = Callable[[NDArray[np.float64]], NDArray[np.float64] | float]
"""From rewards ``[n]``, which are not all equal, to what is subtracted from them."""
ScaleFormula = Callable[[Centered], NDArray[np.float64]]
"""From rewards less their baseline to advantages ``[n]``."""


def mean_reward(rewards_n: NDArray[np.float64]) -> float:
    """GRPO, arXiv 2402.03300, section 4.1.2; over the step REINFORCE++, arXiv 2501.03262."""
    return float(rewards_n.mean())


def mean_of_others(rewards_n: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of the *other* rewards (RLOO, arXiv 2402.14740)."""
    return (rewards_n.sum() - rewards_n) / (rewards_n.size - 1)


def by_std(centered: Centered) -> NDArray[np.float64]:
    """Divided by the population's standard deviation (GRPO)."""
    return centered.values_n / (centered.rewards_n.std() + centered.eps)


def by_mean(centered: Centered) -> NDArray[np.float64]:
    """Divided by the mean reward (MaxRL, arXiv 2602.02710); 0 for a mean that is not positive."""
    mean = centered.rewards_n.mean()
    return centered.values_n / (mean + centered.eps) if mean > 0 else np.zeros_like(centered.values_n)


def no_baseline(rewards_n: NDArray[np.float64]) -> float:
    """0: the trainer subtracts the values of its critic from the rewards."""
    return 0.0


def unscaled(centered: Centered) -> NDArray[np.float64]:
    """As they are (Dr.GRPO, arXiv 2503.20783)."""
    return centered.values_n


def normalized_over_tokens(centered: Centered) -> NDArray[np.float64]:
    """``(A - mean) / (std + eps)``, both over sampled tokens (REINFORCE++, arXiv 2501.03262, eq. 10)."""
    values_n, tokens_n = centered.values_n, centered.tokens_n
    if not tokens_n.any():
        return values_n
    mean = np.average(values_n, weights=tokens_n)
    std = np.sqrt(np.average((values_n - mean) ** 2, weights=tokens_n))
    return (values_n - mean) / (std + centered.eps)


def group_advantages(
    rewards: Sequence[float], *, baseline: str = "mean", scale: str = "group", eps: float = 1e-6
) -> NDArray[np.float64]:
    """The advantages of one group, ``[n]``: each reward less its baseline, scaled.

    ``baseline``, ``scale``: names of :mod:`agent_rl.config.advantages`. Exactly 0 for equal rewards, even if their mean
    is not representable. Raises TrainerError for rewards that are not finite.
    """
    (advantages,) = _advantages([rewards], [[1] * len(rewards)], baseline, scale, eps)
    return advantages


def build_samples(
    groups: Sequence[Group],
    *,
    baseline: str = "mean",
    scale: str = "group",
    drop_missing: bool = False,
    masked: Collection[StopReason] = (),
    penalty: Callable[[int], float] = lambda tokens: 0.0,
    normalized: bool = True,
    equal_rewards: bool = False,
    aggregation: Aggregation = "sequence",
    published: int | None = None,
    gamma: float | None = None,
    observed: bool = False,
    eps: float = 1e-6,
) -> GroupSamples:
    """One sample per branch of a trajectory, with advantages taken within groups. Groups without variance are dropped
    and counted.

    A trajectory of several branches counts once: with the ``aggregation`` "sequence" a branch is weighted by its share
    of its trajectory's sampled tokens. With "prompt" a sample weighs 1 / sampled tokens of its group's samples.

    ``baseline``, ``scale``: names of :mod:`agent_rl.config.advantages`. If either is over the whole step, groups of
    equal rewards are trained and count for its mean and deviation; only a step of equal rewards is dropped.
    ``equal_rewards``: all groups are trained. ``normalized`` False leaves a scale over the step to the ranks, which
    first subtract a KL penalty from the advantages.

    ``penalty``: subtracted from the reward of a trajectory with so many tokens (:func:`overlong_penalty`). A trajectory
    without sampled tokens, or with a ``masked`` stop reason, counts for its group's advantages but is no sample: its
    tokens are in no term of the loss and in no divisor (overlong filtering: DAPO, arXiv 2503.14476, section 3.4).

    Missing rows of routes stay absent and the trainer routes those tokens itself. With ``drop_missing`` a trajectory
    with missing rows is removed before advantages are taken, and a group with fewer than 2 remaining trajectories has
    no effect. ``gamma``: advantages are by turn (:mod:`agent_rl.controller.turn_credit`). ``observed``: samples name
    their observations. ``published``: weight version at the start of the step, from which each token's lag is counted;
    None sets no lag. Raises TrainerError for a trajectory without a reward.
    """
    shape = next((t.routing for group in groups for t in group.trajectories if t.routing is not None), None)
    missing = [[drop_missing and t.routes_missing > 0 for t in group.trajectories] for group in groups]
    members_of = [
        [t for t, absent in zip(group.trajectories, flags, strict=True) if not absent]
        for group, flags in zip(groups, missing, strict=True)
    ]
    penalties = [[penalty(max(len(branch.tokens) for branch in t.branches)) for t in members] for members in members_of]
    credits = [_credits(*each, gamma) for each in zip(groups, members_of, penalties, strict=True)]
    by_member, has_effect = _credited(credits, baseline, scale, eps, normalized=normalized, equal_rewards=equal_rewards)
    decided = [
        (TrainingDecision(_training_status(t, effective, masked), credit.mean(own)), own)
        for members, group, values, effective in zip(members_of, credits, by_member, has_effect, strict=True)
        for t, credit, own in zip(members, group, values, strict=True)
    ]
    is_dropped, of_kept = [absent for group in missing for absent in group], iter(decided)
    without_routes = TrainingDecision(TrainingStatus.DROPPED), np.zeros(0)
    decisions = [without_routes if absent else next(of_kept) for absent in is_dropped]
    trajectories = [t for group in groups for t in group.trajectories]
    numbered = [
        ((index, branch), _completed(sample, t, branch, None if gamma is None else turns, observed))
        for index, (t, (decision, turns)) in enumerate(zip(trajectories, decisions, strict=True))
        if decision.training_status is TrainingStatus.TRAINED and decision.advantage is not None
        for branch, sample in _branch_samples(index, t, decision.advantage, shape, aggregation == "sequence", published)
    ]
    if aggregation == "prompt":
        numbered = _weighted_by_prompt(numbered, [len(group.trajectories) for group in groups])
    return GroupSamples(
        samples=tuple(sample for _, sample in numbered),
        groups=len(groups),
        zero_variance_groups=has_effect.count(False),
        dropped=sum(is_dropped),
        overlong_penalty=_mean([cost for costs in penalties for cost in costs]),
        decisions=tuple(decision for decision, _ in decisions),
        origins=tuple(origin for origin, _ in numbered),
        turn_reward=None if gamma is None else _mean([value for t in trajectories for value in t.turn_rewards]),
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values or [0.0]))


def _credits(
    group: Group, members: Sequence[Trajectory], penalties: Sequence[float], gamma: float | None
) -> list[Credit]:
    """What each trajectory of a group is rewarded for; with ``gamma`` each of its turns."""
    rewards = [_reward(group, t) - cost for t, cost in zip(members, penalties, strict=True)]
    if gamma is None:
        return [Credit([reward], [_trained_tokens(t)]) for t, reward in zip(members, rewards, strict=True)]
    return [Credit.by_turn(t, reward, gamma) for t, reward in zip(members, rewards, strict=True)]


def _credited(
    credits: Sequence[Sequence[Credit]],
    baseline: str,
    scale: str,
    eps: float,
    *,
    normalized: bool,
    equal_rewards: bool,
) -> tuple[list[list[NDArray[np.float64]]], list[bool]]:
    """The advantages of each group's trajectories, and whether each group is trained."""
    rewards = [[value for each in group for value in each.returns] for group in credits]
    tokens = [[count for each in group for count in each.tokens] for group in credits]
    by_step, over = scale_spec(scale).over == "batch", baseline_spec(baseline).over
    advantages = _advantages(rewards, tokens, baseline, "none" if by_step else scale, eps)
    has_effect = [bool(values.any()) for values in advantages]
    if by_step or over == "batch":
        has_effect = [any(has_effect)] * len(credits)
    if equal_rewards or over == "trajectory":
        has_effect = [True] * len(credits)
    if by_step and normalized:
        advantages = _advantages(rewards, tokens, baseline, scale, eps)
    return [split(values, group) for values, group in zip(advantages, credits, strict=True)], has_effect


def _completed(
    sample: Sample, trajectory: Trajectory, branch: int, turns: NDArray[np.float64] | None, observed: bool
) -> Sample:
    """The sample with the advantages of its ``turns``, and with its observations if they are ``observed``."""
    if turns is not None:
        sample = replace(sample, advantages=by_turn(trajectory, branch, turns))
    return replace(sample, observed=observations(trajectory, branch)) if observed else sample


def overlong_penalty(tokens: int, limit: int, overlong: OverlongConfig) -> float:
    """Length penalty of a trajectory with ``tokens``: 0 up to ``overlong.buffer`` tokens before ``limit``, then
    linear up to ``overlong.penalty`` at ``limit`` (DAPO, arXiv 2503.14476, eq. 13, for whole trajectories). 0
    without a buffer."""
    over = tokens - (limit - overlong.buffer)
    return overlong.penalty * min(over / overlong.buffer, 1.0) if overlong.buffer and over > 0 else 0.0


def _advantages(
    rewards: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], baseline: str, scale: str, eps: float
) -> list[NDArray[np.float64]]:
    """Advantages per group, ``[n]`` each, of groups with so many sampled ``tokens`` per trajectory."""
    center: BaselineFormula = BASELINES.load(baseline_spec(baseline).formula)
    rescale: ScaleFormula = SCALES.load(scale_spec(scale).formula)
    compares = baseline_spec(baseline).over != "trajectory"

    def centered(rewards_n: NDArray[np.float64]) -> NDArray[np.float64]:
        if not np.isfinite(rewards_n).all():
            raise TrainerError(f"rewards must be finite numbers, got {rewards_n.tolist()}")
        equal = compares and not np.ptp(rewards_n)
        return np.zeros_like(rewards_n) if equal else rewards_n - center(rewards_n)

    def scaled(
        values_n: NDArray[np.float64], rewards_n: NDArray[np.float64], tokens_n: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        return rescale(Centered(values_n, rewards_n, tokens_n, eps)) if values_n.any() else values_n

    rewards_of, tokens_of = ([np.asarray(each, np.float64) for each in of] for of in (rewards, tokens))
    values = _over(baseline_spec(baseline).over, centered, rewards_of)
    return _over(scale_spec(scale).over, scaled, values, rewards_of, tokens_of)


def _over(
    over: Over,
    formula: Callable[..., NDArray[np.float64]],
    *arguments: Sequence[NDArray[np.float64]],
) -> list[NDArray[np.float64]]:
    """``formula`` of each group's arguments, or of those of all groups together; ``[n]`` per group."""
    first = arguments[0]
    if not sum(map(len, first)):
        return list(first)
    if over == "group":
        return [formula(*of) if len(of[0]) else of[0] for of in zip(*arguments, strict=True)]
    return np.split(formula(*map(np.concatenate, arguments)), np.cumsum([len(group) for group in first]))[:-1]


def _training_status(trajectory: Trajectory, has_effect: bool, masked: Collection[StopReason]) -> TrainingStatus:
    if not trajectory.sampled_tokens:
        return TrainingStatus.EMPTY
    if trajectory.stop in masked:
        return TrainingStatus.MASKED
    return TrainingStatus.TRAINED if has_effect else TrainingStatus.UNIFORM


def _reward(group: Group, trajectory: Trajectory) -> float:
    if trajectory.reward is None:
        raise TrainerError(f"task {group.task_id}: a trajectory with stop reason {trajectory.stop} has no reward")
    return trajectory.reward


def _trained_tokens(trajectory: Trajectory) -> int:
    """Number of tokens that a loss counts."""
    return sum(int(drawn_mask(branch).sum()) for branch in trajectory.branches)


def _branch_samples(
    number: int, trajectory: Trajectory, advantage: float, shape: Routing | None, by_sequence: bool, version: int | None
) -> list[tuple[int, Sample]]:
    """The trained branches of a trajectory with their numbers. ``shape`` is another trajectory's routing, whose
    shape is used for a trajectory without routes."""
    old = _by_branch(trajectory, None if trajectory.rescored is None else trajectory.rescored.mean)
    teacher, total = _by_branch(trajectory, trajectory.teacher_logprobs), max(1, _trained_tokens(trajectory))
    top = trajectory.teacher_top and trajectory.teacher_top.split([each.sampled_tokens for each in trajectory.branches])
    branches = [(index, branch) for index, branch in enumerate(trajectory.branches) if branch.loss_mask.any()]
    return [
        (
            index,
            Sample(
                tokens=branch.tokens,
                loss_mask=branch.loss_mask,
                logprobs=branch.logprobs,
                advantage=advantage,
                routing=_absent_rows(len(branch.tokens), shape) if branch.routing is None and shape else branch.routing,
                weight=int(drawn_mask(branch).sum()) / total if by_sequence and len(branches) > 1 else 1.0,
                old_logprobs=_as_sampled_where_kept(branch, old[index]),
                teacher_logprobs=teacher[index],
                teacher_top=top[index] if top else None,
                trajectory=number if len(branches) > 1 else None,
                lag=None if version is None else _lag(branch, version),
                kept=branch.kept,
            ),
        )
        for index, branch in branches
    ]


def _weighted_by_prompt(
    numbered: Sequence[tuple[tuple[int, int], Sample]], sizes: Sequence[int]
) -> list[tuple[tuple[int, int], Sample]]:
    """The samples with weight 1 / sampled tokens of their group. ``sizes``: trajectories per group."""
    group_of = np.repeat(np.arange(len(sizes)), sizes)
    tokens = [int(drawn_mask(sample).sum()) for _, sample in numbered]
    totals = np.bincount([group_of[index] for (index, _), _ in numbered], tokens) if numbered else np.zeros(0)
    return [(origin, replace(sample, weight=1 / max(1.0, totals[group_of[origin[0]]]))) for origin, sample in numbered]


def _by_branch(trajectory: Trajectory, sampled: NDArray[np.float32] | None) -> list[NDArray[np.float32] | None]:
    """``[S]`` per branch: the values ``sampled`` of the sampled tokens of all branches, 0 at the others; None without
    values."""
    branches = trajectory.branches
    if sampled is None:
        return [None] * len(branches)
    parts = np.split(sampled, np.cumsum([branch.sampled_tokens for branch in branches])[:-1])
    found: list[NDArray[np.float32] | None] = []
    for branch, part in zip(branches, parts, strict=True):
        values = np.zeros(len(branch.tokens), np.float32)
        values[branch.loss_mask] = part
        found.append(values)
    return found


def _as_sampled_where_kept(branch: Branch, old: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
    """``old`` with the log-probs as sampled at tokens that were drawn from kept tokens: an engine that evaluates them
    again normalizes over the whole vocabulary."""
    if old is None or branch.kept is None:
        return old
    return np.where(branch.kept.spread(branch.loss_mask).counts > 0, branch.logprobs, old)


def _lag(branch: Branch, published: int) -> NDArray[np.int32]:
    """``[S]``: by how many updates the weights that sampled a token are older than ``published``."""
    lag = np.zeros(len(branch.tokens), np.int32)
    for span in branch.versions:
        lag[span.start : span.stop] = published - int(span.version)
    return np.where(branch.loss_mask, lag, np.int32(0))


def _absent_rows(tokens: int, shape: Routing) -> Routing:
    """A routing of ``tokens`` absent rows with the shape of ``shape``."""
    experts = np.zeros((tokens, shape.moe_layers, shape.top_k), shape.experts.dtype)
    return Routing(experts, np.zeros(tokens, np.bool_), (Span(0, tokens, "", "", SpanKind.MISSING),), shape.num_experts)
