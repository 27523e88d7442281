"""``agent-rl eval`` and ``agent-rl rollout``: the config's policy, or a solver that needs no model, on some tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from agent_rl.config import RunConfig
from agent_rl.controller import preflight
from agent_rl.controller.world import open_workshop, open_world
from agent_rl.errors import ConfigError, UserError
from agent_rl.evaluate import evaluate, table
from agent_rl.observe.display import Display
from agent_rl.rollout.group import EpisodeRunner, GroupSettings, RolloutEvent, collect_groups
from agent_rl.rollout.limiter import Limiter
from agent_rl.rollout.records import write_trajectories
from agent_rl.rollout.settings import RolloutSettings
from agent_rl.rollout.solvers import solver_runner
from agent_rl.rollout.stats import rollout_metrics
from envs import Environment, Task

POLICIES = ("engine", "gold", "noop")


async def run_evaluation(
    config: RunConfig, *, policy: str, tasks: int | None, split: str | None, greedy: bool, out: Path | None
) -> None:
    """Evaluate ``policy`` and print Pass@1 with its interval; ``out`` takes the report as JSON."""
    if policy not in POLICIES:
        raise UserError(f"--policy {policy}: not one of {', '.join(POLICIES)}")
    display = Display(f"eval {config.name}")
    with display:
        async with _policy(config, policy, greedy, display) as (env, run):
            chosen = await _tasks(env, split or config.eval.split, tasks or config.eval.tasks)
            display.stage(f"Pass@1 of {policy}", total=len(chosen))
            report = await evaluate(
                chosen,
                run,
                policy=policy,
                limiter=Limiter(config.rollout.concurrency),
                retries=config.rollout.sandbox_retries,
                on_event=lambda event: _advance(display, event),
            )
    display.table(table([report]))
    if out is not None:
        report.write(out)
        display.note(f"report: {out}")


@asynccontextmanager
async def _policy(
    config: RunConfig, policy: str, greedy: bool, display: Display
) -> AsyncIterator[tuple[Environment, EpisodeRunner]]:
    """The environment, and what runs one episode of a task with ``policy``."""
    settings = RolloutSettings.from_config(config.rollout).for_evaluation(greedy=greedy)
    if policy == "engine":
        preflight.check(config)
        async with open_world(config, config.run_dir / "logs", display) as world:
            yield world.workshop.env, world.runner(settings)
    else:
        async with open_workshop(config, display) as workshop:
            yield workshop.env, solver_runner(workshop.env, policy, settings)


async def _tasks(env: Environment, split: str, count: int) -> Sequence[Task]:
    await env.prepare(split)
    found = env.tasks(split)
    if not found:
        raise ConfigError(f"eval.split: environment {env.name!r} has no tasks in split {split!r}")
    return found[:count]


def _advance(display: Display, event: RolloutEvent) -> None:
    if event.group is not None or event.dropped is not None:
        display.advance()


async def run_rollout(config: RunConfig, *, tasks: int, split: str) -> None:
    """Collect groups of ``tasks`` tasks and write their trajectories as step 0 of ``runs/<name>-rollout``."""
    preflight.check(config)
    folder = config.runs_dir / f"{config.name}-rollout"
    display = Display(f"rollout {config.name}")
    with display:
        async with open_world(config, folder / "logs", display) as world:
            chosen = await _tasks(world.workshop.env, split, tasks)
            display.stage("rollout", total=len(chosen))
            rollout = await collect_groups(
                chosen,
                world.runner(RolloutSettings.from_config(config.rollout)),
                GroupSettings(config.rollout.group_size, retries=config.rollout.sandbox_retries, min_size=1),
                limiter=world.limiter,
                on_event=lambda event: _advance(display, event),
            )
            path = await asyncio.to_thread(write_trajectories, folder, 0, rollout.groups)
    for name, value in rollout_metrics(rollout).items():
        display.note(f"{name:<36} {value:.4g}")
    display.note(f"trajectories: {path}")
