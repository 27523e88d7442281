"""``agent-rl eval`` and ``agent-rl rollout``: a policy on some tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from agent_rl.config import RunConfig
from agent_rl.controller import preflight
from agent_rl.controller.world import Workshop, open_workshop, open_world
from agent_rl.errors import ConfigError, UserError
from agent_rl.evaluation.folder import EvalFolder
from agent_rl.evaluation.report import EpisodeResult, breakdown, evaluate, table
from agent_rl.observe.display import Display
from agent_rl.rollout.chat_policy import BYTES_A_TOKEN, ChatEngine, ChatTextRenderer
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.group import EpisodeRunner, GroupSettings, Rollout, RolloutEvent, collect_groups
from agent_rl.rollout.limiter import Limiter
from agent_rl.rollout.records import write_trajectories
from agent_rl.rollout.solvers import recorded, solver_runner
from agent_rl.rollout.stats import rollout_metrics
from agent_rl.types import Trajectory
from envs import Environment, Task
from tools.formats import tool_format

SOLVERS = ("gold", "noop")
_BOUNDS = {"start_timeout", "grade_timeout"}
POLICIES = "engine, gold, noop, replay:TRAJECTORIES.jsonl or an OpenAI-compatible endpoint http(s)://HOST/v1"


@dataclass(frozen=True)
class Policy:
    """What is evaluated: where, what runs one episode, and the tasks it can run (None: all)."""

    workshop: Workshop
    run: EpisodeRunner
    only: frozenset[str] | None = None


async def run_evaluation(
    config: RunConfig,
    *,
    policy: str,
    model: str | None,
    tasks: int | None,
    samples: int,
    split: str | None,
    greedy: bool,
    out: Path | None,
) -> None:
    """Evaluate ``policy`` and print Pass@1 with its interval; what was there of an earlier start in ``out`` is kept."""
    _check_policy(policy, model)
    rules = EpisodeRules.of(config).for_evaluation(greedy=greedy)
    split = split or config.eval.split
    folder = EvalFolder(
        out or config.run_dir / "eval" / _folder_name(policy, split, greedy),
        {
            **{"policy": policy, "model": model or _model_mark(config, policy), "split": split, "env": config.env.name},
            **{"env_options": config.env.model_dump(mode="json")["options"], "tool_format": config.rollout.tool_format},
            **_settings(rules),
        },
        defaults=_settings(EpisodeRules()),
    )
    done = folder.results()
    display = Display(f"eval {config.name}")
    with display:
        async with _policy(config, policy, model, rules, display) as chosen:
            picked = await _tasks(chosen, split, tasks or config.eval.tasks)
            known = {task.id for task in picked}
            done = [result for result in done if result.task_id in known and result.sample < samples]
            if done:
                display.note(f"{folder.path}: {len(done)} of {len(picked) * samples} episodes are there already")
            display.stage(f"Pass@1 of {policy}", total=len(picked) * samples - _graded(done))
            report = await evaluate(
                picked,
                chosen.run,
                policy=policy,
                limiter=Limiter(config.rollout.concurrency),
                samples=samples,
                retries=config.rollout.sandbox_retries,
                done=done,
                on_result=folder.record,
                on_event=lambda event: _advance(display, event),
            )
    folder.finish(report, picked, model or policy)
    display.table(table([report]))
    if report.by_repo:
        display.table(breakdown(report.by_repo))
    display.note(f"report: {folder.path / 'report.json'}")


def _settings(rules: EpisodeRules) -> dict[str, object]:
    """What of the rules an evaluation's figures depend on."""
    limits = {"max_turns", "max_tokens", "max_new_tokens", "temperature", "top_p", "time_limit"}
    rollout = rules.rollout.model_dump(include=limits | {"max_parse_failures", "describe_tools"})
    bounds = {f"env.{key}": value for key, value in rules.env.model_dump(include=_BOUNDS).items()}
    return rollout | bounds


def _graded(results: Sequence[EpisodeResult]) -> int:
    return len({(result.task_id, result.sample) for result in results if result.resolved is not None})


def _folder_name(policy: str, split: str, greedy: bool) -> str:
    return f"{quote(policy, safe='')}-{split}{'-greedy' if greedy else ''}"


def _model_mark(config: RunConfig, policy: str) -> str:
    """What tells one model in a folder from the next one written there."""
    if policy != "engine":
        return ""
    files = sorted(config.model.glob("*.safetensors"))
    return f"{config.model} " + " ".join(f"{f.name}:{f.stat().st_size}:{f.stat().st_mtime_ns}" for f in files)


@asynccontextmanager
async def _policy(
    config: RunConfig, policy: str, model: str | None, rules: EpisodeRules, display: Display
) -> AsyncIterator[Policy]:
    """Open what ``policy`` needs."""
    if policy == "engine":
        preflight.check(config)
        async with open_world(config, config.run_dir / "logs", display) as world:
            yield Policy(world.workshop, world.runner(rules))
        return
    async with open_workshop(config, display) as workshop:
        env, fmt = workshop.env, config.rollout.tool_format
        if model is not None:
            engine = ChatEngine(policy, model, timeout=config.engine.request_timeout, retries=config.engine.retries)
            async with engine:
                yield Policy(workshop, _chat_runner(env, engine, rules, fmt))
        elif policy in SOLVERS:
            yield Policy(workshop, solver_runner(env, policy, rules))
        else:
            solver, only = recorded(Path(policy.removeprefix("replay:")))
            yield Policy(workshop, solver_runner(env, solver, rules, tool_format_name=fmt), only)


def _check_policy(policy: str, model: str | None) -> None:
    is_url = policy.startswith(("http://", "https://"))
    if not is_url and policy not in ("engine", *SOLVERS) and not policy.startswith("replay:"):
        raise UserError(f"--policy {policy}: not one of {POLICIES}")
    if is_url != (model is not None):
        raise UserError("--model names the model at an endpoint: give it with --policy http(s)://..., and only there")


def _chat_runner(env: Environment, engine: ChatEngine, rules: EpisodeRules, fmt: str) -> EpisodeRunner:
    """Episodes over a chat endpoint; limits in tokens become limits in bytes."""
    limits = rules.rollout
    scaled = rules.limited(
        max_tokens=limits.max_tokens * BYTES_A_TOKEN, max_new_tokens=limits.max_new_tokens * BYTES_A_TOKEN
    )

    async def run(task: Task) -> Trajectory:
        return await run_episode(env, task, engine, ChatTextRenderer(), tool_format(fmt), scaled)

    return run


async def _tasks(policy: Policy, split: str, count: int) -> Sequence[Task]:
    env = policy.workshop.env
    await env.prepare(split)
    found = [task for task in policy.workshop.tasks(split) if policy.only is None or task.id in policy.only]
    if not found:
        raise ConfigError(f"eval.split: environment {env.name!r} has no such tasks in split {split!r}")
    return found[:count]


def _advance(display: Display, event: RolloutEvent) -> None:
    if event.group is not None or event.dropped is not None:
        display.advance()


async def run_rollout(config: RunConfig, *, tasks: int, split: str) -> None:
    """Collect groups of ``tasks`` tasks and write their trajectories as step 0 of ``runs/<name>-rollout``."""
    display = Display(f"rollout {config.name}")
    with display:
        rollout = await roll_out(config, config.runs_dir / f"{config.name}-rollout", display, tasks=tasks, split=split)
    for name, value in rollout_metrics(rollout).items():
        display.note(f"{name:<36} {value:.4g}")


async def roll_out(config: RunConfig, folder: Path, display: Display, *, tasks: int, split: str) -> Rollout:
    """Collect groups of ``tasks`` tasks with the config's model; write their trajectories as step 0 of ``folder``."""
    preflight.check(config)
    async with open_world(config, folder / "logs", display) as world:
        policy = Policy(world.workshop, world.runner(EpisodeRules.of(config)))
        chosen = await _tasks(policy, split, tasks)
        display.stage("rollout", total=len(chosen))
        rollout = await collect_groups(
            chosen,
            policy.run,
            GroupSettings(config.rollout.group_size, retries=config.rollout.sandbox_retries, min_size=1),
            limiter=world.limiter,
            on_event=lambda event: _advance(display, event),
        )
        path = await asyncio.to_thread(write_trajectories, folder, 0, rollout.groups)
    display.note(f"trajectories: {path}")
    return rollout
