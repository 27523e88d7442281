"""Collects groups of n trajectories per task, concurrently under one TaskGroup.

Invariants:

- At most ``limiter.limit`` episodes are in flight, however many groups there are.
- Every group is reported exactly once, as finished or as dropped, in the order in which groups end.
- An infrastructure failure is retried at most ``retries`` times per group and never enters a group as a reward.
- A task that can never be graded is not retried.
- An episode whose node was lost is run again without using the retry budget.
- A finished trajectory is rescored at once, while other episodes still run, but only in a group with different rewards.
- An environment that grades groups does so once for each complete group, before it is rescored.
- However :func:`collect_groups` is left (return, error, cancellation), no episode keeps running.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from agent_rl.errors import EngineError, RolloutFailed
from agent_rl.rollout.episode import stop_reason_for
from agent_rl.rollout.filters import has_contrast
from agent_rl.rollout.group_grading import GroupGrading
from agent_rl.types import Group, StopReason, Trajectory
from agent_rl.utils.concurrency import first_error
from envs import Task


class Limiter:
    """``async with limiter:`` takes one of ``limit`` slots. Waiters get slots in the order they arrived."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit: {limit}, expected 1 or more")
        self.limit = limit
        self._slots = asyncio.Semaphore(limit)
        self._in_flight = 0
        self._waiting = 0
        self._peak = 0

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def peak(self) -> int:
        """The largest number of slots in use at once."""
        return self._peak

    async def __aenter__(self) -> None:
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        self._in_flight += 1
        self._peak = max(self._peak, self._in_flight)

    async def __aexit__(self, *error: object) -> None:
        self._in_flight -= 1
        self._slots.release()


EpisodeRunner = Callable[[Task], Awaitable[Trajectory]]
"""Runs one episode of a task, for example ``functools.partial(run_episode, env, engine=..., renderer=..., ...)``."""


Rescore = Callable[[Trajectory], Awaitable[Trajectory]]
"""Returns a finished trajectory with rescored log-probs: :class:`agent_rl.rollout.rescore.Rescorer`."""


@dataclass(frozen=True, slots=True, eq=False)
class DroppedGroup:
    """A task whose group could not be completed, with the error of each failed episode.

    ``undecidable``: the task itself is the cause, so a retry would fail too.
    """

    task_id: str
    errors: tuple[str, ...]
    undecidable: bool = False

    @property
    def cause(self) -> str:
        """The error of the first failed episode, or the error that made the task undecidable."""
        return next(iter(self.errors[::-1] if self.undecidable else self.errors), "")


@dataclass(frozen=True, slots=True, eq=False)
class RolloutEvent:
    """Progress: an episode ended (``trajectory``, possibly a failure that will be retried), or a group ended
    (``group`` or ``dropped``)."""

    trajectory: Trajectory | None = None
    group: Group | None = None
    dropped: DroppedGroup | None = None
    in_flight: int = 0
    waiting: int = 0


OnEvent = Callable[[RolloutEvent], None]


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """The result of :func:`collect_groups`: groups in the order they finished, and the wall time in seconds."""

    groups: tuple[Group, ...]
    dropped: tuple[DroppedGroup, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """``size`` trajectories per group; up to ``retries`` episodes are repeated after infrastructure failures.

    A group with fewer than ``min_size`` trajectories is dropped (an advantage needs two). More than ``max_dropped``
    dropped groups fail the rollout. None allows a quarter of the tasks, so that one task with a broken image does not
    end a long run, but a broken node does. Undecidable tasks have the same limit, at least 1, of their own.
    ``rescore_uniform``: rescore groups even if all their rewards are equal (for advantages that are not taken within
    the group).
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
    on_event: OnEvent | None = None,
    rescore: Rescore | None = None,
    grading: GroupGrading | None = None,
) -> Rollout:
    """Run ``settings.size`` episodes of every task. ``on_event`` is called as episodes and groups end.

    ``grading`` gives the trajectories of a complete group new grades. ``rescore`` is called with every trajectory once
    its group has different rewards. A trajectory whose rescoring raises EngineError is left out of its group and counts
    as an infrastructure failure. Raises RolloutFailed if more groups were dropped than ``settings.max_dropped`` allows,
    and whatever ``run`` raises (the first error, not an exception group). The other episodes are then cancelled and
    cleaned up.
    """
    max_dropped = len(tasks) // 4 if settings.max_dropped is None else settings.max_dropped
    collector = GroupCollector(settings, limiter, on_event or (lambda event: None), rescore, grading)
    groups, dropped, started = list[Group](), list[DroppedGroup](), time.perf_counter()

    async def run_group(task: Task) -> None:
        ended = await collector.collect(task, run)
        if isinstance(ended, Group):
            groups.append(ended)
        else:
            dropped.append(ended)
            check_dropped(dropped, max_dropped)

    try:
        async with asyncio.TaskGroup() as scope:
            for task in tasks:
                scope.create_task(run_group(task), name=f"group-{task.id}")
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    return Rollout(tuple(groups), tuple(dropped), time.perf_counter() - started)


def check_dropped(dropped: Sequence[DroppedGroup], max_dropped: int) -> None:
    """Raises RolloutFailed if more than ``max_dropped`` groups of the same kind as the last one were dropped. The
    kinds are undecidable (one is always allowed) and other."""
    last = dropped[-1]
    count = sum(other.undecidable is last.undecidable for other in dropped)
    if count > max(max_dropped, last.undecidable):
        reason, _, _ = last.cause.partition("\n")
        raise RolloutFailed(
            f"{count} group(s) could not be collected (at most {max_dropped} may be "
            f"dropped); task {last.task_id} failed {len(last.errors)} times, first: {reason}"
        )


@dataclass(slots=True)
class _GroupState:
    """A group whose episodes run. Rescoring was started for the first ``rescore_started`` members and failed for the
    members with index in ``rescore_failed``."""

    members: list[Trajectory] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    rescore_started: int = 0
    rescore_failed: set[int] = field(default_factory=set)
    undecidable: bool = False


class GroupCollector:
    """Collects groups, one after another or concurrently. ``on_event`` is called as episodes and groups end."""

    def __init__(
        self,
        settings: GroupSettings,
        limiter: Limiter,
        on_event: OnEvent,
        rescore: Rescore | None = None,
        grading: GroupGrading | None = None,
    ) -> None:
        self.settings, self.limiter, self.on_event, self.rescore = settings, limiter, on_event, rescore
        self.grading = grading

    async def collect(self, task: Task, run: EpisodeRunner) -> Group | DroppedGroup:
        """Run ``settings.size`` episodes of ``task``. Raises what ``run`` raises, as an exception group."""
        state = _GroupState()
        async with asyncio.TaskGroup() as scope:
            for index in range(self.settings.size):
                scope.create_task(self._run_member(task, run, state, scope), name=f"episode-{task.id}-{index}")
        if self.grading is not None and self._complete(state.members):
            async with asyncio.TaskGroup() as scope:
                await self._grade_group(self.grading, task, state)
                self._rescore_members(state, scope)
        members = [member for index, member in enumerate(state.members) if index not in state.rescore_failed]
        if self._complete(members):
            group = Group(task.id, tuple(members), infrastructure_failures=len(state.failures))
            self._emit(group=group)
            return group
        dropped = DroppedGroup(task.id, tuple(state.failures), state.undecidable)
        self._emit(dropped=dropped)
        return dropped

    def _complete(self, members: Sequence[Trajectory]) -> bool:
        return len(members) >= min(self.settings.min_size, self.settings.size)

    async def _grade_group(self, grading: GroupGrading, task: Task, state: _GroupState) -> None:
        """Give the members their final grades. A failure of the grading drops the group: it is infrastructure."""
        try:
            state.members = await grading(task, state.members)
        except Exception as error:
            if stop_reason_for(error) is None:
                raise
            state.members = []
            state.failures.append(f"grading the group: {type(error).__name__}: {error}")

    async def _run_member(self, task: Task, run: EpisodeRunner, state: _GroupState, scope: asyncio.TaskGroup) -> None:
        """Run one trajectory of the group, with retries after infrastructure failures."""
        while True:
            queued = time.perf_counter()
            async with self.limiter:
                if state.undecidable:
                    return
                waited = round(time.perf_counter() - queued, 6)
                trajectory = await run(task)
            if not trajectory.recovered:
                trajectory = replace(trajectory, queue_seconds=waited)
            if trajectory.stop is StopReason.NODE_LOST:
                self._emit(trajectory=trajectory)
                continue  # a lost node is counted once for all its episodes, where it is detected
            if trajectory.stop.infrastructure:
                state.undecidable |= trajectory.stop is StopReason.UNDECIDABLE
                state.failures.append(trajectory.error or trajectory.stop.value)
            else:
                state.members.append(trajectory)
                if self.grading is None:
                    self._rescore_members(state, scope)
            self._emit(trajectory=trajectory)
            # The n-th failure is retried only for n <= retries.
            if not trajectory.stop.infrastructure or len(state.failures) > self.settings.retries:
                return

    def _rescore_members(self, state: _GroupState, scope: asyncio.TaskGroup) -> None:
        """Start to rescore new members, unless all rewards so far are equal."""
        if self.rescore is None or not (self.settings.rescore_uniform or has_contrast(state.members)):
            return
        for index in range(state.rescore_started, len(state.members)):
            scope.create_task(self._rescore_member(state, index, self.rescore), name=f"rescore-{index}")
        state.rescore_started = len(state.members)

    async def _rescore_member(self, state: _GroupState, index: int, rescore: Rescore) -> None:
        try:
            state.members[index] = await rescore(state.members[index])
        except EngineError as error:
            state.rescore_failed.add(index)
            state.failures.append(f"rescoring: {type(error).__name__}: {error}")

    def _emit(
        self, trajectory: Trajectory | None = None, group: Group | None = None, dropped: DroppedGroup | None = None
    ) -> None:
        self.on_event(RolloutEvent(trajectory, group, dropped, self.limiter.in_flight, self.limiter.waiting))
