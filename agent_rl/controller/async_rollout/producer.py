"""Samples groups while the rollout buffer has capacity, concurrently with training.

::

    RolloutBuffer.admit ── position ──▶ TaskOrder ──▶ n episodes (Limiter) ──▶ journal ──▶ group ──▶ RolloutBuffer.end
                                        └── left out: the next position is drawn instead

All groups of a run run under one TaskGroup, so however :meth:`RolloutProducer.running` is left, no episode keeps
running.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Container, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import numpy as np

from agent_rl.controller.async_rollout.buffer import RolloutBuffer
from agent_rl.controller.async_rollout.task_ledger import Outcome
from agent_rl.controller.journal import Journal
from agent_rl.controller.task_order import TaskOrder
from agent_rl.errors import RolloutFailed
from agent_rl.rollout.episode_recovery import LoggedRunner
from agent_rl.rollout.filters import teaches
from agent_rl.rollout.group import (
    DroppedGroup,
    EpisodeRunner,
    GroupCollector,
    GroupSettings,
    Limiter,
    OnEvent,
    Rescore,
    RolloutEvent,
    check_dropped,
)
from agent_rl.rollout.group_grading import GroupGrading
from agent_rl.types import Group, StopReason, Trajectory
from agent_rl.utils.concurrency import first_error
from envs import Task

DROP_WINDOW_BATCHES = 4
"""Dropped groups are limited over this many batches, undecidable ones over one."""


class RolloutProducer:
    """Fills ``buffer`` with the groups of the tasks in ``order``, without tasks whose id is in ``left_out`` at that
    time. Trajectories that stopped for a reason in ``masked`` teach nothing. ``scored`` wraps the runner of episodes,
    recovered ones included. ``last_episode``: when the last episode ended."""

    def __init__(
        self,
        settings: GroupSettings,
        order: TaskOrder,
        buffer: RolloutBuffer,
        journal: Journal,
        run: LoggedRunner,
        *,
        limiter: Limiter,
        masked: Collection[StopReason] = (),
        left_out: Container[str] = (),
        rescore: Rescore | None = None,
        grading: GroupGrading | None = None,
        scored: Callable[[EpisodeRunner], EpisodeRunner] | None = None,
        on_event: OnEvent = lambda event: None,
    ) -> None:
        self._scored = scored
        self._order, self._buffer, self._journal, self._run = order, buffer, journal, run
        self._masked, self._left_out, self._on_event = masked, left_out, on_event
        self._rules = buffer.rules
        self._collector = GroupCollector(settings, limiter, self._on_episode_event, rescore, grading)
        self._grades_groups = grading is not None
        self._ended: dict[int, Group | DroppedGroup] = {}
        self._recent: deque[DroppedGroup | None] = deque(maxlen=DROP_WINDOW_BATCHES * self._rules.width)
        self._groups: set[asyncio.Task[None]] = set()
        self._running = 0
        self._busy_since = self._busy = 0.0
        self._last_report = time.perf_counter() if self._rules.depth else 0.0
        self.last_episode = time.perf_counter()

    def seconds(self) -> float:
        """Sampling time since the last call: all of it with asynchronous training, else the time in which any group
        ran."""
        spent = time.perf_counter() if self._rules.depth else self._busy_seconds
        before, self._last_report = self._last_report, spent
        return spent - before

    @property
    def _busy_seconds(self) -> float:
        return self._busy + (time.perf_counter() - self._busy_since if self._running else 0.0)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Groups are sampled within the block. Raises RolloutFailed after too many infrastructure failures, and
        whatever an episode raises."""
        try:
            async with asyncio.TaskGroup() as scope:
                feeder = scope.create_task(self._feed(scope), name="feed")
                try:
                    yield
                finally:
                    for task in (feeder, *self._groups):
                        task.cancel()
        except BaseExceptionGroup as errors:
            error = first_error(errors)
            raise error from error.__cause__

    async def hand_over(self, positions: Iterable[int]) -> dict[int, Group | DroppedGroup]:
        """The groups of a batch's ``positions``, in order, which are then no longer stored here. Positions left out
        have no group."""
        ended = {position: self._ended.pop(position) for position in positions if position in self._ended}
        return {position: await self._restore_group(position, group) for position, group in ended.items()}

    async def _restore_group(self, position: int, ended: Group | DroppedGroup) -> Group | DroppedGroup:
        journaled = self._journal.finished(position)
        if not self._rules.depth or isinstance(ended, DroppedGroup):
            return ended
        return await asyncio.to_thread(restore, ended, journaled)

    async def _feed(self, scope: asyncio.TaskGroup) -> None:
        while True:
            position = await self._buffer.admit()
            task = self._order.at(position)
            if task.id in self._left_out:
                if all(task.id in self._left_out for task in self._order.tasks):
                    raise RolloutFailed("no task can be graded: see the run's quarantine.json")
                self._buffer.end(position, Outcome.LEFT_OUT)
                continue
            group = scope.create_task(self._sample(position, task), name=f"group-{position}-{task.id}")
            self._groups.add(group)
            group.add_done_callback(self._groups.discard)

    async def _sample(self, position: int, task: Task) -> None:
        await self._journal.wait_usable(position)
        with self._timed():
            run = self._journal.runner(position, self._run, self._buffer.oldest(position))
            if self._scored is not None:
                run = self._scored(run)
            spills = self._rules.depth and not self._grades_groups  # a group is graded with its messages
            ended = await self._collector.collect(task, spill(run) if spills else run)
        if self._rules.depth and self._grades_groups and isinstance(ended, Group):
            ended = replace(ended, trajectories=tuple(map(strip, ended.trajectories)))
        self._end(position, ended)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        if not self._running:
            self._busy_since = time.perf_counter()
        self._running += 1
        try:
            yield
        finally:
            self._busy, self._busy_since = self._busy_seconds, time.perf_counter()
            self._running -= 1

    def _end(self, position: int, ended: Group | DroppedGroup) -> None:
        self._ended[position] = ended
        self._recent.append(ended if isinstance(ended, DroppedGroup) else None)
        if isinstance(ended, DroppedGroup):
            self._check_drops(undecidable=ended.undecidable)
        self._buffer.end(position, self._outcome(ended))

    def _check_drops(self, *, undecidable: bool) -> None:
        width = self._rules.width
        recent = list(self._recent)[-width if undecidable else 0 :]
        check_dropped([each for each in recent if each is not None], max(len(recent), width) // 4)

    def _outcome(self, ended: Group | DroppedGroup) -> Outcome:
        if isinstance(ended, DroppedGroup):
            return Outcome.LEFT_OUT if ended.undecidable else Outcome.DROPPED
        return Outcome.DISCARDED if self._rules.dynamic and not teaches(ended, self._masked) else Outcome.KEPT

    def _on_episode_event(self, event: RolloutEvent) -> None:
        if event.trajectory is not None:
            self.last_episode = time.perf_counter()
        self._on_event(event)


def spill(run: EpisodeRunner) -> EpisodeRunner:
    """Wraps ``run``, whose trajectories are journaled, to :func:`strip` them when they end: a group may wait long
    for its last one."""

    async def spilled(task: Task) -> Trajectory:
        trajectory = await run(task)
        return trajectory if trajectory.stop.infrastructure else strip(trajectory)

    return spilled


def restore(group: Group, journaled: Iterable[Trajectory]) -> Group:
    """``group`` with the ``journaled`` fields of its stripped trajectories, in the group's order."""
    pairs = zip(group.trajectories, journaled, strict=True)
    return replace(group, trajectories=tuple(_restore_fields(stripped, journaled) for stripped, journaled in pairs))


def strip(trajectory: Trajectory) -> Trajectory:
    """Keeps only the fields needed before training; the rest is read back from the journal. Of its tokens one is
    kept, if any was sampled."""
    tokens = min(1, trajectory.sampled_tokens)
    return replace(
        trajectory, tokens=np.zeros(tokens, np.int32), loss_mask=np.ones(tokens, np.bool_),
        logprobs=np.zeros(tokens, np.float32), routing=None, turns=(), messages=(), versions=(), patch="", tests={},
        test_log="", further=(), kept=None,
    )  # fmt: skip


def _restore_fields(stripped: Trajectory, journaled: Trajectory) -> Trajectory:
    """``journaled`` with what was decided or measured after it was written, such as the grade within its group."""
    return replace(
        journaled, queue_seconds=stripped.queue_seconds, recovered=stripped.recovered,
        replayed_turns=stripped.replayed_turns, audit=stripped.audit, reward=stripped.reward,
        resolved=stripped.resolved, parts=stripped.parts, metrics=stripped.metrics,
        model_calls=stripped.model_calls, teacher_logprobs=stripped.teacher_logprobs,
        teacher_top=stripped.teacher_top, turn_rewards=stripped.turn_rewards,
    )  # fmt: skip
