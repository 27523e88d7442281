"""Runs an evaluation: several samples of every task, one result each."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

from agent_rl.evaluation.report import EpisodeResult, EvalReport, report
from agent_rl.evaluation.usage import Usage, total, usage_of
from agent_rl.rollout.group import EpisodeRunner, GroupSettings, Limiter, OnEvent, RolloutEvent, collect_groups
from agent_rl.types import StopReason, Trajectory
from envs import Task


async def evaluate(
    tasks: Sequence[Task],
    run: EpisodeRunner,
    *,
    policy: str,
    limiter: Limiter,
    samples: int = 1,
    retries: int = 3,
    done: Iterable[EpisodeResult] = (),
    on_result: Callable[[EpisodeResult, Trajectory | None], None] | None = None,
    on_event: OnEvent | None = None,
) -> EvalReport:
    """Run ``samples`` episodes of every task and report Pass@1.

    ``run`` runs an episode with the policy: an engine, or a solver
    (:func:`agent_rl.rollout.scripted_policies.solver_runner`). After an infrastructure failure a sample runs again, at
    most ``retries`` times. Graded samples in ``done`` do not run again. ``on_result`` receives each finished sample,
    with its trajectory if it was graded. Raises the errors of :func:`collect_groups`.
    """
    known = {(r.task_id, r.sample): r for r in done}
    results = {key: r for key, r in known.items() if r.resolved is not None}
    missing = [(task, s) for s in range(samples) for task in tasks if (task.id, s) not in results]
    waiting: dict[str, deque[int]] = defaultdict(deque)
    for task, sample in missing:
        waiting[task.id].append(sample)
    failed: dict[str, list[Usage | None]] = defaultdict(list)
    for result in known.values():
        if result.resolved is None:
            failed[result.task_id].append(result.usage)

    def handle_event(event: RolloutEvent) -> None:
        if event.trajectory is not None and event.trajectory.stop.infrastructure:
            failed[event.trajectory.task_id].append(usage_of(event.trajectory))
        if (finished := event.group or event.dropped) is not None:
            result = _result(event, waiting[finished.task_id].popleft(), failed.pop(finished.task_id, []))
            results[result.task_id, result.sample] = result
            if on_result is not None:
                on_result(result, event.group.trajectories[0] if event.group else None)
        if on_event is not None:
            on_event(event)

    settings = GroupSettings(size=1, retries=retries, min_size=1, max_dropped=len(missing))
    rollout = await collect_groups([task for task, _ in missing], run, settings, limiter=limiter, on_event=handle_event)
    return report(results.values(), tasks, policy=policy, samples=samples, seconds=rollout.seconds)


def _result(event: RolloutEvent, sample: int, failed: list[Usage | None]) -> EpisodeResult:
    """The result of a group of one episode, or of a dropped one. ``failed``: the tokens of its failed episodes, or of
    another sample of the task; their sum counts."""
    if event.group is None:
        assert event.dropped is not None
        errors = event.dropped.errors
        stop = StopReason.UNDECIDABLE.value if event.dropped.undecidable else ""
        usage, cause = total(failed), event.dropped.cause
        return EpisodeResult(
            event.dropped.task_id, sample, None, stop, 0, 0.0, failures=len(errors), error=cause, usage=usage
        )
    (trajectory,) = event.group.trajectories
    return EpisodeResult(
        task_id=event.group.task_id,
        sample=sample,
        resolved=trajectory.resolved,
        stop=trajectory.stop.value,
        turns=len(trajectory.turns),
        seconds=trajectory.seconds,
        failures=event.group.infrastructure_failures,
        patch=trajectory.patch,
        suspected_hack=trajectory.suspected_hack,
        usage=total([*failed, usage_of(trajectory)]),
        parts=trajectory.parts,
        metrics=trajectory.metrics,
    )
