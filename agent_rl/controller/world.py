"""Everything a rollout needs, opened and closed as one: sandboxes, environment, engine, renderer, tool format."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from agent_rl.config import RunConfig, SandboxConfig
from agent_rl.engine.open import open_engine
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.evaluation.quarantine import read_quarantine
from agent_rl.model_facts import ModelFacts
from agent_rl.observe.display import Display
from agent_rl.render import ChatRenderer
from agent_rl.rollout.audit import Auditor
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.group import EpisodeRunner
from agent_rl.rollout.limiter import Limiter
from agent_rl.types import Trajectory
from envs import Environment, Task, find_interface
from envs.context import EnvContext
from envs.registry import load_environment
from sandbox import ImagePolicy, SandboxBackend, SandboxPool, SandboxSpec, open_backend
from tools.formats import ToolCallFormat, tool_format


@dataclass(frozen=True)
class Workshop:
    """Where tasks are worked on: the sandbox backend, the environment, and which of its tasks are left out."""

    backend: SandboxBackend
    env: Environment
    quarantined: frozenset[str] = frozenset()

    def tasks(self, split: str) -> list[Task]:
        """The environment's tasks of ``split`` that are not in quarantine."""
        return [task for task in self.env.tasks(split) if task.id not in self.quarantined]


@dataclass(frozen=True)
class World:
    """A workshop, and a policy to work in it."""

    workshop: Workshop
    engine: SGLangEngine
    renderer: ChatRenderer
    format: ToolCallFormat
    limiter: Limiter

    def runner(self, rules: EpisodeRules) -> EpisodeRunner:
        """Runs one episode of a task with the engine's policy under ``rules``, and audits its routes now and then."""
        audit = Auditor(self.engine, rules.routes.audit) if rules.routes else None

        async def run(task: Task) -> Trajectory:
            return await run_episode(self.workshop.env, task, self.engine, self.renderer, self.format, rules, audit)

        return run


@asynccontextmanager
async def open_workshop(config: RunConfig, display: Display) -> AsyncIterator[Workshop]:
    """Open the sandbox backend and the environment, removing first what dead runs left behind."""
    quarantined = frozenset(read_quarantine(config.env.quarantine) if config.env.quarantine else ())
    backend = open_pool(config.sandbox)
    try:
        if reaped := await backend.reap():
            display.note(f"removed {reaped} sandbox(es) that a killed run had left behind")
        display.fact("sandbox", backend.name)
        if quarantined:
            display.fact("quarantine", f"{len(quarantined)} tasks left out")
        env = load_environment(config.env.name, _context(config, backend), config.env.options)
        yield Workshop(backend, env, quarantined)
    finally:
        await backend.close()


def box_limits(config: SandboxConfig) -> SandboxSpec:
    """The template of every box: the config's image, memory, processes, CPUs and disk."""
    limits = SandboxSpec(
        memory_mb=config.memory_mb,
        pids=config.pids,
        cpus=config.cpus,
        disk_mb=config.disk_mb,
        inodes=config.inodes,
    )
    return limits if config.image is None else replace(limits, image=config.image)


def open_pool(config: SandboxConfig) -> SandboxPool:
    """The config's sandbox backend, within its limits. Raises SandboxUnavailableError where this machine lacks it."""
    images = ImagePolicy(pull=config.pull, budget_gb=config.image_budget_gb, root=config.image_root, own=config.image)
    backend = open_backend(config.backend, run_id=uuid.uuid4().hex[:12], images=images, runtime=config.runtime)
    return SandboxPool(backend, max_starts=config.max_starts, max_execs=config.max_execs, warm=config.warm)


def _context(config: RunConfig, backend: SandboxBackend) -> EnvContext:
    return EnvContext(
        backend=backend,
        limits=box_limits(config.sandbox),
        interface=find_interface(config.env.interface),
        tool_style=config.env.tool_style,
        tool_timeout=config.rollout.tool_timeout,
        grade_timeout=config.env.grade_timeout,
        pairs=asyncio.Semaphore(max(1, config.sandbox.max_execs // 2)),
    )


@asynccontextmanager
async def open_world(
    config: RunConfig, facts: ModelFacts, log_dir: Path, display: Display, *, routes: bool
) -> AsyncIterator[World]:
    """Open a workshop, and an engine that serves ``config.model``: running ones by url, or a server of our own.

    ``facts`` are that model's. ``routes``: whether the engine is to capture its routes. Leaving stops what was started.
    Raises ConfigError, SandboxError or EngineStartError, each one line.
    """
    async with AsyncExitStack() as stack:
        workshop = await stack.enter_async_context(open_workshop(config, display))
        renderer = ChatRenderer(config.model, observation_role=find_interface(config.env.interface).observation_role)
        display.stage("starting the engine")
        engine = await stack.enter_async_context(
            open_engine(config.engine, config.model, facts, log_dir, routes=routes)
        )
        info = await engine.info()
        display.fact("engine", f"SGLang, {info.dtype}, {', '.join(engine.urls)}")
        yield World(
            workshop=workshop,
            engine=engine,
            renderer=renderer,
            format=tool_format(config.rollout.tool_format),
            limiter=Limiter(config.rollout.concurrency),
        )
