"""Every backend for the conformance suite, and helpers that look at the host from outside the sandboxes."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker.errors
import pytest
import pytest_asyncio
from support.ray_nodes import ray_node

from agent_rl.train.ray_session import ray_cluster
from sandbox import (
    ImageMissingError,
    Sandbox,
    SandboxBackend,
    SandboxPool,
    SandboxSpec,
    SandboxUnavailableError,
    open_backend,
)
from sandbox.docker.engine import EngineClient, connect
from sandbox.docker.lease import RUN_LABEL
from sandbox.ray.open import open_cluster

WAIT_SECONDS = 20.0
# Runs reach every backend through a pool. The one here is in front of the backend whose sandboxes cost least.
CONTAINER_ENGINES = [
    pytest.param("docker", marks=pytest.mark.docker),
    pytest.param("podman"),
    pytest.param("docker with runsc", marks=[pytest.mark.docker, pytest.mark.exhaustive]),
]
ON_HOSTS = " on hosts"
BACKENDS = [
    pytest.param("bubblewrap in a pool", marks=pytest.mark.bubblewrap),
    pytest.param(f"bubblewrap{ON_HOSTS}", marks=[pytest.mark.bubblewrap, pytest.mark.megatron]),
    *CONTAINER_ENGINES,
]


@dataclass(frozen=True)
class Engine:
    """A kind of backend. Tests may open more of its kind beside the one that they share."""

    name: str
    runtime: str | None = None
    pooled: bool = False
    on_hosts: bool = False

    async def open(self, run_id: str) -> SandboxBackend:
        if self.on_hosts:
            return await open_cluster(self.name, run_id=run_id, sandboxes_per_node=16)
        return open_backend(self.name, run_id=run_id, runtime=self.runtime)


@pytest.fixture(scope="package")
def two_nodes() -> Iterator[None]:
    """A Ray of two nodes on this machine, which this process is connected to."""
    with ray_cluster(None, cpus=1), ray_node("second"):
        yield


@pytest.fixture(scope="module", params=BACKENDS)
def engine(request: pytest.FixtureRequest) -> Engine:
    name, _, runtime = str(request.param).partition(" with ")
    if name.endswith(ON_HOSTS):
        request.getfixturevalue("two_nodes")
        return Engine(name.removesuffix(ON_HOSTS), on_hosts=True)
    return Engine(name.removesuffix(" in a pool"), runtime or None, pooled=name.endswith(" in a pool"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(engine: Engine) -> AsyncIterator[SandboxBackend]:
    try:
        backend = await engine.open(f"test-{uuid.uuid4().hex[:8]}")
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    if engine.pooled:
        backend = SandboxPool(backend, max_starts=4, max_execs=16, prewarmed=2)
    try:
        await (await backend.start(SandboxSpec())).close()
    except ImageMissingError as error:
        await backend.close()
        pytest.skip(str(error))
    yield backend
    await backend.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox(backend: SandboxBackend) -> AsyncIterator[Sandbox]:
    """A sandbox that the tests of a module share: whatever one of them does, it must go on working."""
    sandbox = await backend.start(SandboxSpec(env={"FROM_SPEC": "spec"}, memory_mb=256, pids=64))
    yield sandbox
    await sandbox.close()


@pytest.fixture
def marker() -> str:
    """An argument of ``sleep`` that no other process on this machine has."""
    return f"{1000 + uuid.uuid4().int % 8000}.{uuid.uuid4().int % 10**9:09d}"


class Host:
    """Looks at the host from outside the sandboxes."""

    def processes(self, marker: str) -> int:
        """How many processes have ``marker`` among their arguments, whatever namespace they are in."""
        found = 0
        for directory in Path("/proc").iterdir():
            if directory.name.isdigit() and int(directory.name) != os.getpid():
                try:
                    arguments = (directory / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                found += marker.encode() in arguments
        return found

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until ``condition()`` is true; fail after some seconds."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"not within {WAIT_SECONDS:.0f} s: {what}"
            await asyncio.sleep(0.02)

    def sandbox_exists(self, backend: str, sandbox_id: str) -> bool:
        """Whether anything of a sandbox is left on the machine: its container, or its directory or control groups."""
        if backend != "bubblewrap":
            api = connect(backend)
            try:
                return any(c["Id"].startswith(sandbox_id) for c in api.containers(all=True))
            finally:
                api.close()
        # Not glob, which stumbles over groups of others' that go away under it.
        groups = any(f"agent-rl-{sandbox_id}" in names for _, names, _ in os.walk("/sys/fs/cgroup"))
        directories = Path(tempfile.gettempdir()).glob(f"agent-rl-sandboxes-{os.getuid()}/*/boxes/{sandbox_id}")
        return groups or any(True for _ in directories)


class GVisorHost(Host):
    """Looks into running sandboxes whose processes are none of the host's, by asking the engine."""

    def processes(self, marker: str) -> int:
        api = connect()
        try:
            sandboxes = [container["Id"] for container in api.containers(filters={"label": RUN_LABEL})]
            return sum(self._arguments(api, sandbox).count(marker.encode()) for sandbox in sandboxes)
        finally:
            api.close()

    def _arguments(self, api: EngineClient, sandbox: str) -> list[bytes]:
        """What the processes in the sandbox were called with; nothing where it ends meanwhile."""
        look = ["sh", "-c", "cat /proc/[0-9]*/cmdline"]
        try:
            return bytes(api.exec_start(api.exec_create(sandbox, look, user="65534", stderr=False)["Id"])).split(b"\0")
        except docker.errors.APIError:
            return []


@pytest.fixture
def host(request: pytest.FixtureRequest) -> Host:
    gvisor = "engine" in request.fixturenames and request.getfixturevalue("engine").runtime is not None
    return GVisorHost() if gvisor else Host()
