"""Sessions and episodes of the endpoint with a scripted engine and the shipped model's tokenizer and template."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx

from agent_rl.config import HarnessConfig, R3Config, RolloutConfig
from agent_rl.config.loader import MODELS
from agent_rl.endpoint.episode import HarnessRun, agent_binds
from agent_rl.endpoint.server import EndpointServer, serve_endpoint
from agent_rl.endpoint.session import HarnessRenderer, Session
from agent_rl.render import ChatRenderer
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.types import Completion, Trajectory
from envs import Grade, Task
from envs.context import EnvContext
from envs.mini.generator import generate, to_record
from envs.swe.episode import start_episode
from r3.payload import RouteLayout
from sandbox import SandboxSpec
from support.scripted_engine import ScriptedEngine
from tools import ToolCall, ToolResult, tool_format

MODEL = MODELS["tiny-moe"]
RECORD = to_record(generate("train", 1, 0)[0])
LAYOUT = RouteLayout(2, (0, 1), 32, 2)
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "u"}]
Before = Callable[[int], Awaitable[None]]
PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "seconds": {"type": "integer"}},
    "required": ["command"],
}
BASH = {"type": "function", "function": {"name": "bash", "description": "Runs a command.", "parameters": PARAMETERS}}


def call(command: str) -> str:
    """The text of a call of the tool bash."""
    return tool_format("hermes").render(ToolCall("bash", {"command": command}))


class Saying:
    """An engine that says ``texts`` one after another, the last again and again; ``before`` is awaited each time."""

    def __init__(self, renderer: ChatRenderer, texts: Sequence[str], before: Before | None = None) -> None:
        self._said = [[*renderer._encoder.encode(text), renderer.end_of_turn_id] for text in texts]
        self._before = before
        self.requests = self.cancelled = 0
        self.scripted = ScriptedEngine(self._next, layout=LAYOUT)

    def _next(self, session: str, turn: int, tokens: Sequence[int]) -> Sequence[int]:
        return self._said[min(turn, len(self._said) - 1)]

    async def generate(self, *args: Any, **options: Any) -> Completion:
        self.requests += 1
        try:
            if self._before is not None:
                await self._before(self.requests)
            return await self.scripted.generate(*args, **options)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def rendering(renderer: ChatRenderer, fmt: str = "hermes", history: str = "keep") -> HarnessRenderer:
    harness = HarnessConfig.model_validate({"command": "true", "history": history})
    return HarnessRenderer.from_config(renderer, tool_format(fmt), RolloutConfig(harness=harness))


@asynccontextmanager
async def served(
    renderer: ChatRenderer,
    *texts: str,
    engine: Any = None,
    before: Before | None = None,
    fmt: str = "hermes",
    history: str = "keep",
    **limits: Any,
) -> AsyncIterator[Any]:
    """An endpoint with one session of ``engine``, or of one that says ``texts``; ``post`` posts to it."""
    engine = engine or Saying(renderer, texts, before)
    rules = EpisodeRules(RolloutConfig(**{"max_tokens": 4000, **limits}), routes=R3Config())
    async with serve_endpoint() as endpoint:
        session = Session("s", engine, rendering(renderer, fmt, history), rules, context=rules.rollout.max_tokens)
        url = f"http://127.0.0.1:{endpoint.port}/s/{session.key}"
        async with AsyncExitStack() as clients, endpoint.serving(session):
            client = await clients.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20))

            async def post(path: str, **body: Any) -> httpx.Response:
                return await client.post(path, json=body)

            async def reply(messages: Any, **body: Any) -> Any:
                """The message that the chat dialect sends."""
                return (await post(CHAT, messages=messages, **body)).json()["choices"][0]["message"]

            parts = {"endpoint": endpoint, "session": session, "url": url, "client": client, "engine": engine}
            yield SimpleNamespace(**parts, post=post, reply=reply, clients=clients.enter_async_context)


@dataclass
class MemoryEpisode:
    """``echo`` answers its text, ``submit`` ends the episode, which is resolved once ``fix`` was echoed."""

    calls: list[ToolCall] = field(default_factory=list)
    messages: Sequence[Mapping[str, str]] = ({"role": "system", "content": "S"}, *HELLO)

    @property
    def tools(self) -> MemoryEpisode:
        return self

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        return [BASH]

    async def call(self, call: ToolCall) -> ToolResult:
        self.calls.append(call)
        if call.name == "submit":
            return ToolResult("submitted", submitted=True)
        return ToolResult(str(call.arguments.get("command", "")))

    async def grade(self) -> Grade:
        resolved = any(call.arguments.get("command") == "fix" for call in self.calls)
        return Grade(reward=float(resolved), resolved=resolved)


@dataclass
class MemoryEnvironment:
    name: str = "memory"

    @asynccontextmanager
    async def start(self, task: Task) -> AsyncIterator[MemoryEpisode]:
        yield MemoryEpisode()


class OneTask:
    name = "one"

    def __init__(self, context: EnvContext) -> None:
        self.context = context

    @asynccontextmanager
    async def start(self, task: Task) -> AsyncIterator[Any]:
        async with start_episode(self.context, RECORD) as episode:
            yield episode


async def drive(
    endpoint: EndpointServer,
    renderer: ChatRenderer,
    engine: Any,
    harness: HarnessConfig,
    pool: Any = None,
    **limits: Any,
) -> Trajectory:
    """An episode whose program runs in the sandbox of a task, or on the host without a ``pool``."""
    env: Any = MemoryEnvironment()
    if pool is not None:
        memory = SandboxSpec(memory_mb=2048)  # opencode needs more than the default
        env = OneTask(EnvContext(backend=pool, limits=memory, agent_binds=agent_binds(endpoint, harness)))
    rules = EpisodeRules(RolloutConfig(**{"max_tokens": 4000, **limits}, harness=harness))
    most, task = rules.rollout.max_tokens, Task(RECORD.id, env.name, {})
    return await HarnessRun(endpoint, most, env, task, engine, renderer, tool_format("hermes"), rules).run()
