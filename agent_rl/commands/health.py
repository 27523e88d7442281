"""``agent-rl doctor``: checks of the parts that a config names: model, engine, trainer, sandbox, disk."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agent_rl.commands.gpu_checks import GPU_CHECKS, needs_gpus
from agent_rl.config import RunConfig, SandboxConfig
from agent_rl.config.loader import load_config
from agent_rl.controller import preflight
from agent_rl.controller.cluster_resources import ClusterRequest
from agent_rl.controller.placement import EngineNode, find_placement, open_ray
from agent_rl.controller.sandboxes import open_sandboxes, sandbox_limits
from agent_rl.engine.factory import open_engine
from agent_rl.engine.launch import sglang_version
from agent_rl.engine.ray_actor import CallResult
from agent_rl.engine.ray_servers import check_nodes
from agent_rl.errors import AgentRlError, ConfigError, UserError
from agent_rl.models.spec import read_model_spec
from agent_rl.monitoring.console import cell
from agent_rl.planner.plan import gib
from agent_rl.planner.planner import plan_once
from agent_rl.train.ray_session import check_ray, requires_token
from envs import EnvsError, needs_sandbox
from sandbox import SandboxBackend, SandboxError
from sandbox.disk import free_bytes
from sandbox.ray.backend import ClusterBackend, SandboxNode

_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Check:
    """The result for one part: whether it works, and a line of detail."""

    name: str
    ok: bool
    detail: str


async def check_installation() -> bool:
    """Check and print the parts that a run on this machine needs; True if nothing is missing."""
    checks = await check_parts(load_config(Path("quickstart"), ["sandbox.backend=auto"]))
    Console().print(checks_table(checks))
    return all(check.ok for check in checks)


def checks_table(checks: Sequence[Check]) -> Table:
    """The checks as a table for a terminal, one row each."""
    table = Table("part", "", "found")
    for check in checks:
        table.add_row(check.name, "ok" if check.ok else "WRONG", cell(check.detail))
    return table


async def check_parts(config: RunConfig) -> list[Check]:
    """Check every part; one that is wrong does not keep the others from being checked."""
    return [
        await _check("model", lambda: _check_model(config.model)),
        *await check_engines_of(config),
        await _check("trainer", _check_trainer),
        *await _check_gpus(config),
        *([await _check("ray", partial(_check_cluster, address))] if (address := config.train.ray_address) else ()),
        *await check_sandboxes(config),
        await _check("disk", lambda: check_disk(config)),
    ]


async def _check(name: str, check: Callable[[], Awaitable[str]]) -> Check:
    try:
        return Check(name, True, await check())
    except (AgentRlError, SandboxError) as error:
        return Check(name, False, str(error))


async def _check_gpus(config: RunConfig) -> list[Check]:
    """What the config's GPUs on this machine need; nothing for a config without them."""
    checks = GPU_CHECKS if needs_gpus(config) else {}
    return [await _check(name, partial(asyncio.to_thread, check, config)) for name, check in checks.items()]


async def _check_model(model: Path) -> str:
    preflight.check_model(model)
    model_spec = read_model_spec(model)
    experts = f"{model_spec.num_experts} experts, top-{model_spec.top_k}" if model_spec.num_experts else "dense"
    return f"{model}: {model_spec.num_layers} layers, {experts}"


async def check_engines_of(config: RunConfig) -> list[Check]:
    """Check SGLang on this machine, or the running engines, or on a cluster its resources and every node that engines
    may run on."""
    cluster, engine = ClusterRequest.of(config), config.engine
    if not cluster.engines:
        check = (lambda: _check_local_engine(engine.python)) if engine.launched else (lambda: _check_running(config))
        return [await _check("engine", check)]
    try:
        async with open_ray(cluster):
            shortage, nodes = await find_placement(cluster)
            answers = await check_nodes(engine, config.model, [node.id for node in nodes])
    except AgentRlError as error:
        return [Check("engine", False, str(error))]
    placement = Check("engine", shortage is None, shortage or f"enough for {engine.count} on {len(nodes)} nodes")
    return [placement, *(_engine_node(node, answer) for node, answer in zip(nodes, answers, strict=True))]


async def _check_cluster(address: str) -> str:
    await check_ray(address)
    if not requires_token():
        raise ConfigError(
            f"{address} needs no token: whoever reaches it runs code on every node; start Ray with RAY_AUTH_MODE=token "
            "and a token on every node, and set both in this shell"
        )
    return f"{address}, with a token"


def _engine_node(node: EngineNode, answer: CallResult) -> Check:
    return Check(f"engine on {node.name}", not answer.error, answer.error or f"SGLang {answer.text}, {node.resources}")


async def _check_local_engine(python: str) -> str:
    return f"SGLang {await asyncio.to_thread(sglang_version, python)} in {python}"


async def _check_running(config: RunConfig) -> str:
    model_spec, routes, masks = read_model_spec(config.model), config.captures_routes, config.rollout.truncated
    opening = open_engine(
        config.engine, config.model, model_spec, config.runs_dir, routes=routes, masks=masks, publishing=True
    )
    async with opening as engine:
        infos = [await engine.info(url) for url in engine.urls]
    return ", ".join(f"{info.url}: {info.model}, {info.dtype}" for info in infos)


async def _check_trainer() -> str:
    preflight.check_trainer()
    return ", ".join(f"{name} {version(name)}" for name in preflight.TRAINER_PACKAGES)


async def check_sandboxes(config: RunConfig) -> list[Check]:
    """Check the sandbox of this machine, or of each node; with several nodes also that they have the same image."""
    sandbox, names = config.sandbox, sorted({source.env for source in config.environments.values()})
    try:
        if not any(map(needs_sandbox, names)):
            return [Check("sandbox", True, f"{', '.join(names)}: starts no sandbox")]
        async with open_sandboxes(config, ClusterRequest.of(config), lambda line: None) as backend:
            if not isinstance(backend, ClusterBackend):
                return [await _check("sandbox", lambda: _check_local_sandbox(config, backend))]
            checks = [
                await _check(f"sandbox on {node.remote.node_name}", partial(_check_node, config, backend, node))
                for node in backend.nodes
            ]
            return [*checks, await _check("sandbox image", lambda: _check_image(sandbox, backend))]
    except (AgentRlError, EnvsError, SandboxError) as error:
        return [Check("sandbox", False, str(error))]


async def _use_sandbox(config: SandboxConfig, backend: SandboxBackend) -> str:
    """Start a sandbox of the config's image, run a command in it, close it."""
    started = time.perf_counter()
    sandbox = await backend.start(sandbox_limits(config))
    try:
        result = await sandbox.exec("python3 --version && git --version", timeout=_SECONDS)
    finally:
        await sandbox.close()
    seconds = time.perf_counter() - started
    if not result.ok:
        raise SandboxError(f"python3 and git do not run in a sandbox: {result.text.strip()[-200:]}")
    versions = ", ".join(result.text.split("\n")[:2])
    runtime = f" with runtime {config.runtime}" if config.runtime else ""
    return f"{backend.name}{runtime}: {versions}; started, used and closed in {seconds:.2f} s"


async def _check_local_sandbox(config: RunConfig, backend: SandboxBackend) -> str:
    """Use a sandbox of this machine; check the space for all of them."""
    used = await _use_sandbox(config.sandbox, backend)
    free = free_bytes(getattr(backend, "disk", None))
    check_sandbox_space(config, config.rollout.concurrency, free)
    return used


async def _check_node(config: RunConfig, cluster: ClusterBackend, node: SandboxNode) -> str:
    """Use a sandbox on one node; return its description and the node's resources."""
    report = await cluster.report(node)
    used = await _use_sandbox(config.sandbox, node.backend)
    check_sandbox_space(config, min(config.sandbox.sandboxes_per_node, config.rollout.concurrency), report.free_bytes)
    free = "" if report.free_bytes is None else f", {report.free_bytes >> 30} GiB free"
    return f"{used}; {report.limits}, {report.cpus} CPUs{free}"


def check_sandbox_space(config: RunConfig, sandboxes: int, free: int | None) -> None:
    """Raise ``SandboxError`` if ``sandboxes`` that fill their ``sandbox.disk_mb`` need more than ``free`` bytes."""
    needed = sandboxes * config.sandbox.disk_mb << 20
    if free is not None and free < needed:
        raise SandboxError(
            f"{sandboxes} sandboxes of sandbox.disk_mb={config.sandbox.disk_mb} may take {needed >> 20} MiB, and "
            f"{free >> 20} MiB are free on their disk: lower sandbox.disk_mb or rollout.concurrency, or use a larger "
            "disk (TMPDIR, or the container engine's directory)"
        )


async def _check_image(config: SandboxConfig, cluster: ClusterBackend) -> str:
    image = sandbox_limits(config).image
    ids = await cluster.image_ids(image)
    return f"{image}: {', '.join(sorted(set(ids.values())))} on {len(ids)} of {len(cluster.nodes)} nodes"


async def check_disk(config: RunConfig) -> str:
    free = preflight.check_disk_space(config.runs_dir)
    found, disk = f"{config.runs_dir}: {gib(free)} free", None
    with contextlib.suppress(UserError):  # an unknown model has no plan, and a row of its own
        disk = plan_once(config).resource("disk of runs_dir")
    if disk is None:
        return found
    if disk.total > free:
        raise ConfigError(f"{found}, the plan needs up to {gib(disk.total)}; `agent-rl plan` lists its parts")
    return f"{found}, the plan needs up to {gib(disk.total)}"
