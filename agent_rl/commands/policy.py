"""The policies that a command can run: parsing the choice, checking it, opening it."""

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
from agent_rl.rollout.chat_tokens import ChatTextRenderer, NativeToolCalls
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.group import EpisodeRunner, RolloutEvent
from agent_rl.rollout.openai_policy import BYTES_A_TOKEN, ChatEndpoint, ChatEngine
from agent_rl.rollout.scripted_policies import recorded, solver_runner
from agent_rl.types import Trajectory
from envs import Environment, Task, load_scaffold
from tools.formats import tool_format

SOLVERS = ("gold", "noop")
REPLAY = "replay:"
POLICIES = "engine, gold, noop, replay:TRAJECTORIES or an OpenAI-compatible endpoint http(s)://HOST/v1"


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """Which policy. ``model``, ``native_tools`` and ``request`` are an endpoint's
    (:class:`agent_rl.rollout.openai_policy.ChatEndpoint`)."""

    name: str = "engine"
    model: str | None = None
    greedy: bool = False
    native_tools: bool = False
    request: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raises UserError for an unknown policy, and for options that don't go together."""
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
    def endpoint(self) -> ChatEndpoint | None:
        """The chat endpoint, where the policy is one."""
        return None if self.model is None else ChatEndpoint(self.name, self.model, self.native_tools, self.request)

    def rules(self, config: RunConfig) -> EpisodeRules:
        """The rules of the episodes. A chat model always gets the tool descriptions in its prompt. Where the config's
        own model does not, the config's ``max_tokens`` has no space for them: the key's default applies, without
        compaction."""
        rules = EpisodeRules.from_config(config).for_evaluation(greedy=self.greedy)
        scaffold = load_scaffold(config.env.scaffold)
        for key, default in (("thinking", "default"), ("max_thinking_tokens", None), ("template_options", {})):
            if self.model is not None and getattr(config.rollout, key) != default:
                raise UserError(
                    f"rollout.{key}: a chat endpoint applies its own template: leave the key out and pass the "
                    "endpoint's fields, for example --request chat_template_kwargs='{enable_thinking: false}'"
                )
        for key in ("top_k", "min_p"):
            if self.model is not None and getattr(config.rollout, key):
                raise UserError(
                    f"rollout.{key}: chat requests have no such field: leave the key out, and use --request {key}=... "
                    "if the endpoint knows it"
                )
        if self.native_tools and "tool_format" in scaffold.required_rollout:
            raise UserError(f"--tool-calls native: env.scaffold {scaffold.name} has calls of its own: leave it out")
        if self.model is None or config.rollout.describe_tools or "describe_tools" in scaffold.required_rollout:
            return rules
        return rules.override(describe_tools=True, max_tokens=RolloutConfig().max_tokens, compaction=None)


@dataclass(frozen=True)
class Policy:
    """An opened policy: its task runtime, the function that runs one episode, and the ids of the tasks it can run
    (None: all)."""

    task_runtime: TaskRuntime
    run: EpisodeRunner
    only: frozenset[str] | None = None


def request_fields(options: Iterable[str]) -> dict[str, Any]:
    """The fields of ``--request key=value``, whose values are YAML. Raises UserError for one in another form."""
    fields: dict[str, Any] = {}
    for option in options:
        key, separator, value = option.partition("=")
        try:
            fields[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            separator = ""
        if not key or not separator:
            raise UserError(f"--request {option}: write it as key=value, for example max_tokens=null or seed=1")
    return fields


def with_harness(config: RunConfig, command: str | None, choice: PolicyChoice) -> RunConfig:
    """``config`` with the agent program ``command`` on this machine (None: unchanged). Raises UserError where the
    policy is not the config's model."""
    if command is None:
        return config
    if choice.name != "engine":
        raise UserError(f"--harness: an agent program uses the config's model; leave --policy {choice.name} out")
    rollout = config.rollout.model_copy(update={"harness": HarnessConfig(command=command, location="host")})
    return config.model_copy(update={"rollout": rollout})


@asynccontextmanager
async def open_policy(
    config: RunConfig, choice: PolicyChoice, logs: Path, display: Display, split: str
) -> AsyncIterator[Policy]:
    """Open the policy and its task runtime, for tasks of ``split``; launched engines log to ``logs``."""
    rules = choice.rules(config)
    if choice.name == "engine":
        async with open_rollout_runtime(preflight.run(config), logs, display, routes=False, split=split) as runtime:
            yield Policy(runtime.task_runtime, runtime.runner(rules))
    elif (endpoint := choice.endpoint) is not None:
        engine = ChatEngine(endpoint, timeout=config.engine.request_timeout, retries=config.engine.retries)
        async with engine:
            await engine.check_ready()
            async with open_task_runtime(config, display, split=split) as task_runtime:
                yield Policy(task_runtime, _chat_runner(task_runtime.env, engine, endpoint, rules))
    else:
        async with open_task_runtime(config, display, split=split) as task_runtime:
            yield _open_solver(choice, task_runtime, rules)


def _open_solver(choice: PolicyChoice, task_runtime: TaskRuntime, rules: EpisodeRules) -> Policy:
    """A policy without a model: a recording, the reference fix (gold) or an immediate submit (noop)."""
    if not choice.is_recording:
        return Policy(task_runtime, solver_runner(task_runtime.env, choice.name, rules))
    solver, only = recorded(Path(choice.name.removeprefix(REPLAY)))
    run = solver_runner(task_runtime.env, solver, rules, tool_format_name=rules.rollout.tool_format or "hermes")
    return Policy(task_runtime, run, only)


def _chat_runner(env: Environment, engine: ChatEngine, endpoint: ChatEndpoint, rules: EpisodeRules) -> EpisodeRunner:
    """Runs episodes over a chat endpoint. Limits in tokens become limits in bytes, :data:`BYTES_A_TOKEN` each."""
    scaled = rules.override(
        max_tokens=rules.rollout.max_tokens * BYTES_A_TOKEN, max_new_tokens=rules.rollout.max_new_tokens * BYTES_A_TOKEN
    )
    if (compaction := rules.rollout.compaction) is not None:
        at_tokens = compaction.at_tokens * BYTES_A_TOKEN
        scaled = scaled.override(compaction=compaction.model_copy(update={"at_tokens": at_tokens}))
    fmt = NativeToolCalls() if endpoint.native_tools else tool_format(rules.rollout.tool_format or "hermes")
    renderer = ChatTextRenderer(native_tools=endpoint.native_tools)

    async def run(task: Task) -> Trajectory:
        return await run_episode(env, task, engine, renderer, fmt, scaled)

    return run


async def pick_tasks(policy: Policy, split: str, count: int | None) -> Sequence[Task]:
    """The first ``count`` tasks of ``split`` that the policy can run (None: all). Raises ConfigError for no task."""
    env = policy.task_runtime.env
    await env.prepare(split)
    tasks = policy.task_runtime.tasks(split)
    runnable = [task for task in tasks if policy.only is None or task.id in policy.only]
    if not tasks:
        raise ConfigError(f"--split {split}: environment {env.name!r} has no tasks of that split")
    if not runnable:
        raise ConfigError(f"--split {split}: none of the recording's tasks is in it: give the split that was recorded")
    return runnable[:count]


def advance(display: Display, event: RolloutEvent) -> None:
    """Advance the progress bar where a group ended."""
    if event.group is not None or event.dropped is not None:
        display.advance()
