"""Samples groups as long as there is room for them, however long training takes beside it.

::

    RolloutBuffer.admit ── position ──▶ task_at ──▶ n episodes (Limiter) ──▶ journal ──▶ group ──▶ RolloutBuffer.end
                                        └── left out: the next position is drawn in its place

All groups of a run run under one TaskGroup, so leaving :meth:`RolloutProducer.running` by any way leaves no episode.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from agent_rl.config import RunConfig
from agent_rl.controller.async_rollout.buffer import RolloutBuffer
from agent_rl.controller.async_rollout.spill import restore, spill
from agent_rl.controller.async_rollout.task_ledger import Outcome
from agent_rl.controller.journal import Journal
from agent_rl.controller.task_sampler import task_at
from agent_rl.errors import RolloutFailed
from agent_rl.rollout.filters import masked_stops, teaches
from agent_rl.rollout.group import (
    DroppedGroup,
    GroupFormer,
    GroupSettings,
    Rescore,
    RolloutEvent,
    check_dropped,
)
from agent_rl.rollout.limiter import Limiter
from agent_rl.rollout.turn_log import LoggedRunner
from agent_rl.types import Group
from agent_rl.utils.concurrency import first_leaf
from envs import Task

JUDGED_BATCHES = 4
"""Groups that the infrastructure failed are judged over so many batches, undecidable ones over one."""


class RolloutProducer:
    """Fills ``buffer`` with the groups of ``tasks``, in the order of the data, but for those whose id is ``left_out``
    by the time. ``last_episode``: when the last episode ended."""

    def __init__(
        self,
        config: RunConfig,
        tasks: Sequence[Task],
        buffer: RolloutBuffer,
        journal: Journal,
        run: LoggedRunner,
        *,
        limiter: Limiter,
        left_out: Container[str] = (),
        rescore: Rescore | None = None,
        on_event: Callable[[RolloutEvent], None] = lambda event: None,
    ) -> None:
        self._config, self._tasks, self._buffer, self._journal, self._run = config, tasks, buffer, journal, run
        self._left_out, self._on_event = left_out, on_event
        rollout = config.rollout
        uniform = config.train.baseline == "batch"
        settings = GroupSettings(rollout.group_size, retries=rollout.sandbox_retries, rescore_uniform=uniform)
        self._former = GroupFormer(settings, limiter, self._told, rescore)
        self._ended: dict[int, Group | DroppedGroup] = {}
        self._recent: deque[DroppedGroup | None] = deque(maxlen=JUDGED_BATCHES * rollout.tasks_per_step)
        self._groups: set[asyncio.Task[None]] = set()
        self._running = 0
        self._busy_since = self._busy = 0.0
        self._asked = time.perf_counter() if config.async_rollout.depth else 0.0
        self.last_episode = time.perf_counter()

    def seconds(self) -> float:
        """The time that sampling took since this was last asked: all of it where it runs beside training, else that in
        which any group ran."""
        spent = time.perf_counter() if self._config.async_rollout.depth else self._busy_seconds
        before, self._asked = self._asked, spent
        return spent - before

    @property
    def _busy_seconds(self) -> float:
        return self._busy + (time.perf_counter() - self._busy_since if self._running else 0.0)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Within the block groups are sampled. Raises, from within, RolloutFailed where the infrastructure failed too
        often, and whatever an episode raises."""
        try:
            async with asyncio.TaskGroup() as scope:
                feeding = scope.create_task(self._feed(scope), name="feed")
                try:
                    yield
                finally:
                    for task in (feeding, *self._groups):
                        task.cancel()
        except BaseExceptionGroup as errors:
            error = first_leaf(errors)
            raise error from error.__cause__

    async def hand_over(self, positions: Iterable[int]) -> dict[int, Group | DroppedGroup]:
        """The groups of a batch's ``positions``, in their order, which are then no longer kept here; one that was left
        out at once has none."""
        ended = {position: self._ended.pop(position) for position in positions if position in self._ended}
        return {position: await self._whole(position, group) for position, group in ended.items()}

    async def _whole(self, position: int, ended: Group | DroppedGroup) -> Group | DroppedGroup:
        journaled = self._journal.finished(position)
        if not self._config.async_rollout.depth or isinstance(ended, DroppedGroup):
            return ended
        return await asyncio.to_thread(restore, ended, journaled)

    async def _feed(self, scope: asyncio.TaskGroup) -> None:
        while True:
            position = await self._buffer.admit()
            task = task_at(self._tasks, position, self._config.seed)
            if task.id in self._left_out:
                if all(task.id in self._left_out for task in self._tasks):
                    raise RolloutFailed("none of the tasks can be graded: the run's quarantine.json has the reasons")
                self._buffer.end(position, Outcome.LEFT_OUT)
                continue
            group = scope.create_task(self._sample(position, task), name=f"group-{position}-{task.id}")
            self._groups.add(group)
            group.add_done_callback(self._groups.discard)

    async def _sample(self, position: int, task: Task) -> None:
        await self._journal.settled(position)
        with self._timed():
            run = self._journal.runner(position, self._run, self._buffer.oldest(position))
            ended = await self._former.form(task, spill(run) if self._config.async_rollout.depth else run)
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
            self._judge(undecidable=ended.undecidable)
        self._buffer.end(position, self._outcome(ended))

    def _judge(self, *, undecidable: bool) -> None:
        width = self._config.rollout.tasks_per_step
        judged = list(self._recent)[-width if undecidable else 0 :]
        check_dropped([each for each in judged if each is not None], max(len(judged), width) // 4)

    def _outcome(self, ended: Group | DroppedGroup) -> Outcome:
        if isinstance(ended, DroppedGroup):
            return Outcome.LEFT_OUT if ended.undecidable else Outcome.DROPPED
        dynamic = self._config.rollout.dynamic_sampling.enabled
        masked = masked_stops(self._config.train.filter)
        return Outcome.DISCARDED if dynamic and not teaches(ended, masked) else Outcome.KEPT

    def _told(self, event: RolloutEvent) -> None:
        if event.trajectory is not None:
            self.last_episode = time.perf_counter()
        self._on_event(event)
