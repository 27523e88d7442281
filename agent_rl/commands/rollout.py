"""``agent-rl rollout``: trajectories of some tasks, without training."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agent_rl.commands.policy import Policy, advance, pick_tasks
from agent_rl.config import RunConfig
from agent_rl.controller import preflight
from agent_rl.controller.rollout_runtime import open_world
from agent_rl.controller.state import keep_tokenizer
from agent_rl.monitoring.console import Display
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.group import GroupSettings, Rollout, collect_groups
from agent_rl.rollout.metrics import rollout_metrics
from agent_rl.rollout.records import write_trajectories
from agent_rl.utils.folder_lock import hold_folder


async def run_rollout(config: RunConfig, *, tasks: int, split: str) -> None:
    """Collect groups of ``tasks`` tasks and write their trajectories as step 0 of ``runs/<name>-rollout``."""
    display, folder = Display(f"rollout {config.name}"), config.runs_dir / f"{config.name}-rollout"
    with display:
        rollout = await roll_out(config, folder, display, tasks=tasks, split=split)
    for name, value in rollout_metrics(rollout).items():
        display.note(f"{name:<36} {value:.4g}")
    display.next("show", folder)


async def roll_out(config: RunConfig, folder: Path, display: Display, *, tasks: int, split: str) -> Rollout:
    """Collect groups of ``tasks`` tasks with the config's model; write their trajectories as step 0 of ``folder``."""
    facts = preflight.check(config)
    preflight.check_replay(config, facts)
    with hold_folder(folder):
        keep_tokenizer(config.model, folder)
        async with open_world(config, facts, folder / "logs", display, routes=config.wants_routes) as world:
            policy = Policy(world.workshop, world.runner(EpisodeRules.of(config)))
            chosen = await pick_tasks(policy, split, tasks)
            display.stage("rollout", total=len(chosen))
            rollout = await collect_groups(
                chosen,
                policy.run,
                GroupSettings(config.rollout.group_size, retries=config.rollout.sandbox_retries, min_size=1),
                limiter=world.limiter,
                on_event=lambda event: advance(display, event),
            )
            path = await asyncio.to_thread(write_trajectories, folder, 0, rollout.groups)
    display.note(f"trajectories: {path}")
    return rollout
