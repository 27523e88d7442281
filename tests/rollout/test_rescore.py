"""Rescoring: its requests to the engine, when they are sent, and its failures. Order is forced with events."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from support.trajectories import trajectory

from agent_rl.engine.types import Scores
from agent_rl.errors import EngineRejected, EngineUnreachable, RolloutFailed
from agent_rl.rollout.group import GroupSettings, Limiter, Rollout, collect_groups
from agent_rl.rollout.rescore import Rescorer, rescore_metrics
from agent_rl.types import Rescored, StopReason, TokenIds, Trajectory
from envs import Task

TASKS = [Task(f"task-{index}", "memory", {}) for index in range(4)]


def episodes(*rewards: float) -> Callable[[Task], Awaitable[Trajectory]]:
    """Episodes with these rewards, in the order in which they start; then again."""
    script = itertools.cycle(rewards)

    async def run(task: Task) -> Trajectory:
        return trajectory(next(script))

    return run


async def collect(
    run: Any, rescore: Any, size: int, tasks: Any = TASKS[:1], slots: int = 1, **settings: Any
) -> Rollout:
    groups = GroupSettings(size=size, **settings)
    async with asyncio.timeout(10):
        return await collect_groups(tasks, run, groups, limiter=Limiter(slots), rescore=rescore)


@dataclass
class Noisy:
    """A scorer whose n-th response is -n for every token; the requests of the numbers ``failing`` raise instead."""

    failing: Sequence[int] = ()
    version: str = "0"
    requests: list[tuple[int, ...]] = field(default_factory=list)
    running: int = 0
    most: int = 0

    async def rescore(self, tokens: TokenIds, *, session: str) -> Scores:
        self.requests.append(tuple(tokens))
        number = len(self.requests)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        if number in self.failing:
            raise EngineUnreachable(f"evaluation {number}")
        return Scores(tuple(float(-number) for _ in tokens), self.version)


async def test_the_mean_of_the_log_probs_at_the_sampled_tokens() -> None:
    engine = Noisy()
    given = trajectory(1.0, sampled=4)
    got = await Rescorer(engine, n=4, limiter=Limiter(8))(given)
    assert engine.requests == [tuple(range(7))] * 4, "whole trajectories, one evaluation after another"
    assert got.rescored.values.shape == (4, 4)
    np.testing.assert_array_equal(got.rescored.values[:, 0], [-1, -2, -3, -4])
    np.testing.assert_array_equal(got.rescored.mean, [-2.5] * 4)
    assert (got.tokens is given.tokens, got.reward) == (True, 1.0)


async def test_evaluations_are_limited_over_all_trajectories() -> None:
    engine = Noisy()
    rescorer = Rescorer(engine, n=3, limiter=Limiter(2))
    async with asyncio.TaskGroup() as scope:
        for _ in range(6):
            scope.create_task(rescorer(trajectory(1.0)))
    assert engine.most == 2
    assert len(engine.requests) == 18


async def test_other_weights_than_sampled_are_no_old_log_probs() -> None:
    rescorer = Rescorer(Noisy(version="1"), n=1, limiter=Limiter(1))
    with pytest.raises(EngineRejected, match="sampled with weights 0, but the engine now has 1"):
        await rescorer(trajectory(1.0))
    assert rescorer.failed == 1


async def test_masked_trajectories_are_not_rescored() -> None:
    engine = Noisy()
    rescorer = Rescorer(engine, n=2, limiter=Limiter(1), skipped={StopReason.MAX_TURNS})
    for left_out in (trajectory(1.0, stop=StopReason.MAX_TURNS), trajectory(1.0, sampled=0)):
        assert await rescorer(left_out) is left_out
    assert engine.requests == []


async def test_a_finished_trajectory_is_rescored_while_other_episodes_still_run() -> None:
    """The last episode of the group ends only once two others of it have been rescored."""
    rescored, started, done = asyncio.Event(), itertools.count(1), itertools.count(1)
    rescorer = Rescorer(Noisy(), n=2, limiter=Limiter(4))

    async def run(task: Task) -> Trajectory:
        if (number := next(started)) == 3:
            await rescored.wait()
        return trajectory(float(number == 1))

    async def rescore(finished: Trajectory) -> Trajectory:
        got = await rescorer(finished)
        if next(done) == 2:
            rescored.set()
        return got

    (group,) = (await collect(run, rescore, 3, slots=3)).groups
    assert [member.rescored is not None for member in group.trajectories] == [True] * 3


async def test_rescoring_holds_no_slot_of_an_episode() -> None:
    """With one slot for episodes, the third runs although the first is still being evaluated."""
    third_ran, ran = asyncio.Event(), itertools.count(1)

    async def run(task: Task) -> Trajectory:
        if (number := next(ran)) == 3:
            third_ran.set()
        return trajectory(float(number % 2))

    async def rescore(finished: Trajectory) -> Trajectory:
        await third_ran.wait()
        return await Rescorer(Noisy(), n=1, limiter=Limiter(1))(finished)

    rollout = await collect(run, rescore, 4)
    assert [len(group.trajectories) for group in rollout.groups] == [4]


@pytest.mark.parametrize("uniform", [False, True])
async def test_a_group_without_contrast_is_rescored_only_where_it_teaches(uniform: bool) -> None:
    engine = Noisy()
    rescorer = Rescorer(engine, n=1, limiter=Limiter(2))
    rollout = await collect(episodes(1.0), rescorer, 3, TASKS[:2], slots=2, rescore_uniform=uniform)
    assert len(engine.requests) == (6 if uniform else 0)
    assert [len(group.trajectories) for group in rollout.groups] == [3, 3]


async def test_an_evaluation_that_fails_leaves_its_trajectory_out_and_is_no_reward() -> None:
    rescorer = Rescorer(Noisy(failing=[3]), n=2, limiter=Limiter(1))
    (group,) = (await collect(episodes(1.0, 0.0), rescorer, 4)).groups
    assert [member.rescored is not None for member in group.trajectories] == [True] * 3
    assert (group.infrastructure_failures, rescorer.failed) == (1, 1)


async def test_an_engine_that_evaluates_nothing_ends_the_rollout_with_its_reason() -> None:
    rescorer = Rescorer(Noisy(failing=range(1, 99)), n=2, limiter=Limiter(1))
    with pytest.raises(RolloutFailed, match="rescoring: EngineUnreachable: evaluation"):
        await collect(episodes(1.0, 0.0), rescorer, 2, TASKS)


async def test_a_plain_bug_is_no_infrastructure_failure() -> None:
    async def rescore(finished: Trajectory) -> Trajectory:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await collect(episodes(1.0, 0.0), rescore, 2, slots=2)


async def test_a_cancelled_rollout_leaves_no_evaluation() -> None:
    evaluating, limiter = asyncio.Event(), Limiter(8)

    class Hanging:
        async def rescore(self, tokens: TokenIds, *, session: str) -> Scores:
            evaluating.set()
            await asyncio.Event().wait()
            raise AssertionError

    before = asyncio.all_tasks()
    running = asyncio.create_task(collect(episodes(1.0, 0.0), Rescorer(Hanging(), n=2, limiter=limiter), 2, slots=2))
    await evaluating.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert asyncio.all_tasks() == before
    assert (limiter.in_flight, limiter.waiting) == (0, 0)


def rescored(values: Sequence[Sequence[float]]) -> Trajectory:
    given = trajectory(1.0, sampled=len(values[0]))
    return replace(given, rescored=Rescored(np.array(values, np.float32), 0.5))


def test_the_variance_is_a_tokens_own_over_its_evaluations() -> None:
    values = rescore_metrics([rescored([[-1.0, -2.0], [-3.0, -2.0]]), rescored([[-1.0], [-1.0]]), trajectory(1.0)])
    assert values["old_logprob/variance"] == pytest.approx(2.0 / 3)  # token variances 2, 0, 0
    assert values["old_logprob/variance_max"] == pytest.approx(2.0)
    assert values["old_logprob/spread_fraction"] == pytest.approx(1 / 3)
    assert values["old_logprob/rollout_abs_diff"] == pytest.approx((1 + 1 + 0) / 3)  # sampled with -1 each
    assert values["old_logprob/rescored"] == 2
    assert values["old_logprob/evaluations"] == 2
    assert values["old_logprob/rescore_seconds_mean"] == 0.5


def test_one_evaluation_has_no_variance_to_report() -> None:
    values = rescore_metrics([rescored([[-1.0, -2.0]])])
    assert "old_logprob/variance" not in values
    assert values["old_logprob/evaluations"] == 1
    assert rescore_metrics([trajectory(1.0)]) == {}
