"""Checks of an environment's contract: the suite behind ``agent-rl envs check`` and this project's tests."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from envs.types import Dialogue, Environment, Episode, Finding, Grade, Solvable, Task
from tools import ToolCall, ToolResult

TASKS = 2
"""Number of tasks that are started."""


async def check_environment(env: Environment, splits: Sequence[str] = ("train", "heldout")) -> list[Finding]:
    """One finding for each check, in a fixed order. A check that raises is a failed finding with the reason."""
    findings = [await _check(f"tasks of {split}", lambda split=split: _tasks(env, split)) for split in splits]  # type: ignore[misc]
    if not all(finding.ok for finding in findings):
        return findings
    chosen = list(env.tasks(splits[0]))[:TASKS]
    checks: dict[str, Callable[[Task], Awaitable[str]]] = {
        "start and close": lambda task: _starts(env, task),
        "tool schemas": lambda task: _schemas(env, task),
        "a wrong call returns an error": lambda task: _wrong_call(env, task),
        "an untouched task is not resolved": lambda task: _untouched(env, task),
        "the solution is resolved": lambda task: _solution(env, task),
        "episodes don't share state": lambda task: _two_at_once(env, task),
        "a cancelled start ends": lambda task: _cancelled(env, task),
    }
    for name, check in checks.items():
        findings.append(await _check(name, lambda check=check: _each(check, chosen)))  # type: ignore[misc]
    return findings


async def _check(name: str, check: Callable[[], Awaitable[str]]) -> Finding:
    try:
        return Finding(name, True, await check())
    except Exception as error:
        reason = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        return Finding(name, False, " ".join(reason.split())[:300])


async def _each(check: Callable[[Task], Awaitable[str]], tasks: Sequence[Task]) -> str:
    return [await check(task) for task in tasks][-1]


async def _tasks(env: Environment, split: str) -> str:
    await env.prepare(split)
    tasks, again = env.tasks(split), env.tasks(split)
    assert tasks, "the split has no tasks: return at least one"
    twice = [task for task, count in Counter(task.id for task in tasks).items() if count > 1]
    assert not twice, f"task id {twice[0]!r} occurs twice: ids must be unique" if twice else ""
    assert list(tasks) == list(again), "a second call returned other tasks: the order must be fixed"
    for task in tasks:
        assert task.env == env.name, f"task {task.id!r} has env {task.env!r}, but the environment is {env.name!r}"
        json.dumps(dict(task.record))
    return f"{len(tasks)} tasks"


async def _starts(env: Environment, task: Task) -> str:
    async with env.start(task) as episode:
        roles = [message["role"] for message in episode.messages]
        assert "user" in roles, f"the initial messages are {roles}: one must be of the user"
        assert all(isinstance(message["content"], str) for message in episode.messages), "contents must be strings"
    return f"initial messages: {', '.join(roles)}"


async def _schemas(env: Environment, task: Task) -> str:
    async with env.start(task) as episode:
        schemas = json.loads(json.dumps(list(episode.tools.schemas())))
        is_dialogue = isinstance(episode, Dialogue)
    if is_dialogue:
        assert not schemas, "the episode is a Dialogue, which never calls tools: remove the tools"
        return "none: the episode is a Dialogue"
    names = [schema["function"]["name"] for schema in schemas]
    assert names, "the episode has no tool"
    assert len(set(names)) == len(names), f"two tools have one name: {names}"
    undescribed = [schema["function"]["name"] for schema in schemas if not schema["function"].get("description")]
    assert not undescribed, f"tool {undescribed[0]!r} has no description: write a docstring" if undescribed else ""
    return ", ".join(names)


async def _wrong_call(env: Environment, task: Task) -> str:
    async with env.start(task) as episode:
        if isinstance(episode, Dialogue):
            _assert_result(await episode.respond(""))
            return "an empty turn"
        answer = await episode.tools.call(ToolCall("no_such_tool", {}))
        _assert_result(answer)
        assert answer.failed, "a call of an unknown tool must return a failed result"
        name = episode.tools.schemas()[0]["function"]["name"]
        _assert_result(await episode.tools.call(ToolCall(name, {"no_such_argument": 1})))
    return answer.text[:80]


def _assert_result(result: object) -> None:
    assert isinstance(result, ToolResult), f"a tool returned a {type(result).__name__}, not a ToolResult"


async def _untouched(env: Environment, task: Task) -> str:
    async with env.start(task) as episode:
        grade = await _grade(episode)
    assert not grade.resolved, f"task {task.id!r} is resolved by doing nothing"
    return f"reward {grade.reward:g}"


async def _grade(episode: Episode) -> Grade:
    grade = await episode.grade()
    assert isinstance(grade, Grade), f"grade() returned a {type(grade).__name__}, not a Grade"
    assert math.isfinite(grade.reward), f"the reward is {grade.reward}: it must be finite"
    return grade


async def _solution(env: Environment, task: Task) -> str:
    calls = _calls(env, task)
    if not calls:
        return "the environment has no solution"
    async with env.start(task) as episode:
        await _solve(episode, calls)
        grade = await _grade(episode)
    assert grade.resolved, f"task {task.id!r}: its solution is not resolved (reward {grade.reward:g})"
    return f"{len(calls)} turn(s), reward {grade.reward:g}"


def _calls(env: Environment, task: Task) -> Sequence[ToolCall | str]:
    return env.solution(task) if isinstance(env, Solvable) else []


async def _solve(episode: Episode, turns: Sequence[ToolCall | str]) -> None:
    for turn in turns:
        if isinstance(turn, str):
            assert isinstance(episode, Dialogue), "the solution is text, but the episode has no method respond"
            await episode.respond(turn)
            continue
        answer = await episode.tools.call(turn)
        assert not answer.failed, f"the solution's call of {turn.name} failed: {answer.text[:200]}"


async def _two_at_once(env: Environment, task: Task) -> str:
    """One episode must not change another of the same task."""
    calls = _calls(env, task)
    async with env.start(task) as first, env.start(task) as second:
        await _solve(first, calls)
        grades = await asyncio.gather(_grade(first), _grade(second))
    assert not grades[1].resolved, "the grade of one episode depends on another"
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
