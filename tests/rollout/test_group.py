from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.memory_env import SUBMIT, MemoryEnvironment, TurnsEngine, run_memory_episode
from support.trajectories import trajectory

from agent_rl.errors import RolloutFailed, RoutesMissingError
from agent_rl.rollout.group import GroupSettings, Limiter, Rollout, RolloutEvent, collect_groups
from agent_rl.rollout.metrics import rollout_metrics
from agent_rl.types import StopReason, Trajectory
from envs import Task

SUBMITTED, SANDBOX_FAILURE, NODE_LOST = StopReason.SUBMITTED, StopReason.SANDBOX_FAILURE, StopReason.NODE_LOST
TASKS = [Task(f"task-{index}", "memory", {}) for index in range(4)]


def ended(task: Task, stop: StopReason = StopReason.SUBMITTED) -> Trajectory:
    if not stop.infrastructure:
        return trajectory(1.0, stop=stop, task_id=task.id)
    return replace(trajectory(0.0, stop=stop, task_id=task.id), reward=None, error="SandboxLostError: gone")


def endings(*stops: StopReason) -> Callable[[Task], Awaitable[Trajectory]]:
    """Episodes that end with ``stops``, in the order in which they start."""
    script = iter(stops)

    async def run(task: Task) -> Trajectory:
        return ended(task, next(script))

    return run


async def collect(run: Any, size: int, tasks: Sequence[Task] = TASKS, *, slots: int = 1, **settings: Any) -> Rollout:
    return await collect_groups(tasks, run, GroupSettings(size=size, **settings), limiter=Limiter(slots))


async def test_episodes_of_a_lost_node_run_again_and_are_not_charged() -> None:
    run = endings(*[NODE_LOST] * 9, SANDBOX_FAILURE, *[SUBMITTED] * 8)
    rollout = await collect(run, 4, TASKS[:1], slots=8, retries=1)
    (group,) = rollout.groups
    assert (len(group.trajectories), group.infrastructure_failures, rollout.dropped) == (4, 1, ())


async def test_groups_come_in_completion_order_and_each_once() -> None:
    gates = {task.id: asyncio.Event() for task in TASKS}
    events: list[RolloutEvent] = []
    gates["task-2"].set()

    async def run(task: Task) -> Trajectory:
        await gates[task.id].wait()
        return ended(task)

    def on_event(event: RolloutEvent) -> None:
        events.append(event)
        if event.group:  # a group's end opens the gate of the one before it
            index = int(event.group.task_id[-1])
            gates[f"task-{(index - 1) % 4}"].set()

    rollout = await collect_groups(TASKS, run, GroupSettings(size=3), limiter=Limiter(100), on_event=on_event)
    assert [group.task_id for group in rollout.groups] == ["task-2", "task-1", "task-0", "task-3"]
    assert [len(group.trajectories) for group in rollout.groups] == [3, 3, 3, 3]
    assert len([event for event in events if event.trajectory]) == 12
    assert len([event for event in events if event.group]) == 4


async def test_concurrency_is_limited_over_all_groups() -> None:
    limiter, running, most = Limiter(5), 0, 0

    async def run(task: Task) -> Trajectory:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return ended(task)

    await collect_groups(TASKS, run, GroupSettings(size=8), limiter=limiter)
    assert most == limiter.peak == 5


@pytest.mark.parametrize(
    ("stops", "retries", "kept", "failures"),
    [
        ([SANDBOX_FAILURE, SUBMITTED, SUBMITTED, StopReason.ENGINE_FAILURE, *[SUBMITTED] * 9], 2, 4, 2),
        ([*[SANDBOX_FAILURE] * 5, SUBMITTED, SUBMITTED], 3, 2, 5),  # a spent budget leaves a smaller group
    ],
)
async def test_a_failure_runs_again_within_a_budget(stops: Any, retries: int, kept: int, failures: int) -> None:
    rollout = await collect(endings(*stops), 4, TASKS[:1], retries=retries)
    (group,) = rollout.groups
    assert [t.reward for t in group.trajectories] == [1.0] * kept
    assert group.infrastructure_failures == failures
    metrics = rollout_metrics(rollout)
    assert (metrics["rollout/infrastructure_failures"], metrics["reward/mean"]) == (failures, 1.0)


async def test_retries_are_counted_over_the_whole_group() -> None:
    started = 0

    async def run(task: Task) -> Trajectory:
        nonlocal started
        started += 1
        await asyncio.sleep(0)
        return ended(task, SANDBOX_FAILURE)

    with pytest.raises(RolloutFailed, match=r"task-0 failed 11 times, first: SandboxLostError: gone"):
        await collect(run, 8, TASKS[:1], slots=8, retries=3)
    assert started == 8 + 3


def key_errors(gradings: Container[int]) -> tuple[MemoryEnvironment, Any]:
    """An environment whose gradings of these numbers (from 1) raise KeyError, and the run of its episodes."""
    count = itertools.count(1)

    async def grade() -> None:
        if (number := next(count)) in gradings:
            raise KeyError(f"status {number}")

    env = MemoryEnvironment(on_grade=grade)
    return env, lambda task: run_memory_episode(TurnsEngine([SUBMIT]), env)


async def test_a_key_error_in_one_of_eight_gradings_is_run_again_and_is_no_reward() -> None:
    env, run = key_errors({3})
    rollout = await collect(run, 8, TASKS[:1], slots=8)
    (group,) = rollout.groups
    assert (len(group.trajectories), group.infrastructure_failures, env.started) == (8, 1, 9)
    assert rollout_metrics(rollout)["rollout/infrastructure_failures"] == 1


async def test_beyond_the_budget_the_run_ends_with_the_first_cause_in_one_line() -> None:
    _, run = key_errors(range(99))
    with pytest.raises(RolloutFailed) as failed:
        await collect(run, 2, TASKS[:1], retries=2)
    line = r".*task task-0 failed 4 times, first: KeyError: 'status 1' \(.*test_group\.py:\d+\)"
    assert re.fullmatch(line, str(failed.value))


async def test_an_undecidable_task_is_not_tried_again_and_has_its_own_limit() -> None:
    ran: list[str] = []
    undecidable = {"task-1"}

    async def run(task: Task) -> Trajectory:
        ran.append(task.id)
        return ended(task, StopReason.UNDECIDABLE if task.id in undecidable else SUBMITTED)

    rollout = await collect(run, 4, retries=3, max_dropped=0)
    assert [(dropped.task_id, dropped.undecidable) for dropped in rollout.dropped] == [("task-1", True)]
    assert ran.count("task-1") == 1
    undecidable.add("task-2")
    with pytest.raises(RolloutFailed, match=r"^2 group"):
        await collect(run, 4, retries=3, max_dropped=0)


async def test_groups_are_dropped_up_to_the_limit() -> None:
    async def run(task: Task) -> Trajectory:
        return ended(task, SANDBOX_FAILURE if task.id == "task-1" else SUBMITTED)

    rollout = await collect(run, 2, slots=4, retries=1, max_dropped=1)
    assert sorted(group.task_id for group in rollout.groups) == ["task-0", "task-2", "task-3"]
    assert [dropped.task_id for dropped in rollout.dropped] == ["task-1"]
    metrics = rollout_metrics(rollout)
    assert (metrics["rollout/groups_dropped"], metrics["rollout/infrastructure_failures"]) == (1, 3)


async def test_the_first_error_stops_the_rest_and_is_raised_unwrapped() -> None:
    closed = 0
    waiting = asyncio.Event()

    async def run(task: Task) -> Trajectory:
        nonlocal closed
        if task.id == "task-3":
            await waiting.wait()
            raise RoutesMissingError("no routes")
        try:
            waiting.set()
            await asyncio.Event().wait()
        finally:
            closed += 1
        raise AssertionError

    with pytest.raises(RoutesMissingError, match="no routes"):
        await collect(run, 2, slots=100)
    assert closed == 6


async def test_cancellation_ends_every_episode_before_it_returns() -> None:
    limiter, all_running, closed = Limiter(8), asyncio.Event(), 0

    async def run(task: Task) -> Trajectory:
        nonlocal closed
        if limiter.in_flight == 8:
            all_running.set()
        try:
            await asyncio.Event().wait()
        finally:
            closed += 1
        raise AssertionError

    collecting = asyncio.create_task(collect_groups(TASKS, run, GroupSettings(size=4), limiter=limiter))
    await all_running.wait()
    collecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await collecting
    assert closed == 8
    assert (limiter.in_flight, limiter.waiting) == (0, 0)
