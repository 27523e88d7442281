"""Everything a rollout needs, opened and closed as one: sandboxes, environment, engine, renderer, tool format."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from agent_rl.config import RunConfig
from agent_rl.controller.placement import open_reservations
from agent_rl.controller.sandboxes import open_sandboxes, sandbox_limits
from agent_rl.endpoint.episode import HarnessRun, agent_binds
from agent_rl.endpoint.server import Gateway, open_gateway
from agent_rl.engine.factory import open_engine
from agent_rl.engine.ray_servers import Reservation
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.evaluation.quarantine import read_quarantine
from agent_rl.models.spec import ModelSpec
from agent_rl.monitoring.console import Display
from agent_rl.render import ChatRenderer
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.limiter import Limiter
from agent_rl.rollout.route_audit import Auditor
from agent_rl.rollout.turn_log import LoggedRunner, TurnLog
from agent_rl.types import Trajectory
from agent_rl.weight_sync.served import refuse_others
from envs import Environment, Task, find_scaffold
from envs.context import EnvContext
from envs.registry import load_environment
from sandbox import SandboxBackend
from sandbox.ray.backend import ClusterBackend
from tools.formats import ToolCallFormat, tool_format


@dataclass(frozen=True)
class TaskRuntime:
    """Where tasks are worked on: the sandbox backend, the environment, and which of its tasks are left out."""

    backend: SandboxBackend
    env: Environment
    quarantined: frozenset[str] = frozenset()

    def tasks(self, split: str) -> list[Task]:
        """The environment's tasks of ``split`` that are not in quarantine."""
        return [task for task in self.env.tasks(split) if task.id not in self.quarantined]

    def metrics(self) -> dict[str, float]:
        """What became of the hosts that sandboxes are on, where those are a cluster's."""
        cluster = self.backend
        if not isinstance(cluster, ClusterBackend):
            return {}
        living = len(cluster.places) - cluster.lost
        return {"nodes/alive": living, "nodes/lost": cluster.lost, "nodes/sandboxes": cluster.sandboxes}


@dataclass(frozen=True)
class RolloutRuntime:
    """A workshop, and a policy to work in it."""

    task_runtime: TaskRuntime
    engine: SGLangEngine
    renderer: ChatRenderer
    format: ToolCallFormat
    limiter: Limiter
    gateway: Gateway | None = None

    def runner(self, rules: EpisodeRules) -> LoggedRunner:
        """Runs one episode of a task with the engine's policy under ``rules``, and audits its routes now and then."""
        audit = Auditor(self.engine, rules.routes.audit) if rules.routes else None
        if self.gateway is not None:
            return self._harness_runner(self.gateway, rules, audit)

        async def run(task: Task, log: TurnLog | None = None) -> Trajectory:
            parts = (self.task_runtime.env, task, self.engine, self.renderer, self.format, rules)
            return await run_episode(*parts, audit, self.engine.gate, log)

        return run

    def metrics(self) -> dict[str, float]:
        """What became of hosts and of agent programs, where the run has any."""
        return self.task_runtime.metrics() | ({} if self.gateway is None else self.gateway.metrics())

    def _harness_runner(self, gateway: Gateway, rules: EpisodeRules, audit: Auditor | None) -> LoggedRunner:
        """The same with the agent program of ``rules.rollout.harness``."""
        context = self.engine.facts.max_positions

        async def run(task: Task, log: TurnLog | None = None) -> Trajectory:
            assert log is None, "the config refuses turns of an agent program"
            parts = (self.task_runtime.env, task, self.engine, self.renderer, self.format, rules, self.engine.gate)
            return await HarnessRun(gateway, context, *parts).run(audit)

        return run


@asynccontextmanager
async def open_task_runtime(
    config: RunConfig, display: Display, agent_binds: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[TaskRuntime]:
    """Open the sandbox backend and the environment, removing first what dead runs left behind. ``agent_binds``: what
    the agents' sandboxes see of the host (:class:`envs.context.EnvContext`)."""
    quarantined = frozenset(read_quarantine(config.env.quarantine) if config.env.quarantine else ())
    async with open_sandboxes(config, display.note) as backend:
        if reaped := await backend.reap():
            display.note(f"removed {reaped} sandbox(es) that a killed run had left behind")
        hosts = f" on {len(backend.places)} hosts" if isinstance(backend, ClusterBackend) else ""
        display.fact("sandbox", f"{backend.name}{hosts}")
        if quarantined:
            display.fact("quarantine", f"{len(quarantined)} tasks left out")
        env = load_environment(config.env.name, _context(config, backend, agent_binds), config.env.options)
        yield TaskRuntime(backend, env, quarantined)


def _context(config: RunConfig, backend: SandboxBackend, agent_binds: Mapping[str, str]) -> EnvContext:
    return EnvContext(
        backend=backend,
        limits=sandbox_limits(config.sandbox),
        scaffold=find_scaffold(config.env.scaffold),
        tool_style=config.env.tool_style,
        tool_timeout=config.rollout.tool_timeout,
        grade_timeout=config.env.grade_timeout,
        agent_binds=agent_binds,
        pairs=asyncio.Semaphore(max(1, config.sandbox.max_execs // 2)),
    )


async def _refuse_other_weights(config: RunConfig, facts: ModelSpec, engine: SGLangEngine, display: Display) -> None:
    """Raise UserError where running engines hold other weights than the config's model; note what was not compared."""
    left = await asyncio.to_thread(refuse_others, engine.urls, config.model, facts, config.engine)
    if left is not None:
        display.note(left)


@asynccontextmanager
async def open_rollout_runtime(
    config: RunConfig,
    facts: ModelSpec,
    log_dir: Path,
    display: Display,
    *,
    routes: bool,
    publishing: bool = False,
    rooms: Sequence[Reservation] | None = None,
) -> AsyncIterator[RolloutRuntime]:
    """Open a workshop, and an engine that serves ``config.model``: running ones by url, or a server of our own.

    ``facts`` are that model's. ``routes``: whether the engine is to capture its routes; ``publishing``: whether it gets
    weights before it is used. ``rooms``: for engines on Ray; None reserves them here. Leaving stops what was started.
    Raises ConfigError, SandboxError or EngineStartError, each one line.
    """
    async with AsyncExitStack() as stack:
        if rooms is None:
            rooms = (await stack.enter_async_context(open_reservations(config, ranks=False))).engines
        renderer = ChatRenderer(config.model, observation_role=find_scaffold(config.env.scaffold).observation_role)
        harness, gateway = config.rollout.harness, None
        if harness is not None:
            renderer.check_tails()
            gateway = await stack.enter_async_context(open_gateway(harness.dialects))
            display.fact("harness", f"{harness.command}, in the {harness.location}, port {gateway.port}")
        binds = agent_binds(gateway, harness) if gateway and harness else {}
        task_runtime = await stack.enter_async_context(open_task_runtime(config, display, binds))
        display.stage("starting the engine")
        opening = open_engine(
            config.engine,
            config.model,
            facts,
            log_dir,
            display.note,
            routes=routes,
            publishing=publishing,
            rooms=rooms,
        )
        engine = await stack.enter_async_context(opening)
        if not (publishing or config.engine.launched):
            await _refuse_other_weights(config, facts, engine, display)
        info = await engine.info()
        display.fact("engine", f"SGLang, {info.dtype}, {', '.join(engine.urls)}")
        yield RolloutRuntime(
            task_runtime=task_runtime,
            engine=engine,
            renderer=renderer,
            format=tool_format(config.rollout.tool_format),
            limiter=Limiter(config.rollout.concurrency),
            gateway=gateway,
        )
