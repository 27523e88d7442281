"""Opens the config's sandbox backend: on this machine, or on all nodes of a Ray cluster, with limits per node."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

from agent_rl.config import RunConfig, SandboxConfig
from agent_rl.controller.cluster_resources import ClusterRequest
from agent_rl.controller.placement import open_ray
from envs import needs_sandbox
from sandbox import ImagePolicy, NullBackend, SandboxBackend, SandboxPool, SandboxSpec, open_backend
from sandbox.ray.backend import ClusterBackend, open_cluster


@asynccontextmanager
async def open_sandboxes(
    run: RunConfig, cluster: ClusterRequest, note: Callable[[str], None]
) -> AsyncIterator[SandboxBackend]:
    """The sandbox backend of ``run``; the null backend where its environment starts no sandboxes. ``note`` gets a line
    for every node that is lost.

    Raises SandboxUnavailableError where this machine or a node lacks it, UserError where Ray does not respond.
    """
    async with AsyncExitStack() as stack:
        backend: SandboxBackend
        config, images = run.sandbox, _images(run)
        if not any(needs_sandbox(source.env) for source in run.environments.values()):
            backend = NullBackend()
        elif config.placement == "ray":
            await stack.enter_async_context(open_ray(cluster))
            backend = await _open_on_nodes(config, images, note)
        else:
            backend = _open_local(config, images)
        stack.push_async_callback(backend.close)
        yield backend


async def _open_on_nodes(config: SandboxConfig, images: ImagePolicy, note: Callable[[str], None]) -> ClusterBackend:
    return await open_cluster(
        config.backend,
        run_id=_run_id(),
        images=images,
        runtime=config.runtime,
        sandboxes_per_node=config.sandboxes_per_node,
        pool=lambda backend: _pool(backend, config),
        on_note=note,
    )


def sandbox_limits(config: SandboxConfig) -> SandboxSpec:
    """The template of every sandbox: the config's image, memory, processes, CPUs and disk."""
    limits = SandboxSpec(
        memory_mb=config.memory_mb, pids=config.pids, cpus=config.cpus, disk_mb=config.disk_mb, inodes=config.inodes
    )
    return limits if config.image is None else replace(limits, image=config.image)


def _open_local(config: SandboxConfig, images: ImagePolicy) -> SandboxBackend:
    backend = open_backend(config.backend, run_id=_run_id(), images=images, runtime=config.runtime)
    return _pool(backend, config)


def _pool(backend: SandboxBackend, config: SandboxConfig) -> SandboxPool:
    """Limits the sandboxes of one node to the config's numbers."""
    return SandboxPool(backend, max_starts=config.max_starts, max_execs=config.max_execs, prewarmed=config.prewarmed)


def _images(run: RunConfig) -> ImagePolicy:
    """The policy of images. Private are the directory of runs, and what the environment's options name (its tasks)."""
    config = run.sandbox
    options = chain.from_iterable(source.options.values() for source in run.environments.values())
    named = [Path(value) for value in options if isinstance(value, str)]
    root = None if config.image_root is None else config.image_root.absolute()
    return ImagePolicy(
        pull=config.pull,
        budget_gb=config.image_budget_gb,
        root=root,
        configured=config.image,
        private=tuple(path.absolute() for path in (run.runs_dir, *named)),
    )


def _run_id() -> str:
    return uuid.uuid4().hex[:12]
