"""Groups: n trajectories of every task, run concurrently under one TaskGroup.

What holds:

- at most ``limiter.limit`` episodes are in flight, however many groups there are;
- every group is reported exactly once, as finished or as dropped, in the order they end;
- an infrastructure failure is run again at most ``retries`` times a group, and never enters a group as a reward;
- a task that cannot be graded whatever the patch is not tried again;
- an episode whose host was lost is run again without being counted as one of these;
- a finished trajectory is rescored at once, while other episodes still run, but only in a group that teaches something;
- leaving :func:`collect_groups` by any way (return, error, cancellation) leaves no episode running.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from agent_rl.errors import EngineError, RolloutFailed
from agent_rl.rollout.filters import contrasting
from agent_rl.rollout.limiter import Limiter
from agent_rl.types import Group, StopReason, Trajectory
from agent_rl.utils.concurrency import first_leaf
from envs import Task

EpisodeRunner = Callable[[Task], Awaitable[Trajectory]]
"""Runs one episode of a task: ``functools.partial(run_episode, env, engine=..., renderer=..., ...)``, say."""


Rescore = Callable[[Trajectory], Awaitable[Trajectory]]
"""Gives a finished trajectory back rescored: :class:`agent_rl.rollout.rescore.Rescorer`."""


@dataclass(frozen=True, slots=True, eq=False)
class DroppedGroup:
    """A task whose group could not be completed, and why each of its failed episodes failed.

    ``undecidable``: the task itself is the cause, and will be the next time."""

    task_id: str
    errors: tuple[str, ...]
    undecidable: bool = False

    @property
    def cause(self) -> str:
        """What failed its first episode, or made it undecidable. The first line says it."""
        return next(iter(self.errors[::-1] if self.undecidable else self.errors), "")


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
    more than ``max_dropped`` dropped groups fail the rollout; None allows a quarter of the tasks, so that one task with
    a broken image doesn't end a long run and a broken host does. Undecidable tasks have that bound, at least one, for
    themselves. ``rescore_uniform``: rescore groups also while all their rewards are equal (for advantages that are not
    taken within the group).
    """

    size: int
    retries: int = 3
    min_size: int = 2
    max_dropped: int | None = None
    rescore_uniform: bool = False


async def collect_groups(
    tasks: Sequence[Task],
    run: EpisodeRunner,
    settings: GroupSettings,
    *,
    limiter: Limiter,
    on_event: Callable[[RolloutEvent], None] | None = None,
    rescore: Rescore | None = None,
) -> Rollout:
    """Run ``settings.size`` episodes of every task, calling ``on_event`` as episodes and groups end.

    ``rescore`` is called with every trajectory once its group has any contrast; one whose rescoring raises EngineError
    is no member of its group, as if it had not been run, and counts as an infrastructure failure.
    Raises RolloutFailed when more groups than ``settings.max_dropped`` allows were dropped, and whatever ``run`` raises
    (the first one, not a group of them); the other episodes are then cancelled and have cleaned up.
    """
    most = len(tasks) // 4 if settings.max_dropped is None else settings.max_dropped
    former = GroupFormer(settings, limiter, on_event or (lambda event: None), rescore)
    groups, dropped, started = list[Group](), list[DroppedGroup](), time.perf_counter()

    async def run_group(task: Task) -> None:
        ended = await former.form(task, run)
        if isinstance(ended, Group):
            groups.append(ended)
        else:
            dropped.append(ended)
            check_dropped(dropped, most)

    try:
        async with asyncio.TaskGroup() as scope:
            for task in tasks:
                scope.create_task(run_group(task), name=f"group-{task.id}")
    except BaseExceptionGroup as errors:
        raise first_leaf(errors) from None
    return Rollout(tuple(groups), tuple(dropped), time.perf_counter() - started)


def check_dropped(dropped: Sequence[DroppedGroup], most: int) -> None:
    """Raises RolloutFailed where more than ``most`` groups were dropped that are like the last one: undecidable, of
    which one is always allowed, or not."""
    last = dropped[-1]
    count = sum(other.undecidable is last.undecidable for other in dropped)
    if count > max(most, last.undecidable):
        reason, _, _ = last.cause.partition("\n")
        raise RolloutFailed(
            f"{count} group(s) could not be collected (at most {most} may be "
            f"dropped); task {last.task_id} failed {len(last.errors)} times, first: {reason}"
        )


@dataclass(slots=True)
class _Forming:
    """A group while its episodes run. Members keep their places: ``asked`` of them were sent to be rescored, those in
    ``lost`` could not be."""

    members: list[Trajectory] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    asked: int = 0
    lost: set[int] = field(default_factory=set)
    undecidable: bool = False


class GroupFormer:
    """Forms one group after the other, or several side by side; ``on_event`` is called as episodes and groups end."""

    def __init__(
        self,
        settings: GroupSettings,
        limiter: Limiter,
        on_event: Callable[[RolloutEvent], None],
        rescore: Rescore | None = None,
    ) -> None:
        self.settings, self.limiter, self.on_event, self.rescore = settings, limiter, on_event, rescore

    async def form(self, task: Task, run: EpisodeRunner) -> Group | DroppedGroup:
        """Run ``settings.size`` episodes of ``task``. Raises what ``run`` raises, as a group of errors."""
        forming = _Forming()
        async with asyncio.TaskGroup() as scope:
            for index in range(self.settings.size):
                scope.create_task(self._member(task, run, forming, scope), name=f"episode-{task.id}-{index}")
        members = [member for at, member in enumerate(forming.members) if at not in forming.lost]
        if len(members) >= min(self.settings.min_size, self.settings.size):
            group = Group(task.id, tuple(members), infrastructure_failures=len(forming.failures))
            self._tell(group=group)
            return group
        dropped = DroppedGroup(task.id, tuple(forming.failures), forming.undecidable)
        self._tell(dropped=dropped)
        return dropped

    async def _member(self, task: Task, run: EpisodeRunner, forming: _Forming, scope: asyncio.TaskGroup) -> None:
        """Run one trajectory of the group, again after an infrastructure failure while the group's budget lasts."""
        while True:
            asked = time.perf_counter()
            async with self.limiter:
                if forming.undecidable:
                    return
                waited = round(time.perf_counter() - asked, 6)
                trajectory = await run(task)
            if not trajectory.recovered:
                trajectory = replace(trajectory, queue_seconds=waited)
            if trajectory.stop is StopReason.HOST_LOST:
                self._tell(trajectory=trajectory)
                continue  # its host's loss is counted where it was noticed, once for all episodes there
            if trajectory.stop.infrastructure:
                forming.undecidable |= trajectory.stop is StopReason.UNDECIDABLE
                forming.failures.append(trajectory.error or trajectory.stop.value)
            else:
                forming.members.append(trajectory)
                self._rescore_members(forming, scope)
            self._tell(trajectory=trajectory)
            # The n-th failure is retried only for n <= retries; members that fail after that are given up.
            if not trajectory.stop.infrastructure or len(forming.failures) > self.settings.retries:
                return

    def _rescore_members(self, forming: _Forming, scope: asyncio.TaskGroup) -> None:
        """Begin to rescore the members not yet begun with, unless the group has taught nothing so far."""
        if self.rescore is None or not (self.settings.rescore_uniform or contrasting(forming.members)):
            return
        for at in range(forming.asked, len(forming.members)):
            scope.create_task(self._rescore_member(forming, at, self.rescore), name=f"rescore-{at}")
        forming.asked = len(forming.members)

    async def _rescore_member(self, forming: _Forming, at: int, rescore: Rescore) -> None:
        try:
            forming.members[at] = await rescore(forming.members[at])
        except EngineError as error:
            forming.lost.add(at)
            forming.failures.append(f"rescoring: {type(error).__name__}: {error}")

    def _tell(
        self,
        trajectory: Trajectory | None = None,
        group: Group | None = None,
        dropped: DroppedGroup | None = None,
    ) -> None:
        self.on_event(RolloutEvent(trajectory, group, dropped, self.limiter.in_flight, self.limiter.waiting))
