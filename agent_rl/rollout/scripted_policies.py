"""Policies without a model (gold, no-op, a recorded run) driven through the same episode loop as a model's.

A solver is a list of tool calls a task, or of recorded turns. They are written in a real tool-call format, turned into
tokens (UTF-8 bytes), "sampled" by a scripted engine, parsed, and run by the environment's own tools in its own sandbox;
then the episode is graded. So a gold solver that fails means a fault of the environment, the tools, the sandbox or the
grading.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent_rl.config import OWN_SCAFFOLD
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.errors import AgentRlError, UserError
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.group import EpisodeRunner
from agent_rl.rollout.jsonl_zst import read_rows
from agent_rl.types import TokenIds, Trajectory
from envs import Environment, HasScaffold, Scaffold, Solvable, Task, find_scaffold
from tools import ToolCall
from tools.formats import tool_format

Solver = Callable[[Environment, Task], Sequence[ToolCall | str]]
"""The turns that a task is answered with: calls, or text that is written as it stands."""

PATCH_CHUNK = 90_000
"""Base64 characters a call: Linux takes at most 128 KiB in one argument of a command."""

_PATCH_FILE = ".git/solver-patch.b64"


def noop(env: Environment, task: Task) -> Sequence[ToolCall]:
    """Submits at once: what a task's tests must not accept."""
    return [_scaffold(env).submit]


def gold(env: Environment, task: Task) -> Sequence[ToolCall | str]:
    """Takes the turns of the environment's own solution, or applies the true fix with ``git apply``, and submits.

    The patch goes through as base64 in a file under ``.git``, which no shell quoting, tool-call format or diff of the
    working tree can touch. Raises UserError for a task without a gold patch.
    """
    if calls := _solution(env, task):
        return [*calls, *noop(env, task)]
    patch = env.gold(task)
    if not patch:
        raise UserError(f"task {task.id}: environment {env.name!r} has no gold patch of it")
    encoded = base64.b64encode(patch.encode()).decode()
    chunks = [encoded[start : start + PATCH_CHUNK] for start in range(0, len(encoded), PATCH_CHUNK)]
    writes = [f"printf %s {shlex.quote(chunk)} >> {_PATCH_FILE}" for chunk in chunks]
    apply = f"base64 -d {_PATCH_FILE} | git apply --whitespace=nowarn && rm {_PATCH_FILE}"
    return [*map(_scaffold(env).shell, [*writes, apply]), *noop(env, task)]


def has_gold(env: Environment, task: Task) -> bool:
    """Whether :func:`gold` has something to do: the environment knows a solution of ``task``, or its true fix."""
    return bool(_solution(env, task) or env.gold(task))


def _scaffold(env: Environment) -> Scaffold:
    """How calls are made in ``env``; one with tools of its own ends with ``finish``, as the usual interface does."""
    return env.scaffold if isinstance(env, HasScaffold) else find_scaffold(OWN_SCAFFOLD)


def _solution(env: Environment, task: Task) -> Sequence[ToolCall | str]:
    return env.solution(task) if isinstance(env, Solvable) else ()


SOLVERS: Mapping[str, Solver] = {"gold": gold, "noop": noop}


def recorded(path: Path) -> tuple[Solver, frozenset[str]]:
    """A solver that repeats the turns of the first trajectory of each task in ``path``, and those tasks' ids.

    ``path`` is a file of :mod:`agent_rl.rollout.records`. Raises UserError where it is none.
    """
    turns: dict[str, list[str]] = {}
    try:
        for row in read_rows(path):
            turns.setdefault(row["task_id"], [turn["text"] for turn in row["turns"]])
    except (OSError, AgentRlError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: no trajectories to replay ({type(error).__name__}: {error})") from None
    return (lambda env, task: turns[task.id]), frozenset(turns)


def solver_runner(
    env: Environment, solver: str | Solver, rules: EpisodeRules, *, tool_format_name: str = "hermes"
) -> EpisodeRunner:
    """Runs one episode of a task with ``solver``, "gold", "noop" or one of your own.

    Of ``rules`` the times hold; a solver has no context to fill and as many turns as it has calls, which are written
    in the tool format ``tool_format_name``. Raises UserError for an unknown name.
    """
    if isinstance(solver, str) and solver not in SOLVERS:
        raise UserError(f"solver {solver!r}: there are {', '.join(SOLVERS)}")
    solve = SOLVERS[solver] if isinstance(solver, str) else solver
    renderer, fmt = ByteRenderer(), tool_format(tool_format_name)
    limits = rules.limited(max_tokens=1 << 30, max_new_tokens=1 << 20, describe_tools=False)
    limits = replace(limits, routes=None)

    async def run(task: Task) -> Trajectory:
        calls = solve(env, task)
        turns = [renderer.encode(call if isinstance(call, str) else fmt.render(call)) for call in calls]
        engine = ScriptedEngine(lambda session, turn, tokens: turns[turn])
        return await run_episode(env, task, engine, renderer, fmt, limits.limited(max_turns=len(turns)))

    return run


class ByteRenderer:
    """Text as UTF-8 bytes, one token a byte, and one stop token: no tokenizer, no template, nothing to download."""

    STOP = 256
    stop_token_ids = (STOP,)

    def opening(self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        return [token for message in messages for token in self.encode(message["content"])]

    def observation(self, text: str, *, stop_included: bool) -> list[int]:
        return list(text.encode()) if stop_included else [self.STOP, *text.encode()]

    def encode(self, text: str) -> list[int]:
        """``text`` and the stop token after it: a whole turn."""
        return [*text.encode(errors="replace"), self.STOP]

    def decode(self, tokens: TokenIds) -> str:
        return bytes([token for token in tokens if token < self.STOP]).decode("utf-8", errors="replace")
