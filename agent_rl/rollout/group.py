"""Groups: n trajectories of every task, run concurrently under one TaskGroup.

What holds:

- at most ``limiter.limit`` episodes are in flight, however many groups there are;
- every group is reported exactly once, as finished or as dropped, in the order they end;
- an infrastructure failure is run again at most ``retries`` times a group, and never enters a group as a reward;
- leaving :func:`collect_groups` by any way (return, error, cancellation) leaves no episode running.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from agent_rl.errors import RolloutFailed
from agent_rl.rollout.limiter import Limiter
from agent_rl.types import Group, Trajectory
from envs import Task

EpisodeRunner = Callable[[Task], Awaitable[Trajectory]]
"""Runs one episode of a task: ``functools.partial(run_episode, env, engine=..., renderer=..., ...)``, say."""


@dataclass(frozen=True, slots=True, eq=False)
class DroppedGroup:
    """A task whose group could not be completed, and why each of its failed episodes failed."""

    task_id: str
    errors: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RolloutEvent:
    """Progress: one episode ended (``trajectory``, which may be a failure about to be retried), and with it perhaps a
    group (``group`` or ``dropped``)."""

    trajectory: Trajectory | None = None
    group: Group | None = None
    dropped: DroppedGroup | None = None
    in_flight: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """What :func:`collect_groups` collected: the groups in the order they finished, and the wall time in seconds."""

    groups: tuple[Group, ...]
    dropped: tuple[DroppedGroup, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """``size`` trajectories a group; ``retries`` episodes of it may be run again after an infrastructure failure.

    A group that ends with fewer than ``min_size`` trajectories is dropped (an advantage needs two to compare), and
    more than ``max_dropped`` dropped groups fail the rollout; None allows a quarter of them, so that one task with a
    broken image doesn't end a long run and a broken host does.
    """

    size: int
    retries: int = 3
    min_size: int = 2
    max_dropped: int | None = None


async def collect_groups(
    tasks: Sequence[Task],
    run: EpisodeRunner,
    settings: GroupSettings,
    *,
    limiter: Limiter,
    on_event: Callable[[RolloutEvent], None] | None = None,
) -> Rollout:
    """Run ``settings.size`` episodes of every task, calling ``on_event`` as episodes and groups end.

    Raises RolloutFailed when more groups than ``settings.max_dropped`` allows were dropped, and whatever ``run`` raises
    (the first one, not a group of them); the other episodes are then cancelled and have cleaned up.
    """
    max_dropped = len(tasks) // 4 if settings.max_dropped is None else settings.max_dropped
    collector = _Collector(run, replace(settings, max_dropped=max_dropped), limiter, on_event or (lambda event: None))
    started = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as scope:
            for task in tasks:
                scope.create_task(collector.group(task), name=f"group-{task.id}")
    except BaseExceptionGroup as errors:
        raise first_leaf(errors) from None
    return Rollout(tuple(collector.groups), tuple(collector.dropped), time.perf_counter() - started)


def first_leaf(error: BaseException) -> BaseException:
    """The first error of a (nested) group: what a user should read in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class _Collector:
    def __init__(
        self,
        run: EpisodeRunner,
        settings: GroupSettings,
        limiter: Limiter,
        on_event: Callable[[RolloutEvent], None],
    ) -> None:
        self.run, self.settings, self.limiter, self.on_event = run, settings, limiter, on_event
        self.groups: list[Group] = []
        self.dropped: list[DroppedGroup] = []

    async def group(self, task: Task) -> None:
        members: list[Trajectory] = []
        failures: list[str] = []
        async with asyncio.TaskGroup() as scope:
            for index in range(self.settings.size):
                scope.create_task(self._member(task, members, failures), name=f"episode-{task.id}-{index}")
        if len(members) >= min(self.settings.min_size, self.settings.size):
            self._finish(Group(task.id, tuple(members), infrastructure_failures=len(failures)))
        else:
            self._drop(DroppedGroup(task.id, tuple(failures)))

    async def _member(self, task: Task, members: list[Trajectory], failures: list[str]) -> None:
        """Run one trajectory of the group, again after an infrastructure failure while the group's budget lasts."""
        while True:
            async with self.limiter:
                trajectory = await self.run(task)
            if trajectory.stop.infrastructure:
                failures.append(trajectory.error or trajectory.stop.value)
            else:
                members.append(trajectory)
            self._tell(trajectory=trajectory)
            # The n-th failure is retried only for n <= retries; members that fail after that are given up.
            if not trajectory.stop.infrastructure or len(failures) > self.settings.retries:
                return

    def _finish(self, group: Group) -> None:
        self.groups.append(group)
        self._tell(group=group)

    def _drop(self, dropped: DroppedGroup) -> None:
        self.dropped.append(dropped)
        self._tell(dropped=dropped)
        bound = self.settings.max_dropped
        if bound is not None and len(self.dropped) > bound:
            raise RolloutFailed(
                f"{len(self.dropped)} group(s) could not be collected (at most {bound} may be "
                f"dropped); task {dropped.task_id} failed {len(dropped.errors)} times, last: {dropped.errors[-1]}"
            )

    def _tell(
        self,
        trajectory: Trajectory | None = None,
        group: Group | None = None,
        dropped: DroppedGroup | None = None,
    ) -> None:
        self.on_event(RolloutEvent(trajectory, group, dropped, self.limiter.in_flight, self.limiter.waiting))
