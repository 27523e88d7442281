"""Policies without a model (gold, no-op, a recorded run) that run through the same episode loop as a model.

A solver returns the tool calls or recorded turns for a task. They are written in a tool-call format, encoded as tokens
(UTF-8 bytes), "sampled" by a scripted engine, parsed, and executed by the environment's tools in its sandbox; then the
episode is graded. So a failing gold solver means a fault in the environment, the tools, the sandbox or the grading.
"""

from __future__ import annotations

import base64
import shlex
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent_rl.config import DEFAULT_SCAFFOLD
from agent_rl.errors import AgentRlError, UserError
from agent_rl.render.prefix_check import Role
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.group import EpisodeRunner
from agent_rl.rollout.jsonl_zst import read_rows
from agent_rl.types import Completion, FinishReason, SampledCall, SamplingParams, TokenIds, Trajectory
from envs import Environment, HasScaffold, Scaffold, Solvable, Task, load_scaffold
from tools import THINK, ToolCall
from tools.formats import tool_format

Solver = Callable[[Environment, Task], Sequence[ToolCall | str]]
"""The turns for a task: calls, or literal text."""

PATCH_CHUNK = 90_000
"""Base64 characters per call: Linux allows at most 128 KiB in one command argument."""

_PATCH_FILE = ".git/solver-patch.b64"


def noop(env: Environment, task: Task) -> Sequence[ToolCall]:
    """Submit at once: a task's tests must reject this."""
    return [_scaffold(env).submit]


def gold(env: Environment, task: Task) -> Sequence[ToolCall | str]:
    """The environment's own solution, or the reference fix applied with ``git apply``; then submit. A solution in
    texts ends by itself.

    The patch is sent as base64 in a file under ``.git``, so that shell quoting, tool-call formats and the diff of the
    working tree cannot affect it. Raises UserError for a task without a gold patch.
    """
    if calls := _solution(env, task):
        return calls if isinstance(calls[-1], str) else [*calls, *noop(env, task)]
    patch = env.gold(task)
    if not patch:
        raise UserError(f"task {task.id}: environment {env.name!r} has no gold patch")
    encoded = base64.b64encode(patch.encode()).decode()
    chunks = [encoded[start : start + PATCH_CHUNK] for start in range(0, len(encoded), PATCH_CHUNK)]
    writes = [f"printf %s {shlex.quote(chunk)} >> {_PATCH_FILE}" for chunk in chunks]
    apply = f"base64 -d {_PATCH_FILE} | git apply --whitespace=nowarn && rm {_PATCH_FILE}"
    return [*map(_scaffold(env).shell, [*writes, apply]), *noop(env, task)]


def has_gold(env: Environment, task: Task) -> bool:
    """Whether :func:`gold` can solve ``task``."""
    return bool(_solution(env, task) or env.gold(task))


def _scaffold(env: Environment) -> Scaffold:
    """How calls are made in ``env``. An environment with its own tools submits with ``finish``."""
    return env.scaffold if isinstance(env, HasScaffold) else load_scaffold(DEFAULT_SCAFFOLD)


def _solution(env: Environment, task: Task) -> Sequence[ToolCall | str]:
    return env.solution(task) if isinstance(env, Solvable) else ()


SOLVERS: Mapping[str, Solver] = {"gold": gold, "noop": noop}


def recorded(path: Path) -> tuple[Solver, frozenset[str]]:
    """``(solver, task ids)``: a solver that repeats the first recorded trajectory of each task in ``path``.

    ``path`` is a rows file of :mod:`agent_rl.rollout.records`. Raises UserError for any other file.
    """
    turns: dict[str, list[str]] = {}
    try:
        for row in read_rows(path):
            turns.setdefault(row["task_id"], [turn["text"] for turn in row["turns"]])
    except (OSError, AgentRlError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: cannot replay trajectories ({type(error).__name__}: {error})") from None
    return (lambda env, task: turns[task.id]), frozenset(turns)


def solver_runner(
    env: Environment, solver: str | Solver, rules: EpisodeRules, *, tool_format_name: str = "hermes"
) -> EpisodeRunner:
    """Runs one episode of a task with ``solver``: "gold", "noop" or a function.

    Only the time limits of ``rules`` apply. Turns are written in the tool format ``tool_format_name``. Raises UserError
    for an unknown name.
    """
    if isinstance(solver, str) and solver not in SOLVERS:
        raise UserError(f"solver {solver!r}: expected one of {', '.join(SOLVERS)}")
    solve = SOLVERS[solver] if isinstance(solver, str) else solver
    renderer, fmt = ByteRenderer(), tool_format(tool_format_name)
    limits = rules.override(max_tokens=1 << 30, max_new_tokens=1 << 20, describe_tools=False, max_thinking_tokens=None)
    limits = replace(limits.override(compaction=None), routes=None)

    async def run(task: Task) -> Trajectory:
        calls = solve(env, task)
        turns = [renderer.encode(call if isinstance(call, str) else fmt.render(call)) for call in calls]
        engine = ScriptedEngine(turns)
        return await run_episode(env, task, engine, renderer, fmt, limits.override(max_turns=len(turns)))

    return run


class ScriptedEngine:
    """Implements :class:`agent_rl.engine.types.Engine` without a model: samples ``turns`` one after another."""

    def __init__(self, turns: Iterable[Sequence[int]]) -> None:
        self._turns = deque(turns)

    async def generate(
        self, tokens: TokenIds, sampling: SamplingParams, *, routes_from: int | None, session: str
    ) -> Completion:
        """The next turn, truncated at ``sampling.max_new_tokens`` with finish ``length``."""
        turn = self._turns.popleft()
        sampled = tuple(turn[: sampling.max_new_tokens])
        return Completion(
            tokens=sampled,
            logprobs=(-0.5,) * len(sampled),
            finish=FinishReason.STOP if len(sampled) == len(turn) else FinishReason.LENGTH,
            weight_version="scripted",
            engine="scripted",
            usage={},
        )


class ByteRenderer:
    """Text as UTF-8 bytes, one token per byte, plus one stop token. Needs no tokenizer and no chat template."""

    STOP = 256
    stop_token_ids = (STOP,)
    reasoning, tool_format = THINK, "hermes"
    end_of_thoughts = tuple(b"\n</think>\n\n")

    def initial_prompt(
        self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        return [token for message in messages for token in self.encode(message["content"])]

    def observation(
        self, text: str, role: Role | None = None, *, stop: int | None, call: SampledCall | None = None
    ) -> list[int]:
        return [self.STOP, *text.encode()] if stop is None else list(text.encode())

    def encode(self, text: str) -> list[int]:
        """``text`` and the stop token: a complete turn."""
        return [*text.encode(errors="replace"), self.STOP]

    def decode(self, tokens: TokenIds) -> str:
        return bytes([token for token in tokens if token < self.STOP]).decode("utf-8", errors="replace")
