"""The doctor's look at the parts a config names: model, engine, sandbox, disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agent_rl.config import RunConfig
from agent_rl.config.loader import load_config
from agent_rl.controller import preflight
from agent_rl.controller.placement import EngineNode, engines_on_ray, find_placement, open_ray
from agent_rl.controller.sandboxes import open_sandboxes, sandbox_limits
from agent_rl.engine.factory import open_engine
from agent_rl.engine.launch import sglang_version
from agent_rl.engine.ray_actor import Answer
from agent_rl.engine.ray_servers import look_at_hosts
from agent_rl.errors import AgentRlError
from agent_rl.models.spec import read_model_spec
from agent_rl.monitoring.console import cell
from envs import EnvsError, needs_sandboxes
from sandbox import SandboxBackend, SandboxError
from sandbox.ray.backend import ClusterBackend, Place

_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Check:
    """One part: whether it is as it should be, and what was found."""

    name: str
    ok: bool
    detail: str


async def check_installation() -> bool:
    """Look at the parts that a run on this machine takes and print them; True if nothing is missing."""
    checks = await check_parts(load_config(Path("quickstart"), ["sandbox.backend=auto"]))
    Console().print(checks_table(checks))
    return all(check.ok for check in checks)


def checks_table(checks: Sequence[Check]) -> Table:
    """The parts, a row each, for a terminal."""
    table = Table("part", "", "found")
    for check in checks:
        table.add_row(check.name, "ok" if check.ok else "WRONG", cell(check.detail))
    return table


async def check_parts(config: RunConfig) -> list[Check]:
    """Look at every part; a part that is wrong keeps none of the others from being looked at."""
    return [
        await _check("model", lambda: _model(config)),
        *await check_engines_of(config),
        await _check("trainer", _trainer),
        *await check_sandboxes(config),
        await _check("disk", lambda: _disk(config)),
    ]


async def _check(name: str, look: Callable[[], Awaitable[str]]) -> Check:
    try:
        return Check(name, True, await look())
    except (AgentRlError, SandboxError) as error:
        return Check(name, False, str(error))


async def _model(config: RunConfig) -> str:
    preflight.check_model(config.model)
    facts = read_model_spec(config.model)
    experts = f"{facts.num_experts} experts, top-{facts.top_k}" if facts.num_experts else "dense"
    return f"{config.model}: {facts.num_layers} layers, {experts}"


async def check_engines_of(config: RunConfig) -> list[Check]:
    """The engine of this machine, the running ones, or on a cluster the room for them and every machine they may run
    on."""
    if not engines_on_ray(config):
        return [await _check("engine", lambda: _engine(config))]
    try:
        async with open_ray(config):
            lacking, nodes = await find_placement(config)
            found = await look_at_hosts(config.engine, config.model, [node.id for node in nodes])
    except AgentRlError as error:
        return [Check("engine", False, str(error))]
    room = Check("engine", lacking is None, lacking or f"room for {config.engine.count} on {len(nodes)} machines")
    return [room, *(_engine_host(node, answer) for node, answer in zip(nodes, found, strict=True))]


def _engine_host(node: EngineNode, answer: Answer) -> Check:
    return Check(f"engine on {node.name}", not answer.fault, answer.fault or f"SGLang {answer.text}, {node.has}")


async def _engine(config: RunConfig) -> str:
    if not config.engine.launched:
        return await _running(config)
    found = await asyncio.to_thread(sglang_version, config.engine.python)
    return f"SGLang {found} in {config.engine.python}"


async def _running(config: RunConfig) -> str:
    facts, routes = read_model_spec(config.model), config.wants_routes
    opening = open_engine(config.engine, config.model, facts, config.runs_dir, routes=routes, publishing=True)
    async with opening as engine:
        found = [await engine.info(url) for url in engine.urls]
    return ", ".join(f"{info.url}: {info.model}, {info.dtype}" for info in found)


async def _trainer() -> str:
    preflight.check_trainer()
    return ", ".join(f"{name} {version(name)}" for name in preflight.TRAINER_PACKAGES)


async def check_sandboxes(config: RunConfig) -> list[Check]:
    """The sandbox of this machine, or of each host; with several hosts also whether they have the same image."""
    try:
        if not needs_sandboxes(config.env.name):
            return [Check("sandbox", True, f"environment {config.env.name} starts no sandbox")]
        async with open_sandboxes(config, lambda line: None) as backend:
            if not isinstance(backend, ClusterBackend):
                return [await _check("sandbox", lambda: _used_sandbox(config, backend))]
            checks = [
                await _check(f"sandbox on {place.host.host_name}", partial(_host, config, backend, place))
                for place in backend.places
            ]
            return [*checks, await _check("sandbox image", lambda: _image(config, backend))]
    except (AgentRlError, EnvsError, SandboxError) as error:
        return [Check("sandbox", False, str(error))]


async def _used_sandbox(config: RunConfig, backend: SandboxBackend) -> str:
    """Start a sandbox of the config's image, run a command in it, close it."""
    started = time.perf_counter()
    sandbox = await backend.start(sandbox_limits(config.sandbox))
    try:
        result = await sandbox.exec("python3 --version && git --version", timeout=_SECONDS)
    finally:
        await sandbox.close()
    seconds = time.perf_counter() - started
    if not result.ok:
        raise SandboxError(f"python3 and git do not run in a sandbox: {result.text.strip()[-200:]}")
    versions = ", ".join(result.text.split("\n")[:2])
    runtime = f" with runtime {config.sandbox.runtime}" if config.sandbox.runtime else ""
    return f"{backend.name}{runtime}: {versions}; started, used and closed in {seconds:.2f} s"


async def _host(config: RunConfig, cluster: ClusterBackend, place: Place) -> str:
    """A sandbox used on one host, and what the host says of itself."""
    report, wanted = await cluster.report(place), config.sandbox.disk_mb << 20
    used = await _used_sandbox(config, place.backend)
    if report.free_bytes is None:
        return f"{used}; {report.limits}, {report.cpus} CPUs"
    if report.free_bytes < wanted:
        raise SandboxError(
            f"{report.free_bytes >> 20} MiB free on the disk of its sandboxes, of which each may take sandbox.disk_mb="
            f"{config.sandbox.disk_mb}: free some room, or lower it"
        )
    return f"{used}; {report.limits}, {report.cpus} CPUs, {report.free_bytes >> 30} GiB free"


async def _image(config: RunConfig, cluster: ClusterBackend) -> str:
    image = sandbox_limits(config.sandbox).image
    ids = await cluster.image_ids(image)
    return f"{image}: {', '.join(sorted(set(ids.values())))} on {len(ids)} of {len(cluster.places)} hosts"


async def _disk(config: RunConfig) -> str:
    preflight.check_room(config.runs_dir)
    return f"{config.runs_dir}: more than {preflight.FREE_BYTES_WANTED >> 20} MiB free"
