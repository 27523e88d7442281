"""``agent-rl setup``: makes what a config needs: the sandbox image and the verified tasks. Prints each step."""

from __future__ import annotations

import asyncio

from agent_rl.config import RunConfig
from agent_rl.controller.preflight import check_disk_space
from agent_rl.controller.rollout_runtime import open_task_runtime
from agent_rl.monitoring.console import Display
from envs import needs_sandbox
from sandbox import open_backend
from sandbox.base_image import ENGINES, build_image
from sandbox.docker.backend import DEFAULT_IMAGE


async def prepare(config: RunConfig) -> None:
    """Build the sandbox image, and make and verify the tasks, where they are missing."""
    check_disk_space(config.runs_dir)
    display = Display("setup")
    with display:
        await ensure_image(config, display)
        async with open_task_runtime(config, display) as task_runtime:
            display.stage("tasks: making and verifying those that are not cached")
            await task_runtime.env.prepare("train", config.eval.split)
            sizes = ", ".join(f"{len(task_runtime.env.tasks(split))} {split}" for split in ("train", config.eval.split))
            display.fact("tasks", sizes)


async def ensure_image(run: RunConfig, display: Display) -> None:
    """Build the base image where the backend is a container engine that lacks it; other backends need none."""
    config = run.sandbox
    if not any(needs_sandbox(source.env) for source in run.environments.values()):
        display.fact("sandbox image", "the environment starts no sandbox")
        return
    if config.placement == "ray":
        display.fact("sandbox image", "each node needs its own: `agent-rl doctor` says which lack it")
        return
    backend = open_backend(config.backend, run_id="setup")
    await backend.close()
    if backend.name not in ENGINES:
        display.fact("sandbox image", f"{backend.name} needs none")
    elif config.image is not None:
        display.fact("sandbox image", f"{config.image}, as configured")
    else:
        await asyncio.to_thread(build_image, DEFAULT_IMAGE, engine=backend.name)
