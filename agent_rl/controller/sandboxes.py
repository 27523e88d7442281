"""Where sandboxes are, by the config: on this machine, or on all hosts of a Ray cluster; within the limits of each."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from agent_rl.config import RunConfig, SandboxConfig
from agent_rl.controller.placement import open_ray
from envs import needs_sandboxes
from sandbox import ImagePolicy, NullBackend, SandboxBackend, SandboxPool, SandboxSpec, open_backend
from sandbox.ray.backend import ClusterBackend
from sandbox.ray.open import open_cluster


@asynccontextmanager
async def open_sandboxes(config: RunConfig, tell: Callable[[str], None]) -> AsyncIterator[SandboxBackend]:
    """The config's sandbox backend; none where its environment starts no sandboxes. ``tell`` is given a line for
    every host that is lost.

    Raises SandboxUnavailableError where this machine or a host lacks it, UserError where no Ray answers.
    """
    async with AsyncExitStack() as stack:
        backend: SandboxBackend
        if not needs_sandboxes(config.env.name):
            backend = NullBackend()
        elif config.sandbox.placement == "ray":
            await stack.enter_async_context(open_ray(config))
            backend = await _on_hosts(config.sandbox, tell)
        else:
            backend = _local(config.sandbox)
        stack.push_async_callback(backend.close)
        yield backend


async def _on_hosts(config: SandboxConfig, tell: Callable[[str], None]) -> ClusterBackend:
    return await open_cluster(
        config.backend,
        run_id=_run_id(),
        images=_images(config),
        runtime=config.runtime,
        sandboxes_per_node=config.sandboxes_per_node,
        pool=lambda host: _pool(host, config),
        tell=tell,
    )


def sandbox_limits(config: SandboxConfig) -> SandboxSpec:
    """The template of every sandbox: the config's image, memory, processes, CPUs and disk."""
    limits = SandboxSpec(
        memory_mb=config.memory_mb,
        pids=config.pids,
        cpus=config.cpus,
        disk_mb=config.disk_mb,
        inodes=config.inodes,
    )
    return limits if config.image is None else replace(limits, image=config.image)


def _local(config: SandboxConfig) -> SandboxBackend:
    backend = open_backend(config.backend, run_id=_run_id(), images=_images(config), runtime=config.runtime)
    return _pool(backend, config)


def _pool(backend: SandboxBackend, config: SandboxConfig) -> SandboxPool:
    """One machine's sandboxes, as many at once as the config allows on one."""
    return SandboxPool(backend, max_starts=config.max_starts, max_execs=config.max_execs, prewarmed=config.prewarmed)


def _images(config: SandboxConfig) -> ImagePolicy:
    root = None if config.image_root is None else config.image_root.absolute()
    return ImagePolicy(pull=config.pull, budget_gb=config.image_budget_gb, root=root, own=config.image)


def _run_id() -> str:
    return uuid.uuid4().hex[:12]
