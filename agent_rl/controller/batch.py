"""The groups of one training step, in data order, and their metrics."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from agent_rl.config import DynamicSamplingConfig
from agent_rl.controller.async_rollout.task_ledger import Outcome
from agent_rl.errors import RolloutFailed
from agent_rl.rollout.filters import filter_metrics
from agent_rl.rollout.group import DroppedGroup, Rollout
from agent_rl.rollout.metrics import rollout_metrics
from agent_rl.rollout.rescore import rescore_metrics
from agent_rl.types import Group, Sample, StopReason, TrainingDecision, TrainingStatus


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A step's groups in data order: ``groups`` to train on, ``discarded`` ones and ``dropped`` ones; ``outcomes``
    of all its positions."""

    groups: tuple[Group, ...]
    discarded: tuple[Group, ...]
    dropped: tuple[DroppedGroup, ...]
    outcomes: Mapping[int, Outcome]

    @property
    def sampled(self) -> tuple[Group, ...]:
        """All groups, the trained ones first."""
        return self.groups + self.discarded

    @property
    def discarded_decisions(self) -> tuple[TrainingDecision, ...]:
        """One decision per trajectory of the discarded groups."""
        return tuple(TrainingDecision(TrainingStatus.DISCARDED) for group in self.discarded for _ in group.trajectories)


def build_batch(outcomes: Mapping[int, Outcome], ended: Mapping[int, Group | DroppedGroup]) -> Batch:
    """The batch of the positions in ``outcomes``. ``ended`` holds their groups; a position that was left out has
    none."""
    groups = {position: _in_order(group) for position, group in ended.items() if isinstance(group, Group)}
    return Batch(
        groups=tuple(group for position, group in groups.items() if outcomes[position] is Outcome.KEPT),
        discarded=tuple(group for position, group in groups.items() if outcomes[position] is Outcome.DISCARDED),
        dropped=tuple(group for group in ended.values() if isinstance(group, DroppedGroup)),
        outcomes=outcomes,
    )


def check_filled(batch: Batch, required: int, settings: DynamicSamplingConfig) -> None:
    """Raises RolloutFailed if the step lacks groups and ``when_short`` is stop. ``required``: groups per step."""
    if settings.enabled and settings.when_short == "stop" and len(batch.groups) < required:
        drawn = sum(outcome is not Outcome.LEFT_OUT for outcome in batch.outcomes.values())
        raise RolloutFailed(
            f"{len(batch.groups)} of {required} groups have different rewards after {drawn} tasks: raise "
            f"rollout.dynamic_sampling.max_draws (now {settings.max_draws}), choose tasks closer to the "
            "model's ability, or set rollout.dynamic_sampling.when_short to train"
        )


def batch_metrics(batch: Batch, seconds: float, masked: Collection[StopReason]) -> dict[str, float]:
    """``reward/*`` and ``rollout/*`` of all episodes of the step, discarded ones included, which took ``seconds``;
    ``filter/*``."""
    rollout = Rollout(batch.sampled, batch.dropped, seconds)
    return rollout_metrics(rollout) | filter_metrics(batch.groups, batch.discarded, masked)


def goodput(trained: Sequence[Sample], groups: Sequence[Group], seconds: float) -> dict[str, float]:
    """``goodput/*`` of a step of ``seconds`` that sampled ``groups``: sampled tokens in ``trained``."""
    tokens = sum(int(sample.loss_mask.sum()) for sample in trained)
    sampled = sum(trajectory.sampled_tokens for group in groups for trajectory in group.trajectories)
    return {"goodput/tokens_per_second": tokens / seconds, "goodput/fraction": tokens / sampled if sampled else 0.0}


def rescore_values(groups: Sequence[Group], failed: int, tail: float) -> dict[str, float]:
    """``old_logprob/*`` with ``failed`` rescorings, and ``time/rescore_tail``: seconds that the step waited only for
    rescoring."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return rescore_metrics(trajectories) | {"old_logprob/rescore_failed": float(failed), "time/rescore_tail": tail}


def _in_order(group: Group) -> Group:
    """``group`` with its trajectories in an order independent of when they finished, so that a repeated step sums in
    the same order and gets the same bits."""
    members = sorted(group.trajectories, key=lambda t: (t.tokens.tobytes(), t.logprobs.tobytes()))
    return replace(group, trajectories=tuple(members))
