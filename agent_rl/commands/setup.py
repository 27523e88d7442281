"""``agent-rl setup``: what a config needs and is not there yet. Each step is announced, or skipped with a word."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

from agent_rl.config import RunConfig
from agent_rl.controller.preflight import check_room
from agent_rl.controller.rollout_runtime import open_task_runtime
from agent_rl.monitoring.console import Display
from envs import needs_sandboxes
from sandbox import open_backend
from sandbox.base_image import ENGINES, build_image
from sandbox.docker.backend import DEFAULT_IMAGE


async def prepare(config: RunConfig) -> None:
    """Make the sandbox image and the verified tasks."""
    check_room(config.runs_dir)
    display = Display("setup")
    with display:
        await _image(config, display)
        async with open_task_runtime(config, display) as task_runtime:
            display.stage("tasks: making and verifying those that are not cached")
            await task_runtime.env.prepare("train", config.eval.split)
            counts = ", ".join(
                f"{len(task_runtime.env.tasks(split))} {split}" for split in ("train", config.eval.split)
            )
            display.fact("tasks", counts)


async def warm_up(out: Path, shape: str, seed: int) -> None:
    """Make a starting model of ``shape`` from scratch: demonstrations in real sandboxes, then supervised training."""
    from agent_rl.demo_model.warmup import WARMUPS, make_model

    display = Display("model init")
    backend = open_backend("auto", run_id=f"warmup-{os.getpid()}")
    try:
        await make_model(out, replace(WARMUPS[shape], seed=seed), backend, display.note)
    finally:
        await backend.close()


async def _image(config: RunConfig, display: Display) -> None:
    """Build the base image where the backend is a container engine that lacks it; other backends need none."""
    if not needs_sandboxes(config.env.name):
        display.fact("sandbox image", f"environment {config.env.name} starts no sandbox")
        return
    if config.sandbox.placement == "ray":
        display.fact("sandbox image", "each host needs its own: `agent-rl doctor` says which lack it")
        return
    backend = open_backend(config.sandbox.backend, run_id="setup")
    await backend.close()
    if backend.name not in ENGINES:
        display.fact("sandbox image", f"{backend.name} needs none")
    elif config.sandbox.image is not None:
        display.fact("sandbox image", f"{config.sandbox.image}, as configured")
    else:
        await asyncio.to_thread(build_image, DEFAULT_IMAGE, engine=backend.name)
