"""``agent-rl rollout``: trajectories of some tasks, without training."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agent_rl.commands.policy import Policy, advance, pick_tasks
from agent_rl.controller.preflight import Checked
from agent_rl.controller.rollout_runtime import open_rollout_runtime
from agent_rl.controller.run_state import keep_tokenizer
from agent_rl.monitoring.console import Display
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.group import GroupSettings, Rollout, collect_groups
from agent_rl.rollout.group_grading import group_grading
from agent_rl.rollout.metrics import rollout_metrics
from agent_rl.rollout.records import write_trajectories
from agent_rl.utils.directory_lock import lock_directory


async def run_rollout(checked: Checked, *, tasks: int, split: str) -> None:
    """Roll out ``tasks`` tasks, ``group_size`` times each, into step 0 of ``runs/<name>-rollout``."""
    config = checked.config
    display, directory = Display(f"rollout {config.name}"), config.runs_dir / f"{config.name}-rollout"
    with display:
        rollout = await roll_out(checked, directory, display, tasks=tasks, split=split)
    for name, value in rollout_metrics(rollout).items():
        display.note(f"{name:<36} {value:.4g}")
    display.next("show", directory)


async def roll_out(checked: Checked, directory: Path, display: Display, *, tasks: int, split: str) -> Rollout:
    """Roll out ``tasks`` tasks with the config's model and write the trajectories as step 0 of ``directory``."""
    config = checked.config
    with lock_directory(directory):
        keep_tokenizer(config.model, directory)
        opening = open_rollout_runtime(checked, directory / "logs", display, routes=config.captures_routes, split=split)
        async with opening as runtime:
            rules = EpisodeRules.from_config(config)
            policy = Policy(runtime.task_runtime, runtime.runner(rules))
            chosen = await pick_tasks(policy, split, tasks)
            display.stage("rollout", total=len(chosen))
            rollout = await collect_groups(
                chosen,
                policy.run,
                GroupSettings(config.rollout.group_size, retries=config.rollout.sandbox_retries, min_size=1),
                limiter=runtime.limiter,
                on_event=lambda event: advance(display, event),
                grading=group_grading(runtime.task_runtime.env, rules),
            )
            path = await asyncio.to_thread(write_trajectories, directory, 0, rollout.groups)
    display.note(f"trajectories: {path}")
    return rollout
