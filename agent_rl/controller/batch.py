"""The groups of one global step, in the order of the data, and what is measured of them."""

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
    """A step's groups: ``groups`` to train on, those ``discarded``, and those ``dropped``, each in the order of the
    data; ``outcomes`` of all its positions."""

    groups: tuple[Group, ...]
    discarded: tuple[Group, ...]
    dropped: tuple[DroppedGroup, ...]
    outcomes: Mapping[int, Outcome]

    @property
    def sampled(self) -> tuple[Group, ...]:
        """All groups, those to train on first."""
        return self.groups + self.discarded

    @property
    def verdicts_of_discarded(self) -> tuple[TrainingDecision, ...]:
        """One for each trajectory of the discarded groups."""
        return tuple(TrainingDecision(TrainingStatus.DISCARDED) for group in self.discarded for _ in group.trajectories)


def batch_of(outcomes: Mapping[int, Outcome], ended: Mapping[int, Group | DroppedGroup]) -> Batch:
    """The batch of the positions in ``outcomes``, whose groups are those ``ended``; one left out at once has none."""
    groups = {position: _in_order(group) for position, group in ended.items() if isinstance(group, Group)}
    return Batch(
        groups=tuple(group for position, group in groups.items() if outcomes[position] is Outcome.KEPT),
        discarded=tuple(group for position, group in groups.items() if outcomes[position] is Outcome.DISCARDED),
        dropped=tuple(group for group in ended.values() if isinstance(group, DroppedGroup)),
        outcomes=outcomes,
    )


def check_filled(batch: Batch, wanted: int, settings: DynamicSamplingConfig) -> None:
    """Raises RolloutFailed for a step that lacks groups of the ``wanted``, where that is to end the run."""
    if settings.enabled and settings.when_short == "stop" and len(batch.groups) < wanted:
        drawn = sum(outcome is not Outcome.LEFT_OUT for outcome in batch.outcomes.values())
        raise RolloutFailed(
            f"{len(batch.groups)} of {wanted} groups have some but not all solved, after {drawn} tasks: raise "
            f"rollout.dynamic_sampling.max_draws (now {settings.max_draws}), take tasks nearer to what the "
            "model can do, or set rollout.dynamic_sampling.when_short to train"
        )


def batch_metrics(batch: Batch, seconds: float, masked: Collection[StopReason]) -> dict[str, float]:
    """``reward/*`` and ``rollout/*`` of all episodes, discarded ones included, which took ``seconds``; ``filter/*``."""
    rollout = Rollout(batch.sampled, batch.dropped, seconds)
    return rollout_metrics(rollout) | filter_metrics(batch.groups, batch.discarded, masked)


def goodput(trained: Sequence[Sample], groups: Sequence[Group], seconds: float) -> dict[str, float]:
    """``goodput/*`` of a step of ``seconds`` that sampled ``groups``: the sampled tokens that it ``trained`` on."""
    tokens = sum(int(sample.loss_mask.sum()) for sample in trained)
    sampled = sum(trajectory.sampled_tokens for group in groups for trajectory in group.trajectories)
    return {"goodput/tokens_per_second": tokens / seconds, "goodput/fraction": tokens / sampled if sampled else 0.0}


def rescore_values(groups: Sequence[Group], failed: int, tail: float) -> dict[str, float]:
    """``old_logprob/*``, where ``failed`` trajectories could not be rescored, and ``time/rescore_tail``: how long the
    step waited for rescoring alone."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return rescore_metrics(trajectories) | {"old_logprob/rescore_failed": float(failed), "time/rescore_tail": tail}


def _in_order(group: Group) -> Group:
    """``group`` with its trajectories in an order that does not depend on when they finished: sums are then the same
    bits in a step that is done again."""
    members = sorted(group.trajectories, key=lambda t: (t.tokens.tobytes(), t.logprobs.tobytes()))
    return replace(group, trajectories=tuple(members))
