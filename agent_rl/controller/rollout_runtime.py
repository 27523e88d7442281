"""Opens and closes everything a rollout needs: sandboxes, environment, engine, renderer, tool format."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType

from agent_rl.config import EngineConfig, RunConfig, TaskSource
from agent_rl.controller.cluster_resources import ClusterRequest
from agent_rl.controller.placement import open_reservations
from agent_rl.controller.preflight import Checked
from agent_rl.controller.sandboxes import open_sandboxes, sandbox_limits
from agent_rl.controller.task_order import WeightedTasks
from agent_rl.endpoint.episode import HarnessRun, agent_binds, relay_endpoint
from agent_rl.endpoint.server import EndpointServer, serve_endpoint
from agent_rl.engine.factory import open_engine
from agent_rl.engine.ray_servers import Reservation
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.evaluation.quarantine import read_quarantine
from agent_rl.models.mixer_costs import shares_prompts_late
from agent_rl.monitoring.console import Display
from agent_rl.render import ChatRenderer
from agent_rl.rollout.compaction import check_compaction
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.episode_recovery import LoggedRunner, TurnLog
from agent_rl.rollout.group import Limiter
from agent_rl.rollout.route_audit import Auditor
from agent_rl.rollout.shared_prompts import SharedPrompts
from agent_rl.types import Trajectory
from agent_rl.utils.sockets import NCCL_SETTINGS
from agent_rl.weight_sync.served import check_served_weights
from envs import ENVIRONMENTS, Environment, GradingError, ProtocolError, Task, load_scaffold
from envs.context import EnvContext
from envs.protocol import try_first_task
from envs.registry import load_environment
from envs.sources import SourcesEnvironment, source_of
from sandbox import SandboxBackend, SandboxError, bounded
from sandbox.ray.backend import ClusterBackend
from tools.formats import ToolCallFormat, tool_format


@dataclass(frozen=True)
class TaskRuntime:
    """The sandbox backend, the environment, and the ids of its tasks that are left out."""

    backend: SandboxBackend
    env: Environment
    quarantined: frozenset[str] = frozenset()

    def tasks(self, split: str) -> list[Task]:
        """The environment's tasks of ``split`` that are not in quarantine."""
        return [task for task in self.env.tasks(split) if task.id not in self.quarantined]

    def training_sources(self, config: RunConfig) -> dict[str, WeightedTasks]:
        """The tasks to train on by source, with their weights; "" is the environment of the section ``env``."""
        if not config.train.sources:
            return {"": WeightedTasks(self.tasks("train"))}
        tasks = self.tasks("train")
        return {
            name: WeightedTasks([task for task in tasks if source_of(task.id, (name,))], source.weight)
            for name, source in config.train.sources.items()
        }

    def metrics(self) -> dict[str, float]:
        """``nodes/*``: the nodes that sandboxes run on; empty where sandboxes are on this machine."""
        cluster = self.backend
        if not isinstance(cluster, ClusterBackend):
            return {}
        living = len(cluster.nodes) - cluster.lost
        return {"nodes/alive": living, "nodes/lost": cluster.lost, "nodes/sandboxes": cluster.sandboxes}


@dataclass(frozen=True)
class RolloutRuntime:
    """A task runtime and the policy that runs episodes in it."""

    task_runtime: TaskRuntime
    engine: SGLangEngine
    renderer: ChatRenderer
    format: ToolCallFormat
    limiter: Limiter
    endpoint: EndpointServer | None = None

    def runner(self, rules: EpisodeRules) -> LoggedRunner:
        """A function that runs one episode of a task with the engine's policy under ``rules``, and audits the routes of
        some episodes."""
        audit = Auditor(self.engine, rules.routes.audit) if rules.routes else None
        if self.endpoint is not None:
            return self._harness_runner(self.endpoint, rules, audit)

        shared = SharedPrompts(self.engine) if shares_prompts_late(self.engine.model_spec) else None

        async def run(task: Task, log: TurnLog | None = None) -> Trajectory:
            with nullcontext(self.engine) if shared is None else shared.episode(task.id) as engine:
                parts = (self.task_runtime.env, task, engine, self.renderer, self.format, rules)
                return await run_episode(*parts, audit, self.engine.gate, log)

        return run

    def metrics(self) -> dict[str, float]:
        """Metrics of the nodes and of agent programs, where the run has any."""
        return self.task_runtime.metrics() | ({} if self.endpoint is None else self.endpoint.metrics())

    def _harness_runner(self, endpoint: EndpointServer, rules: EpisodeRules, audit: Auditor | None) -> LoggedRunner:
        """As :meth:`runner`, driven by the agent program of ``rules.rollout.harness``."""
        context = self.engine.model_spec.max_positions

        async def run(task: Task, log: TurnLog | None = None) -> Trajectory:
            assert log is None, "the config refuses turns of an agent program"
            parts = (self.task_runtime.env, task, self.engine, self.renderer, self.format, rules, self.engine.gate)
            return await HarnessRun(endpoint, context, *parts).run(audit)

        return run


@asynccontextmanager
async def open_task_runtime(
    config: RunConfig,
    display: Display,
    agent_binds: Mapping[str, str] = MappingProxyType({}),
    *,
    split: str | None = None,
    endpoint: EndpointServer | None = None,
) -> AsyncIterator[TaskRuntime]:
    """Open the sandbox backend and the environment, and remove sandboxes that dead runs left behind. ``agent_binds``:
    what the agents' sandboxes see of the host (:class:`envs.context.EnvContext`). ``endpoint``: the endpoint that they
    reach. ``split``: a custom environment
    starts and grades its first task of this split, and ProtocolError says in one line what its author has to change.
    """
    quarantined = frozenset(read_quarantine(config.env.quarantine) if config.env.quarantine else ())
    cluster = ClusterRequest.of(config)
    async with open_sandboxes(config, cluster, display.note) as backend:
        if reaped := await backend.reap():
            display.note(f"removed {reaped} sandbox(es) that a killed run had left behind")
        if endpoint is not None:
            await relay_endpoint(endpoint, backend)
        nodes = f" on {len(backend.nodes)} nodes" if isinstance(backend, ClusterBackend) else ""
        display.fact("sandbox", f"{backend.name}{nodes}")
        if quarantined:
            display.fact("quarantine", f"{len(quarantined)} tasks left out")
        context = EnvContext(
            backend=backend,
            limits=sandbox_limits(config.sandbox),
            scaffold=load_scaffold(config.env.scaffold),
            tool_style=config.env.tool_style,
            tool_timeout=config.rollout.tool_timeout,
            grade_timeout=config.env.grade_timeout,
            agent_binds=agent_binds,
        )
        loaded = _load_environments(config, context)
        if split is not None:
            for name, source in config.environments.items():
                if source.env not in ENVIRONMENTS.built_in:
                    await _try_environment(source, loaded[name], _split_of(config, name, split), config, display)
        yield TaskRuntime(backend, _as_one(loaded, config), quarantined)


def _load_environments(config: RunConfig, context: EnvContext) -> dict[str, Environment]:
    """The environments of the config by source."""
    loaded = dict[str, Environment]()
    for name, source in config.environments.items():
        timeout = source.grade_timeout or context.grade_timeout
        loaded[name] = load_environment(source.env, replace(context, grade_timeout=timeout), source.options)
    return loaded


def _split_of(config: RunConfig, source: str, split: str) -> str:
    """The split of a source's tasks; ``split`` for the environment of the section ``env``."""
    trained = config.train.sources.get(source)
    return trained.split if trained else config.evaluations[source].split if source else split


def _as_one(loaded: Mapping[str, Environment], config: RunConfig) -> Environment:
    """The environments of the config as one. A source of evaluation is a split of that name."""
    if list(loaded) == [""]:
        return loaded[""]
    evaluated = {name: [(name, settings.split)] for name, settings in config.evaluations.items()}
    trained = [(name, source.split) for name, source in config.train.sources.items()] or [("", "train")]
    splits = evaluated | {"train": trained, config.eval.split: list(chain.from_iterable(evaluated.values()))}
    return SourcesEnvironment(loaded, splits)


async def _try_environment(
    source: TaskSource, env: Environment, split: str, config: RunConfig, display: Display
) -> None:
    display.stage("trying the environment's first task")
    try:
        async with bounded(config.env.start_timeout + config.env.grading_timeout, "the first task"):
            await try_first_task(env, split, source.reward_weights)
    except ProtocolError as error:
        name = source.env
        raise ProtocolError(f"environment {name}: {error}; `agent-rl envs check {name}` runs all checks") from error
    except (SandboxError, GradingError) as error:
        display.note(f"the environment's first task was not tried: {error}")


def describe_gpu_start(engine: EngineConfig, log_dir: Path, display: Display) -> None:
    """Print what an engine's start on GPUs waits for, and the NCCL settings of ranks and engines."""
    log, settings = log_dir / "engine-0.log", {name: os.environ.get(name, own) for name, own in NCCL_SETTINGS.items()}
    display.note(f"the first start compiles kernels for minutes; the limit is {engine.start_seconds:g} s; log: {log}")
    listed = ", ".join(f"{name}={value}" for name, value in settings.items())
    display.note(f"NCCL: {listed}; in an engine, variables of its node take precedence")


async def _refuse_other_weights(checked: Checked, engine: SGLangEngine, display: Display) -> None:
    """Raise UserError where running engines serve other weights than the config's model; note what was not compared."""
    config = checked.config
    note = await asyncio.to_thread(check_served_weights, engine.urls, config.model, checked.model_spec, config.engine)
    if note is not None:
        display.note(note)


def chat_renderer(config: RunConfig) -> ChatRenderer:
    """The renderer of the run's episodes. Raises TemplateError."""
    return ChatRenderer(
        config.model,
        thinking=config.rollout.thinking,
        options=config.rollout.template_options,
        observation_role=load_scaffold(config.env.scaffold).observation_role,
    )


def call_format(config: RunConfig, renderer: ChatRenderer) -> ToolCallFormat:
    """The format of tool calls in the run's episodes."""
    return tool_format(config.rollout.tool_format or renderer.tool_format)


@asynccontextmanager
async def open_rollout_runtime(
    checked: Checked,
    log_dir: Path,
    display: Display,
    *,
    routes: bool,
    publishing: bool = False,
    reservations: Sequence[Reservation] | None = None,
    split: str | None = None,
) -> AsyncIterator[RolloutRuntime]:
    """Open the task runtime and the engines that serve ``config.model``: those of ``engine.urls``, or own servers.

    ``routes``: whether the engines capture routes. ``publishing``: whether they receive weights before they are used.
    ``reservations``: of engines on Ray; None reserves them here. ``split``: as in :func:`open_task_runtime`. Leaving
    stops everything that was started. Raises ConfigError, SandboxError, ProtocolError or EngineStartError, each one
    line.
    """
    config = checked.config
    async with AsyncExitStack() as stack:
        if reservations is None:
            reserved = await stack.enter_async_context(open_reservations(checked.cluster, ranks=False))
            reservations = reserved.engines
        renderer = chat_renderer(config)
        if config.rollout.max_thinking_tokens is not None:
            renderer.check_end_of_thoughts()
        if config.rollout.compaction is not None:
            check_compaction(config.rollout, config.rollout.compaction, renderer)
        harness, endpoint = config.rollout.harness, None
        if harness is not None:
            renderer.check_tails()
            endpoint = await stack.enter_async_context(serve_endpoint(harness.dialects, bind=harness.bind))
            display.fact("harness", f"{harness.command}, in the {harness.location}, port {endpoint.port}")
        binds = agent_binds(endpoint, harness) if endpoint and harness else {}
        task_runtime = await stack.enter_async_context(
            open_task_runtime(config, display, binds, split=split, endpoint=endpoint)
        )
        display.stage("starting the engine")
        if config.engine.launched and config.engine.may_use_gpus:
            describe_gpu_start(config.engine, log_dir, display)
        opening = open_engine(
            config.engine,
            config.model,
            checked.model_spec,
            log_dir,
            display.note,
            routes=routes,
            masks=config.rollout.truncated and (routes or publishing),
            publishing=publishing,
            reservations=reservations,
        )
        engine = await stack.enter_async_context(opening)
        if not (publishing or config.engine.launched):
            await _refuse_other_weights(checked, engine, display)
        info = await engine.info()
        display.fact("engine", f"SGLang, {info.dtype}, {', '.join(engine.urls)}")
        yield RolloutRuntime(
            task_runtime=task_runtime,
            engine=engine,
            renderer=renderer,
            format=call_format(config, renderer),
            limiter=Limiter(config.rollout.concurrency),
            endpoint=endpoint,
        )
