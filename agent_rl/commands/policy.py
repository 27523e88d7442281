"""The policies that a command can drive: which one is meant, and opening it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agent_rl.config import HarnessConfig, RolloutConfig, RunConfig
from agent_rl.controller import preflight
from agent_rl.controller.rollout_runtime import TaskRuntime, open_rollout_runtime, open_task_runtime
from agent_rl.errors import ConfigError, UserError
from agent_rl.monitoring.console import Display
from agent_rl.rollout.chat_policy import BYTES_A_TOKEN, ChatEngine, Endpoint
from agent_rl.rollout.chat_tokens import ChatTextRenderer, NativeToolCalls
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.group import EpisodeRunner, RolloutEvent
from agent_rl.rollout.scripted_policies import recorded, solver_runner
from agent_rl.types import Trajectory
from envs import Environment, Task, find_scaffold
from tools.formats import tool_format

SOLVERS = ("gold", "noop")
REPLAY = "replay:"
POLICIES = "engine, gold, noop, replay:TRAJECTORIES or an OpenAI-compatible endpoint http(s)://HOST/v1"


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """Which policy. ``model``, ``native_tools`` and ``request`` are an endpoint's
    (:class:`agent_rl.rollout.chat_policy.Endpoint`)."""

    name: str = "engine"
    model: str | None = None
    greedy: bool = False
    native_tools: bool = False
    request: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raises UserError for a policy that there is not, and for options that don't go together."""
        is_url = self.name.startswith(("http://", "https://"))
        if not is_url and self.name not in ("engine", *SOLVERS) and not self.is_recording:
            raise UserError(f"--policy {self.name}: not one of {POLICIES}")
        if is_url != (self.model is not None):
            raise UserError(
                "--model names the model at an endpoint: give it with --policy http(s)://..., and only there"
            )
        if not is_url and (self.native_tools or self.request):
            raise UserError("--tool-calls and --request are an endpoint's: give them with --policy http(s)://...")

    @property
    def is_recording(self) -> bool:
        return self.name.startswith(REPLAY)

    @property
    def endpoint(self) -> Endpoint | None:
        """The endpoint that answers, if one does."""
        return None if self.model is None else Endpoint(self.name, self.model, self.native_tools, self.request)

    def rules(self, config: RunConfig) -> EpisodeRules:
        """How the episodes are driven. A chat model is always told its tools; where the config's own model is not, the
        config's ``max_tokens`` leaves no room for that, and the default of the key holds."""
        rules = EpisodeRules.of(config).for_evaluation(greedy=self.greedy)
        scaffold = find_scaffold(config.env.scaffold)
        if self.native_tools and "tool_format" in scaffold.fixed:
            raise UserError(f"--tool-calls native: env.scaffold {scaffold.name} has calls of its own: leave it out")
        if self.model is None or config.rollout.describe_tools or "describe_tools" in scaffold.fixed:
            return rules
        return rules.limited(describe_tools=True, max_tokens=RolloutConfig().max_tokens)


@dataclass(frozen=True)
class Policy:
    """An opened policy: where it works, what runs one episode, and the tasks it can run (None: all)."""

    task_runtime: TaskRuntime
    run: EpisodeRunner
    only: frozenset[str] | None = None


def request_fields(given: Iterable[str]) -> dict[str, Any]:
    """The fields of ``--request key=value``, whose values are YAML. Raises UserError for one that is not so written."""
    fields: dict[str, Any] = {}
    for option in given:
        key, separator, value = option.partition("=")
        try:
            fields[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            separator = ""
        if not key or not separator:
            raise UserError(f"--request {option}: write it as key=value, max_tokens=null or seed=1, say")
    return fields


def with_harness(config: RunConfig, command: str | None, choice: PolicyChoice) -> RunConfig:
    """``config`` with the agent program ``command`` on this machine, if one is given. Raises UserError where the policy
    is not the config's model."""
    if command is None:
        return config
    if choice.name != "engine":
        raise UserError(f"--harness: a program asks the config's model; leave --policy {choice.name} out")
    rollout = config.rollout.model_copy(update={"harness": HarnessConfig(command=command, location="host")})
    return config.model_copy(update={"rollout": rollout})


@asynccontextmanager
async def open_policy(
    config: RunConfig, choice: PolicyChoice, log_dir: Path, display: Display
) -> AsyncIterator[Policy]:
    """Open what the policy needs; an engine that is launched logs to ``log_dir``."""
    rules = choice.rules(config)
    if choice.name == "engine":
        facts = preflight.check(config)
        async with open_rollout_runtime(config, facts, log_dir, display, routes=False) as runtime:
            yield Policy(runtime.task_runtime, runtime.runner(rules))
    elif (endpoint := choice.endpoint) is not None:
        engine = ChatEngine(endpoint, timeout=config.engine.request_timeout, retries=config.engine.retries)
        async with engine:
            await engine.check_ready()
            async with open_task_runtime(config, display) as task_runtime:
                yield Policy(task_runtime, _chat_runner(task_runtime.env, engine, endpoint, config, rules))
    else:
        async with open_task_runtime(config, display) as task_runtime:
            yield _solver(config, choice, task_runtime, rules)


def _solver(config: RunConfig, choice: PolicyChoice, task_runtime: TaskRuntime, rules: EpisodeRules) -> Policy:
    """A policy without a model: a recording, gold or no-op."""
    if not choice.is_recording:
        return Policy(task_runtime, solver_runner(task_runtime.env, choice.name, rules))
    solver, only = recorded(Path(choice.name.removeprefix(REPLAY)))
    run = solver_runner(task_runtime.env, solver, rules, tool_format_name=config.rollout.tool_format)
    return Policy(task_runtime, run, only)


def _chat_runner(
    env: Environment, engine: ChatEngine, endpoint: Endpoint, config: RunConfig, rules: EpisodeRules
) -> EpisodeRunner:
    """Episodes over a chat endpoint; limits in tokens become limits in bytes."""
    scaled = rules.limited(
        max_tokens=rules.rollout.max_tokens * BYTES_A_TOKEN,
        max_new_tokens=rules.rollout.max_new_tokens * BYTES_A_TOKEN,
    )
    fmt = NativeToolCalls() if endpoint.native_tools else tool_format(config.rollout.tool_format)
    renderer = ChatTextRenderer(native_tools=endpoint.native_tools)

    async def run(task: Task) -> Trajectory:
        return await run_episode(env, task, engine, renderer, fmt, scaled)

    return run


async def pick_tasks(policy: Policy, split: str, count: int | None) -> Sequence[Task]:
    """The first ``count`` tasks of ``split`` that the policy can run (None: all). Raises ConfigError for no task."""
    env = policy.task_runtime.env
    await env.prepare(split)
    held = policy.task_runtime.tasks(split)
    found = [task for task in held if policy.only is None or task.id in policy.only]
    if not held:
        raise ConfigError(f"--split {split}: environment {env.name!r} has no tasks of that split")
    if not found:
        raise ConfigError(f"--split {split}: none of the recording's tasks is of it: give the split it was made on")
    return found[:count]


def advance(display: Display, event: RolloutEvent) -> None:
    """Move the progress bar on where a group has ended."""
    if event.group is not None or event.dropped is not None:
        display.advance()
