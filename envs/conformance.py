"""Checks of an environment's contract: the suite behind ``agent-rl envs check`` and this project's tests."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

from envs.protocol import awaited, check_messages, grade, located, result_of, started, tasks_of, wrong_turn
from envs.types import Dialogue, Environment, Episode, Finding, ProtocolError, Solvable, Task, target_of
from tools import ToolCall

TASKS = 2
"""Number of tasks that are started."""


async def check_environment(env: Environment, splits: Sequence[str] = ("train", "heldout")) -> list[Finding]:
    """One finding for each check, in a fixed order. A check that raises is a failed finding with the reason."""
    findings = [await _check(f"tasks of {split}", lambda split=split: _tasks(env, split)) for split in splits]  # type: ignore[misc]
    if not all(finding.ok for finding in findings):
        return findings
    chosen, alone = list(env.tasks(splits[0]))[:TASKS], dict[str, bool]()
    checks: dict[str, Callable[[Task], Awaitable[str]]] = {
        "start and close": lambda task: _starts(env, task),
        "tool schemas": lambda task: _schemas(env, task),
        "a wrong turn returns a result": lambda task: _wrong_turn(env, task),
        "an untouched task is not resolved": lambda task: _untouched(env, task, alone),
        "the solution is resolved": lambda task: _solution(env, task),
        "episodes don't share state": lambda task: _two_at_once(env, task, alone),
        "a cancelled start ends": lambda task: _cancelled(env, task),
    }
    for name, check in checks.items():
        findings.append(await _check(name, lambda check=check: _each(check, chosen)))  # type: ignore[misc]
    return findings


async def _check(name: str, check: Callable[[], Awaitable[str]]) -> Finding:
    try:
        return Finding(name, True, await check())
    except Exception as error:
        reason = str(error) if isinstance(error, AssertionError | ProtocolError) else located(error)
        return Finding(name, False, " ".join(reason.split())[:300])


async def _each(check: Callable[[Task], Awaitable[str]], tasks: Sequence[Task]) -> str:
    return [await check(task) for task in tasks][-1]


async def _tasks(env: Environment, split: str) -> str:
    await awaited(env.prepare(split), "prepare")
    tasks, again = tasks_of(env, split), env.tasks(split)
    twice = [task for task, count in Counter(task.id for task in tasks).items() if count > 1]
    assert not twice, f"task id {twice[0]!r} occurs twice: ids must be unique" if twice else ""
    assert list(tasks) == list(again), "a second call returned other tasks: the order must be fixed"
    for task in tasks:
        json.dumps(dict(task.record))
    return f"{len(tasks)} tasks"


async def _starts(env: Environment, task: Task) -> str:
    async with started(env, task) as episode:
        return f"initial messages: {', '.join(check_messages(episode))}"


async def _schemas(env: Environment, task: Task) -> str:
    async with started(env, task) as episode:
        tools = target_of(episode)
        if isinstance(tools, Dialogue):
            return "none: the episode is a Dialogue"
        schemas = json.loads(json.dumps(list(tools.schemas())))
    names = [schema["function"]["name"] for schema in schemas]
    assert names, "the episode has no tool"
    assert len(set(names)) == len(names), f"two tools have one name: {names}"
    undescribed = [schema["function"]["name"] for schema in schemas if not schema["function"].get("description")]
    assert not undescribed, f"tool {undescribed[0]!r} has no description: write a docstring" if undescribed else ""
    return ", ".join(names)


async def _wrong_turn(env: Environment, task: Task) -> str:
    async with started(env, task) as episode:
        return await wrong_turn(episode)


async def _untouched(env: Environment, task: Task, alone: dict[str, bool]) -> str:
    """``alone`` receives whether the untouched task is resolved, before any episode could have changed another."""
    async with started(env, task) as episode:
        result = await grade(episode)
    alone[task.id] = result.resolved
    assert task.noop_resolves or not result.resolved, (
        f"task {task.id!r} is resolved by doing nothing: if that is right, set noop_resolves in its Task or row"
    )
    assert result.resolved or not task.noop_resolves, (
        f"task {task.id!r} has noop_resolves, but doing nothing does not resolve it (reward {result.reward:g})"
    )
    return f"reward {result.reward:g}{', as its noop_resolves says' if task.noop_resolves else ''}"


async def _solution(env: Environment, task: Task) -> str:
    calls = _calls(env, task)
    if not calls:
        return "the environment has no solution"
    async with started(env, task) as episode:
        await _solve(episode, calls)
        result = await grade(episode)
    assert result.resolved, f"task {task.id!r}: its solution is not resolved (reward {result.reward:g})"
    return f"{len(calls)} turn(s), reward {result.reward:g}"


def _calls(env: Environment, task: Task) -> Sequence[ToolCall | str]:
    return env.solution(task) if isinstance(env, Solvable) else []


async def _solve(episode: Episode | Dialogue, turns: Sequence[ToolCall | str]) -> None:
    for turn in turns:
        if isinstance(turn, str):
            assert isinstance(episode, Dialogue), "the solution is text, but the episode has no method respond"
            await result_of(episode.respond(turn), "respond")
            continue
        tools = target_of(episode)
        assert not isinstance(tools, Dialogue), "the solution has a ToolCall, but the episode is a Dialogue: give texts"
        answer = await tools.call(turn)
        assert not answer.failed, f"the solution's call of {turn.name} failed: {answer.text[:200]}"


async def _two_at_once(env: Environment, task: Task, alone: Mapping[str, bool]) -> str:
    """One episode must not change another of the same task, which is untouched. ``alone``: as in :func:`_untouched`."""
    calls = _calls(env, task)
    async with started(env, task) as first, started(env, task) as second:
        await _solve(first, calls)
        _, beside = await asyncio.gather(grade(first), grade(second))
    assert beside.resolved == alone.get(task.id, False), "the grade of one episode depends on another"
    return "two concurrent episodes"


async def _cancelled(env: Environment, task: Task) -> str:
    """A start that is cancelled at once must end within 60 s, and the next start must work."""

    async def start() -> None:
        async with env.start(task):
            await asyncio.Event().wait()

    running = asyncio.create_task(start())
    await asyncio.sleep(0)
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=60)
    assert done, "the cancelled start did not end within 60 s"
    assert running.cancelled(), "the start swallowed the cancellation"
    async with env.start(task):
        pass
    return "the next start works"
