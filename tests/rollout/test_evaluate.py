from __future__ import annotations

import asyncio
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.memory_env import TASK, MemoryEnvironment, hanging

from agent_rl.commands.eval import table
from agent_rl.config import RolloutConfig
from agent_rl.errors import UserError
from agent_rl.evaluation.evaluate import evaluate
from agent_rl.evaluation.report import EpisodeResult, EvalReport, wilson_interval
from agent_rl.evaluation.usage import Usage
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.group import Limiter
from agent_rl.rollout.jsonl_zst import encode_rows
from agent_rl.rollout.records import write_trajectories
from agent_rl.rollout.scripted_policies import noop, recorded, solver_runner
from agent_rl.types import Group, StopReason, Trajectory
from envs import Task
from sandbox import SandboxLostError
from tools import ToolCall


def test_wilson_agrees_with_the_published_example() -> None:
    # Newcombe 1998 (Statistics in Medicine 17:857-872), table I, method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    for hits, trials, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        assert wilson_interval(hits / trials, trials) == pytest.approx((low, high), abs=5e-5)
    assert wilson_interval(math.nan, 0) == (0.0, 1.0)


@given(st.integers(1, 2000).flatmap(lambda trials: st.tuples(st.integers(0, trials), st.just(trials))))
def test_wilson_interval_contains_the_rate_and_is_within_0_and_1(case: tuple[int, int]) -> None:
    hits, trials = case
    low, high = wilson_interval(hits / trials, trials)
    assert 0 <= low <= hits / trials + 1e-12
    assert hits / trials - 1e-12 <= high <= 1


def solver(fixes: set[str]) -> Any:
    """Resolves the tasks in ``fixes``, submits the others as they are. (Tool names: the memory environment's.)"""

    def solve(env: Any, task: Task) -> list[ToolCall]:
        work = [ToolCall("echo", {"text": "fix"})] if task.id in fixes else []
        return [*work, ToolCall("submit", {})]

    return solve


def losing() -> MemoryEnvironment:
    """An environment whose sandboxes are lost at the start."""

    async def lose() -> None:
        raise SandboxLostError("gone")

    return MemoryEnvironment(on_start=lose)


def written(report: EvalReport, directory: Path) -> Any:
    report.write(directory / "report.json")
    return json.loads((directory / "report.json").read_text())


async def test_pass_at_1_counts_tasks_and_keeps_failures_apart(tmp_path: Path) -> None:
    broken, env = 0, MemoryEnvironment()
    tasks = env.tasks("heldout")
    healthy = solver_runner(env, solver({"heldout-0", "heldout-1", "heldout-2"}), EpisodeRules())
    lost = solver_runner(losing(), solver(set()), EpisodeRules())

    async def run(task: Task) -> Trajectory:
        nonlocal broken
        if task.id == "heldout-7" or (task.id == "heldout-0" and broken == 0):  # always, and once
            broken += task.id == "heldout-0"
            return await lost(task)
        return await healthy(task)

    report = await evaluate(tasks, run, policy="gold", limiter=Limiter(3), retries=2)
    assert (report.graded, report.ungraded, report.infrastructure_failures) == (7, 1, 1 + 3)
    assert report.pass_at_1 == pytest.approx(3 / 7)
    assert report.interval == wilson_interval(3 / 7, 7)
    assert [outcome.task_id for outcome in report.outcomes] == [task.id for task in tasks]
    assert report.outcomes[7].error == "SandboxLostError: gone"
    assert report.stops == {"submitted": 7}
    assert written(report, tmp_path)["pass_at_1"] == pytest.approx(3 / 7)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table([report]))
    assert "42.9%" in console.export_text()


async def test_several_samples_are_averaged_within_a_task() -> None:
    env, count = MemoryEnvironment(), 0
    right, wrong = (solver_runner(env, solver(fixes), EpisodeRules()) for fixes in ({"heldout-0"}, set()))

    async def run(task: Task) -> Trajectory:
        nonlocal count
        count += 1
        return await (right if count % 4 == 1 else wrong)(task)

    report = await evaluate(env.tasks("heldout")[:1], run, policy="x", limiter=Limiter(1), samples=4)
    assert report.pass_at_1 == 0.25
    assert report.interval == wilson_interval(0.25, 1)


async def test_failed_episodes_count_their_tokens(tmp_path: Path) -> None:
    """An engine's tokens are exact; those of a policy without a model are unknown."""
    env, broken = MemoryEnvironment(), 0
    tasks, run = env.tasks("heldout")[:2], solver_runner(env, solver(set()), EpisodeRules())

    async def counted(task: Task) -> Trajectory:
        nonlocal broken
        trajectory = await run(task)
        turns = [replace(turn, usage=None, cached_tokens=1, thinking_tokens=2) for turn in trajectory.turns]
        broken += task.id == "heldout-0"
        stop = StopReason.SANDBOX_FAILURE if broken == 1 else trajectory.stop
        return replace(trajectory, turns=tuple(turns), stop=stop, reward=None if broken == 1 else 0.0)

    found = await evaluate(tasks, counted, policy="engine", limiter=Limiter(1), retries=1)
    (turn,) = (await run(tasks[0])).turns
    once = Usage(1, turn.prompt_tokens, turn.completion_tokens, 1, 2)
    assert [outcome.usage for outcome in found.outcomes] == [once + once, once]
    assert (found.usage, found.usage_tasks) == (once + once + once, 2)
    assert written(found, tmp_path)["usage"]["requests"] == 3
    lost = EpisodeResult("heldout-0", 0, None, "", 0, 0.0, usage=once + once)
    resumed = await evaluate(tasks, counted, policy="engine", limiter=Limiter(1), done=[lost])
    assert [outcome.usage for outcome in resumed.outcomes] == [once + once + once, once], "of an earlier start"
    unknown = await evaluate(tasks, run, policy="gold", limiter=Limiter(1))
    assert (unknown.usage, unknown.usage_tasks) == (None, 0)


async def test_nothing_graded_is_no_number(tmp_path: Path) -> None:
    env = losing()
    run = solver_runner(env, "noop", EpisodeRules())
    report = await evaluate(env.tasks("heldout"), run, policy="noop", limiter=Limiter(8))
    assert math.isnan(report.pass_at_1)
    assert (report.graded, report.ungraded, report.interval) == (0, 8, (0.0, 1.0))
    assert written(report, tmp_path)["pass_at_1"] is None


async def test_a_solver_calls_the_tools_and_has_no_limits() -> None:
    rules = EpisodeRules(RolloutConfig(max_turns=1, max_tokens=5))
    trajectory = await solver_runner(MemoryEnvironment(), solver({TASK.id}), rules)(TASK)
    assert [turn.tool for turn in trajectory.turns] == ["echo", "submit"]
    assert trajectory.resolved


async def test_a_recorded_run_is_replayed_and_graded_again(tmp_path: Path) -> None:
    env = MemoryEnvironment()
    first, second, _ = env.tasks("heldout")[:3]
    run = solver_runner(env, solver({"heldout-0"}), EpisodeRules())
    path = write_trajectories(tmp_path, 1, [Group(task.id, (await run(task),)) for task in (first, second)])
    replay, only = recorded(path)
    assert only == {first.id, second.id}
    again = [await solver_runner(env, replay, EpisodeRules())(task) for task in (first, second)]
    assert [trajectory.resolved for trajectory in again] == [True, False]
    assert [turn.tool for turn in again[0].turns] == ["echo", "submit"]
    for content in (encode_rows([{}])[0], b"nonsense"):
        (tmp_path / "wrong.jsonl.zst").write_bytes(content)
        with pytest.raises(UserError, match=r"wrong\.jsonl\.zst: cannot replay trajectories"):
            recorded(tmp_path / "wrong.jsonl.zst")
    with pytest.raises(UserError, match="cannot replay trajectories"):
        recorded(tmp_path / "absent.jsonl.zst")


async def test_an_unknown_solver_or_a_task_without_gold_patch_is_a_user_error() -> None:
    env = MemoryEnvironment()
    with pytest.raises(UserError, match="gold, noop"):
        solver_runner(env, "glod", EpisodeRules())
    with pytest.raises(UserError, match="no gold patch"):
        await solver_runner(env, "gold", EpisodeRules())(TASK)
    assert len(noop(env, TASK)) == 1


async def test_cancelled_evaluation_leaves_nothing_open() -> None:
    env, reached = hanging()
    run = solver_runner(env, solver(set()), EpisodeRules())
    running = asyncio.create_task(evaluate(env.tasks("heldout"), run, policy="x", limiter=Limiter(4)))
    await reached.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert env.open == 0
