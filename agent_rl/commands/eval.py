"""``agent-rl eval``: Pass@1 of a policy on some tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from agent_rl.config import RolloutConfig, RunConfig
from agent_rl.controller import preflight
from agent_rl.controller.world import Workshop, open_workshop, open_world
from agent_rl.errors import ConfigError, UserError
from agent_rl.evaluation.folder import EvalFolder
from agent_rl.evaluation.report import EpisodeResult, EvalReport, breakdown, evaluate, table
from agent_rl.observe.display import Display
from agent_rl.observe.folder_lock import hold_folder
from agent_rl.rollout.chat_policy import BYTES_A_TOKEN, ChatEngine, Endpoint
from agent_rl.rollout.chat_tokens import ChatTextRenderer, NativeToolCalls
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.group import EpisodeRunner, RolloutEvent
from agent_rl.rollout.limiter import Limiter
from agent_rl.rollout.solvers import recorded, solver_runner
from agent_rl.types import Trajectory
from envs import Environment, Task
from tools.formats import tool_format

SOLVERS = ("gold", "noop")
REPLAY = "replay:"
_BOUNDS = {"start_timeout", "grade_timeout"}
POLICIES = "engine, gold, noop, replay:TRAJECTORIES.jsonl or an OpenAI-compatible endpoint http(s)://HOST/v1"


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What to evaluate. ``tasks`` and ``split`` are the config's where None; of a recording, ``split`` is train.

    ``native_tools`` and ``request`` are an endpoint's (:class:`agent_rl.rollout.chat_policy.Endpoint`).
    """

    policy: str = "engine"
    model: str | None = None
    tasks: int | None = None
    samples: int = 1
    split: str | None = None
    greedy: bool = False
    out: Path | None = None
    native_tools: bool = False
    request: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raises UserError for options that don't go together."""
        is_url = self.policy.startswith(("http://", "https://"))
        if not is_url and self.policy not in ("engine", *SOLVERS) and not self.policy.startswith(REPLAY):
            raise UserError(f"--policy {self.policy}: not one of {POLICIES}")
        if is_url != (self.model is not None):
            raise UserError(
                "--model names the model at an endpoint: give it with --policy http(s)://..., and only there"
            )
        if not is_url and (self.native_tools or self.request):
            raise UserError("--tool-calls and --request are an endpoint's: give them with --policy http(s)://...")

    @property
    def endpoint(self) -> Endpoint | None:
        """The endpoint that is evaluated, if one is."""
        return None if self.model is None else Endpoint(self.policy, self.model, self.native_tools, self.request)

    def split_of(self, config: RunConfig) -> str:
        return self.split or ("train" if self.policy.startswith(REPLAY) else config.eval.split)

    def folder(self, config: RunConfig) -> Path:
        model = "" if self.model is None else f"-{quote(self.model, safe='')}"
        name = f"{quote(self.policy, safe='')}{model}-{self.split_of(config)}{'-greedy' if self.greedy else ''}"
        return self.out or config.run_dir / "eval" / name

    def rules(self, config: RunConfig) -> EpisodeRules:
        """How the episodes are driven. A chat model is always told its tools; where the config's own model is not, the
        config's ``max_tokens`` leaves no room for that, and the default of the key holds."""
        rules = EpisodeRules.of(config).for_evaluation(greedy=self.greedy)
        if self.model is None or config.rollout.describe_tools:
            return rules
        return rules.limited(describe_tools=True, max_tokens=RolloutConfig().max_tokens)


@dataclass(frozen=True)
class Policy:
    """What is evaluated: where, what runs one episode, and the tasks it can run (None: all)."""

    workshop: Workshop
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


async def run_evaluation(config: RunConfig, options: EvalOptions) -> str | None:
    """Evaluate and print Pass@1 with its interval; what was there of an earlier start in the folder is kept.

    Returns why nothing could be graded, or None where something was.
    """
    options.check()
    preflight.check_room(config.runs_dir)
    path, display = options.folder(config), Display(f"eval {config.name}")
    with hold_folder(path):
        folder = EvalFolder(path, _facts(config, options), defaults=_settings(EpisodeRules()))
        with display:
            async with _policy(config, options, path, display) as policy:
                picked = await pick_tasks(policy, options.split_of(config), options.tasks or config.eval.tasks)
                report = await _evaluate(config, options, policy, picked, folder, display)
        folder.finish(report, picked, options.model or options.policy)
    return _tell(display, report, path)


async def _evaluate(
    config: RunConfig, options: EvalOptions, policy: Policy, tasks: Sequence[Task], folder: EvalFolder, display: Display
) -> EvalReport:
    """Run the samples of ``tasks`` that ``folder`` does not hold yet."""
    known = {task.id for task in tasks}
    done = [result for result in folder.results() if result.task_id in known and result.sample < options.samples]
    if done:
        display.note(f"{folder.path}: {len(done)} of {len(tasks) * options.samples} episodes are there already")
    display.stage(f"Pass@1 of {options.policy}", total=len(tasks) * options.samples - _graded(done))
    return await evaluate(
        tasks,
        policy.run,
        policy=options.policy,
        limiter=Limiter(config.rollout.concurrency),
        samples=options.samples,
        retries=config.rollout.sandbox_retries,
        done=done,
        on_result=folder.record,
        on_event=lambda event: advance(display, event),
    )


def _tell(display: Display, report: EvalReport, path: Path) -> str | None:
    """Print the report. Where nothing was graded there is none to print: why not is returned."""
    if not report.graded:
        reasons = Counter(outcome.error for outcome in report.outcomes)
        (reason, count), *_ = reasons.most_common(1)
        return f"none of {report.tasks} tasks could be graded; {count} of them: {reason}"
    display.table(table([report]))
    if report.by_repo:
        display.table(breakdown(report.by_repo))
    display.note(f"report: {path / 'report.json'}")
    unresolved = next((o.task_id for o in report.outcomes if o.graded and not o.resolved), None)
    display.next("show", path, *(["--task", unresolved] if unresolved else []))
    return None


def _settings(rules: EpisodeRules) -> dict[str, object]:
    """What of the rules an evaluation's figures depend on."""
    limits = {"max_turns", "max_tokens", "max_new_tokens", "temperature", "top_p", "time_limit"}
    rollout = rules.rollout.model_dump(include=limits | {"max_parse_failures", "describe_tools"})
    bounds = {f"env.{key}": value for key, value in rules.env.model_dump(include=_BOUNDS).items()}
    return rollout | bounds


def _graded(results: Sequence[EpisodeResult]) -> int:
    return len({(result.task_id, result.sample) for result in results if result.resolved is not None})


def _facts(config: RunConfig, options: EvalOptions) -> dict[str, Any]:
    """What the figures depend on; an evaluation that differs in any of it gets a folder of its own."""
    endpoint = {"native_tools": options.native_tools, "request": dict(options.request)} if options.model else {}
    return {
        "policy": options.policy,
        "model": options.model or _model_mark(config, options.policy),
        "split": options.split_of(config),
        "env": config.env.name,
        "env_options": config.env.model_dump(mode="json")["options"],
        "tool_format": config.rollout.tool_format,
        **endpoint,
        **_settings(options.rules(config)),
    }


def _model_mark(config: RunConfig, policy: str) -> str:
    """What tells one model in a folder from the next one written there."""
    if policy != "engine":
        return ""
    files = sorted(config.model.glob("*.safetensors"))
    return f"{config.model} " + " ".join(f"{f.name}:{f.stat().st_size}:{f.stat().st_mtime_ns}" for f in files)


@asynccontextmanager
async def _policy(config: RunConfig, options: EvalOptions, folder: Path, display: Display) -> AsyncIterator[Policy]:
    """Open what the policy needs."""
    rules = options.rules(config)
    if options.policy == "engine":
        facts = preflight.check(config)
        async with open_world(config, facts, folder, display) as world:
            yield Policy(world.workshop, world.runner(rules))
    elif (endpoint := options.endpoint) is not None:
        engine = ChatEngine(endpoint, timeout=config.engine.request_timeout, retries=config.engine.retries)
        async with engine:
            await engine.check_ready()
            async with open_workshop(config, display) as workshop:
                yield Policy(workshop, _chat_runner(workshop.env, engine, endpoint, config, rules))
    else:
        async with open_workshop(config, display) as workshop:
            yield _solver(config, options, workshop, rules)


def _solver(config: RunConfig, options: EvalOptions, workshop: Workshop, rules: EpisodeRules) -> Policy:
    """A policy without a model: a recording, gold or no-op."""
    if not options.policy.startswith(REPLAY):
        return Policy(workshop, solver_runner(workshop.env, options.policy, rules))
    solver, only = recorded(Path(options.policy.removeprefix(REPLAY)))
    run = solver_runner(workshop.env, solver, rules, tool_format_name=config.rollout.tool_format)
    return Policy(workshop, run, only)


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


async def pick_tasks(policy: Policy, split: str, count: int) -> Sequence[Task]:
    """The first ``count`` tasks of ``split`` that the policy can run. Raises ConfigError where there are none."""
    env = policy.workshop.env
    await env.prepare(split)
    held = policy.workshop.tasks(split)
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
