"""Evaluation: Pass@1 on a set of tasks, with an interval, and infrastructure failures in a column of their own."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from agent_rl.observe.files import write_json
from agent_rl.rollout.group import EpisodeRunner, GroupSettings, Rollout, RolloutEvent, collect_groups
from agent_rl.rollout.limiter import Limiter
from agent_rl.types import Trajectory
from envs import Task

Z95 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """One task's samples: how many were graded, how many resolved it, and what broke."""

    task_id: str
    graded: int
    resolved: int
    infrastructure_failures: int
    stops: tuple[str, ...]
    turns_mean: float
    error: str = ""

    @property
    def pass_rate(self) -> float:
        return self.resolved / self.graded


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Pass@1 of ``policy`` on ``env``.

    ``pass_at_1`` is the mean over graded tasks of the share of a task's samples that resolved it; NaN where nothing
    could be graded. ``interval`` is Wilson's 95 % interval with the graded *tasks* as its trials, however many samples
    each has: samples of one task are not independent. ``ungraded`` tasks met only infrastructure failures; they are in
    neither the numerator nor the denominator.
    """

    policy: str
    env: str
    tasks: int
    samples: int
    graded: int
    ungraded: int
    infrastructure_failures: int
    pass_at_1: float
    interval: tuple[float, float]
    turns_mean: float
    seconds: float
    stops: dict[str, int]
    outcomes: tuple[TaskOutcome, ...]

    def write(self, path: Path) -> None:
        """Write the report as JSON, atomically; NaN becomes null."""
        write_json(path, asdict(self))


async def evaluate(
    tasks: Sequence[Task],
    run: EpisodeRunner,
    *,
    policy: str,
    limiter: Limiter,
    samples: int = 1,
    retries: int = 3,
    on_event: Callable[[RolloutEvent], None] | None = None,
) -> EvalReport:
    """Run ``samples`` episodes of every task and report Pass@1. ``run`` is what makes the policy: an engine, or a
    solver (:func:`agent_rl.rollout.solvers.solver_runner`). Raises what :func:`collect_groups` raises."""
    settings = GroupSettings(size=samples, retries=retries, min_size=1, max_dropped=len(tasks))
    rollout = await collect_groups(tasks, run, settings, limiter=limiter, on_event=on_event)
    return report(rollout, tasks, policy=policy, samples=samples)


def report(rollout: Rollout, tasks: Sequence[Task], *, policy: str, samples: int) -> EvalReport:
    """The report on what was collected, outcomes in the order of ``tasks``."""
    order = {task.id: index for index, task in enumerate(tasks)}
    outcomes = [_outcome(g.task_id, g.trajectories, g.infrastructure_failures) for g in rollout.groups]
    outcomes += [_outcome(d.task_id, (), len(d.errors), d.errors[-1]) for d in rollout.dropped]
    outcomes.sort(key=lambda outcome: order[outcome.task_id])
    graded = [outcome for outcome in outcomes if outcome.graded]
    rate = statistics.fmean(outcome.pass_rate for outcome in graded) if graded else math.nan
    return EvalReport(
        policy=policy,
        env=tasks[0].env if tasks else "",
        tasks=len(tasks),
        samples=samples,
        graded=len(graded),
        ungraded=len(outcomes) - len(graded),
        infrastructure_failures=sum(outcome.infrastructure_failures for outcome in outcomes),
        pass_at_1=rate,
        interval=wilson_interval(rate, len(graded)),
        turns_mean=statistics.fmean(outcome.turns_mean for outcome in graded) if graded else 0.0,
        seconds=rollout.seconds,
        stops=dict(sorted(Counter(stop for outcome in outcomes for stop in outcome.stops).items())),
        outcomes=tuple(outcomes),
    )


def _outcome(task_id: str, trajectories: Sequence[Trajectory], failures: int, error: str = "") -> TaskOutcome:
    return TaskOutcome(
        task_id=task_id,
        graded=len(trajectories),
        resolved=sum(trajectory.resolved for trajectory in trajectories),
        infrastructure_failures=failures,
        stops=tuple(trajectory.stop.value for trajectory in trajectories),
        turns_mean=statistics.fmean(len(t.turns) for t in trajectories) if trajectories else 0.0,
        error=error,
    )


def wilson_interval(rate: float, trials: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval (1927) of a share ``rate`` of ``trials``; (0, 1) where there are none."""
    if not trials:
        return 0.0, 1.0
    spread = z * z / trials
    centre = (rate + spread / 2) / (1 + spread)
    half = z * math.sqrt(rate * (1 - rate) / trials + spread / (4 * trials)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def table(reports: Sequence[EvalReport]) -> Table:
    """The reports side by side, for a terminal."""
    result = Table(
        "policy", "env", "Pass@1", "95 % interval", "tasks", "samples", "infra failures", "ungraded", "turns"
    )
    for item in reports:
        low, high = item.interval
        result.add_row(
            item.policy,
            item.env,
            f"{item.pass_at_1:.1%}",
            f"{low:.1%} to {high:.1%}",
            str(item.graded),
            str(item.samples),
            str(item.infrastructure_failures),
            str(item.ungraded),
            f"{item.turns_mean:.1f}",
        )
    return result
