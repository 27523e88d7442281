from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Awaitable, Callable, Iterator

import numpy as np
import pytest
from support.memory_environment import SUBMIT, MemoryEnvironment, TurnsEngine

from agent_rl.config import RolloutConfig
from agent_rl.errors import RolloutFailed, RoutesMissingError
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.group import GroupSettings, RolloutEvent, collect_groups
from agent_rl.rollout.limiter import Limiter
from agent_rl.rollout.metrics import rollout_metrics
from agent_rl.rollout.scripted_policies import ByteRenderer
from agent_rl.types import StopReason, Trajectory, VersionSpan
from envs import Task
from tools.formats import tool_format

TASKS = [Task(f"task-{index}", "memory", {}) for index in range(4)]


def trajectory(task: Task, stop: StopReason = StopReason.SUBMITTED, reward: float | None = 1.0) -> Trajectory:
    return Trajectory(
        task_id=task.id,
        env=task.env,
        tokens=np.array([1, 2, 3], np.int32),
        loss_mask=np.array([False, True, True]),
        logprobs=np.array([0, -1, -1], np.float32),
        routing=None,
        stop=stop,
        reward=None if stop.infrastructure else reward,
        resolved=bool(reward) and not stop.infrastructure,
        turns=(),
        messages=(),
        versions=(VersionSpan(0, 3, "0"),),
        error="SandboxLostError: gone" if stop.infrastructure else "",
    )


def endings(script: Iterator[StopReason]) -> Callable[[Task], Awaitable[Trajectory]]:
    """Episodes that end as ``script`` says, in the order they are started."""

    async def run(task: Task) -> Trajectory:
        return trajectory(task, next(script))

    return run


async def test_episodes_of_a_lost_host_are_run_again_and_not_charged() -> None:
    script = iter([StopReason.NODE_LOST] * 9 + [StopReason.SANDBOX_FAILURE] + [StopReason.SUBMITTED] * 8)
    rollout = await collect_groups(TASKS[:1], endings(script), GroupSettings(size=4, retries=1), limiter=Limiter(8))
    (group,) = rollout.groups
    assert (len(group.trajectories), group.infrastructure_failures, rollout.dropped) == (4, 1, ())


async def test_groups_come_in_completion_order_and_each_once() -> None:
    gates = {task.id: asyncio.Event() for task in TASKS}
    events: list[RolloutEvent] = []
    gates["task-2"].set()

    async def run(task: Task) -> Trajectory:
        await gates[task.id].wait()
        return trajectory(task)

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


async def test_concurrency_is_bounded_over_all_groups() -> None:
    limiter, running, most = Limiter(5), 0, 0

    async def run(task: Task) -> Trajectory:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return trajectory(task)

    await collect_groups(TASKS, run, GroupSettings(size=8), limiter=limiter)
    assert most == limiter.peak == 5


async def test_an_infrastructure_failure_is_run_again() -> None:
    run = endings(
        iter(
            [StopReason.SANDBOX_FAILURE, *[StopReason.SUBMITTED] * 2, StopReason.ENGINE_FAILURE]
            + [StopReason.SUBMITTED] * 9
        )
    )
    rollout = await collect_groups(TASKS[:1], run, GroupSettings(size=4, retries=2), limiter=Limiter(1))
    (group,) = rollout.groups
    assert [t.reward for t in group.trajectories] == [1.0] * 4
    assert group.infrastructure_failures == 2
    assert rollout_metrics(rollout)["rollout/infrastructure_failures"] == 2


async def test_a_spent_budget_leaves_a_smaller_group_and_never_a_reward_of_zero() -> None:
    script = [StopReason.SANDBOX_FAILURE] * 5 + [StopReason.SUBMITTED] * 2
    rollout = await collect_groups(
        TASKS[:1], endings(iter(script)), GroupSettings(size=4, retries=3), limiter=Limiter(1)
    )
    (group,) = rollout.groups
    assert [t.reward for t in group.trajectories] == [1.0, 1.0]
    assert group.infrastructure_failures == 5
    assert rollout_metrics(rollout)["reward/mean"] == 1.0


async def test_retries_are_counted_over_the_whole_group() -> None:
    started = 0

    async def run(task: Task) -> Trajectory:
        nonlocal started
        started += 1
        await asyncio.sleep(0)
        return trajectory(task, StopReason.SANDBOX_FAILURE)

    with pytest.raises(RolloutFailed, match=r"task-0 failed 11 times, first: SandboxLostError: gone"):
        await collect_groups(TASKS[:1], run, GroupSettings(size=8, retries=3), limiter=Limiter(8))
    assert started == 8 + 3


async def test_a_key_error_in_one_of_eight_gradings_is_run_again_and_is_no_reward() -> None:
    graded = 0

    async def breaks_once() -> None:
        nonlocal graded
        graded += 1
        if graded == 3:
            raise KeyError("status")

    env = MemoryEnvironment(on_grade=breaks_once)
    engine, limits = TurnsEngine([SUBMIT]), EpisodeRules(RolloutConfig(describe_tools=False))
    run = functools.partial(
        run_episode, env, engine=engine, renderer=ByteRenderer(), fmt=tool_format("hermes"), rules=limits
    )
    rollout = await collect_groups(env.tasks("train")[:1], run, GroupSettings(size=8), limiter=Limiter(8))
    (group,) = rollout.groups
    assert (len(group.trajectories), group.infrastructure_failures, graded) == (8, 1, 9)
    assert rollout_metrics(rollout)["rollout/infrastructure_failures"] == 1


async def test_past_the_budget_the_run_ends_with_the_first_cause_in_one_line() -> None:
    async def breaks() -> None:
        raise KeyError(f"status {env.started}")

    env = MemoryEnvironment(on_grade=breaks)
    engine, limits = TurnsEngine([SUBMIT]), EpisodeRules(RolloutConfig(describe_tools=False))
    run = functools.partial(
        run_episode, env, engine=engine, renderer=ByteRenderer(), fmt=tool_format("hermes"), rules=limits
    )
    with pytest.raises(RolloutFailed) as failed:
        await collect_groups(env.tasks("train")[:1], run, GroupSettings(size=2, retries=2), limiter=Limiter(1))
    assert re.fullmatch(
        r".*task train-0 failed 4 times, first: KeyError: 'status 1' \(.*test_group\.py:\d+\)", str(failed.value)
    )


async def test_an_undecidable_task_is_not_tried_again_and_has_a_bound_of_its_own() -> None:
    ran: list[str] = []
    undecidable = {"task-1"}

    async def run(task: Task) -> Trajectory:
        ran.append(task.id)
        return trajectory(task, StopReason.UNDECIDABLE if task.id in undecidable else StopReason.SUBMITTED)

    settings = GroupSettings(size=4, retries=3, max_dropped=0)
    rollout = await collect_groups(TASKS, run, settings, limiter=Limiter(1))
    assert [(dropped.task_id, dropped.undecidable) for dropped in rollout.dropped] == [("task-1", True)]
    assert ran.count("task-1") == 1
    undecidable.add("task-2")
    with pytest.raises(RolloutFailed, match=r"^2 group"):
        await collect_groups(TASKS, run, settings, limiter=Limiter(1))


async def test_groups_are_dropped_up_to_the_bound() -> None:
    async def run(task: Task) -> Trajectory:
        return trajectory(task, StopReason.SANDBOX_FAILURE if task.id == "task-1" else StopReason.SUBMITTED)

    settings = GroupSettings(size=2, retries=1, max_dropped=1)
    rollout = await collect_groups(TASKS, run, settings, limiter=Limiter(4))
    assert sorted(group.task_id for group in rollout.groups) == ["task-0", "task-2", "task-3"]
    assert [dropped.task_id for dropped in rollout.dropped] == ["task-1"]
    metrics = rollout_metrics(rollout)
    assert (metrics["rollout/groups_dropped"], metrics["rollout/infrastructure_failures"]) == (1, 3)


async def test_the_first_error_stops_the_rest_and_comes_out_bare() -> None:
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
        await collect_groups(TASKS, run, GroupSettings(size=2), limiter=Limiter(100))
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
