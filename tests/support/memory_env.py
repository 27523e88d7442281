"""An environment in memory, written against the public protocols only, and an engine that samples a list of turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from agent_rl.config import RolloutConfig
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.scripted_policies import ByteRenderer
from agent_rl.types import Completion, FinishReason, SamplingParams, TokenIds, Trajectory
from envs import Grade, Task
from r3.kept_tokens import KeptTokens
from r3.routing import Routing, Span, SpanKind
from tools import ToolCall, ToolResult
from tools.formats import tool_format

Hook = Callable[[], Awaitable[None]]


@dataclass
class MemoryTools:
    """``echo(text)`` answers its text, ``submit()`` ends the episode; every call is kept."""

    on_call: Hook | None = None
    calls: list[ToolCall] = field(default_factory=list)

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        return [
            {"type": "function", "function": {"name": name, "description": name, "parameters": {"type": "object"}}}
            for name in ("echo", "submit")
        ]

    async def call(self, call: ToolCall) -> ToolResult:
        self.calls.append(call)
        if self.on_call:
            await self.on_call()
        if call.name == "submit":
            return ToolResult("submitted", submitted=True)
        if call.name == "echo":
            return ToolResult(str(call.arguments.get("text", "")))
        return ToolResult(f"no tool {call.name!r}", failed=True)


@dataclass
class MemoryEpisode:
    tools: MemoryTools
    on_grade: Hook | None = None
    messages: Sequence[Mapping[str, str]] = ({"role": "system", "content": "S"}, {"role": "user", "content": "U"})

    async def grade(self) -> Grade:
        if self.on_grade:
            await self.on_grade()
        resolved = any(call.name == "echo" and call.arguments.get("text") == "fix" for call in self.tools.calls)
        return Grade(reward=float(resolved), resolved=resolved, patch="diff" if resolved else "")


@dataclass
class MemoryEnvironment:
    """Resolved once the agent echoed ``fix``. The hooks run where infrastructure can break; ``grade`` and ``call`` are
    used in place of an episode's own. ``open`` counts episodes that were started and not closed."""

    name: str = "memory"
    on_start: Hook | None = None
    on_call: Hook | None = None
    on_grade: Hook | None = None
    on_close: Hook | None = None
    grade: Callable[..., Awaitable[Any]] | None = None
    call: Callable[..., Awaitable[Any]] | None = None
    open: int = 0
    started: int = 0

    async def prepare(self, *splits: str) -> None:
        """Nothing to make ready."""

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"{split}-{index}", self.name, {}) for index in range(8)]

    @asynccontextmanager
    async def start(self, task: Task) -> AsyncIterator[MemoryEpisode]:
        self.started += 1
        if self.on_start:
            await self.on_start()
        self.open += 1
        episode = MemoryEpisode(MemoryTools(self.on_call), self.on_grade)
        episode.grade, episode.tools.call = self.grade or episode.grade, self.call or episode.tools.call
        try:
            yield episode
        finally:
            self.open -= 1
            if self.on_close:
                await self.on_close()

    def gold(self, task: Task) -> str:
        return ""


def hanging() -> tuple[MemoryEnvironment, asyncio.Event]:
    """An environment whose tool calls never end, and an event that the first call sets."""
    reached = asyncio.Event()

    async def hang() -> None:
        reached.set()
        await asyncio.Event().wait()

    return MemoryEnvironment(on_call=hang), reached


LAYERS, TOP_K, EXPERTS = 2, 2, 256
TASK = Task("train-0", "memory", {})
PLAIN = EpisodeRules(RolloutConfig(describe_tools=False, top_p=0.9))


def row_of(position: int, token: int) -> list[list[int]]:
    """Routes that tell positions and tokens apart, so that a row put in the wrong place shows."""
    return [[position % 251, 251 + token % 5], [token % 251, 251 + position % 5]]


def kept_row(token: int) -> list[int]:
    """What a token is drawn from: three ids, or for every third token the whole vocabulary."""
    return [token + 1, token, token + 300] if token % 3 else []


@dataclass
class TurnsEngine:
    """Samples ``turns``, one after the other, and keeps its requests. A turn that is an exception is raised."""

    turns: Sequence[str | Sequence[int] | BaseException]
    versions: Sequence[str] = ()
    finish: FinishReason = FinishReason.STOP
    before: Hook | None = None
    prompts: list[list[int]] = field(default_factory=list)
    sampling: list[SamplingParams] = field(default_factory=list)
    routes_from: list[int | None] = field(default_factory=list)

    async def generate(
        self, tokens: TokenIds, sampling: SamplingParams, *, routes_from: int | None, session: str
    ) -> Completion:
        turn = len(self.prompts)
        self.prompts.append(list(tokens))
        self.sampling.append(sampling)
        self.routes_from.append(routes_from)
        if self.before:
            await self.before()
        given = self.turns[turn % len(self.turns)]
        if isinstance(given, BaseException):
            raise given
        whole = tuple(ByteRenderer().encode(given) if isinstance(given, str) else given)
        sampled = whole[: sampling.max_new_tokens]
        version = self.versions[turn] if self.versions else "0"
        return Completion(
            tokens=sampled,
            logprobs=tuple(-0.001 * (len(tokens) + index + 1) for index in range(len(sampled))),
            finish=FinishReason.LENGTH if len(sampled) < len(whole) else self.finish,
            weight_version=version,
            engine="memory",
            routing=None if routes_from is None else self._routing([*tokens, *sampled][:-1], routes_from, version),
            kept=KeptTokens.from_rows([kept_row(token) for token in sampled]) if sampling.keep_mask else None,
        )

    def _routing(self, inputs: list[int], start: int, version: str) -> Routing:
        rows = [row_of(position, inputs[position]) for position in range(start, len(inputs))]
        spans = (Span(0, len(rows), version, "memory", SpanKind.SAMPLED),) if rows else ()
        experts = np.array(rows, np.uint8).reshape(-1, LAYERS, TOP_K)
        return Routing(experts, np.ones(len(rows), np.bool_), spans, EXPERTS)


class InterruptedEngine:
    """Samples ``turns``. Its n-th request is aborted after ``cuts[n]`` tokens where that is not None, by a publication
    of weights if ``published``."""

    def __init__(self, turns: Sequence[Any], cuts: Sequence[int | None], *, published: bool = False) -> None:
        self.published = published
        self.inner, self.turns, self.cuts = TurnsEngine([]), list(turns), list(cuts)
        self.left: list[int] | None = None
        self.taken = 0

    async def generate(self, tokens: Any, sampling: Any, **options: Any) -> Completion:
        if self.left is None:
            turn = self.turns[self.taken % len(self.turns)]
            self.left = ByteRenderer().encode(turn) if isinstance(turn, str) else list(turn)
            self.taken += 1
        number = len(self.inner.prompts)
        cut = self.cuts[number] if number < len(self.cuts) else None
        part = self.left[:cut]
        self.inner.turns, self.inner.versions = [part], [str(n) for n in range(number + 1)]
        got = await self.inner.generate(tokens, sampling, **options)
        self.left = None if cut is None or len(part) >= sampling.max_new_tokens else self.left[len(part) :]
        if cut is None or got.finish is FinishReason.LENGTH:
            return got
        routing = got.routing if part else None
        return replace(got, finish=FinishReason.ABORT, routing=routing, interrupted=self.published)


def call(name: str, **arguments: Any) -> str:
    """The text of a turn that calls a tool."""
    return tool_format("hermes").render(ToolCall(name, arguments))


FIX, SUBMIT = call("echo", text="fix"), call("submit")


async def run_memory_episode(
    engine: Any, env: Any = None, *, rules: EpisodeRules = PLAIN, renderer: Any = None, log: Any = None
) -> Trajectory:
    """An episode of :data:`TASK` with ``engine``, whose turns are bytes and whose calls are written as Hermes does."""
    parts = env or MemoryEnvironment(), TASK, engine, renderer or ByteRenderer(), tool_format("hermes"), rules
    return await run_episode(*parts, log=log)
