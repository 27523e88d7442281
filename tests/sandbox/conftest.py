"""Fixtures of the conformance suite: every backend, and inspection of the host from outside the sandboxes."""

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
from sandbox.docker.client import EngineClient, connect
from sandbox.docker.lease import RUN_LABEL
from sandbox.ray.backend import open_cluster

WAIT_SECONDS = 20.0
# Runs use every backend through a pool; here only the cheapest backend has one.
CONTAINER_ENGINES = [
    pytest.param("docker", marks=pytest.mark.docker),
    pytest.param("podman", marks=pytest.mark.podman),
    pytest.param("docker with runsc", marks=[pytest.mark.docker, pytest.mark.exhaustive]),
]
REMOTE = pytest.param("remote", marks=pytest.mark.docker)
ON_HOSTS = " on hosts"
BUBBLEWRAP = [
    pytest.param("bubblewrap in a pool", marks=pytest.mark.bubblewrap),
    pytest.param(f"bubblewrap{ON_HOSTS}", marks=[pytest.mark.bubblewrap, pytest.mark.megatron]),
]
SLOW_CONTAINER_ENGINES = [
    CONTAINER_ENGINES[0],
    pytest.param("podman", marks=[pytest.mark.podman, pytest.mark.exhaustive]),
    CONTAINER_ENGINES[2],
]
slow_in_podman = pytest.mark.parametrize("engine", [*BUBBLEWRAP, *SLOW_CONTAINER_ENGINES, REMOTE], indirect=True)
"""Runs a test on every backend, in podman only when ``exhaustive`` tests are asked for."""


RUN = """
import asyncio, sys
from sandbox import SandboxSpec, open_backend

async def main(backend, run_id, marker, runtime=None):
    backend = open_backend(backend, run_id=run_id, runtime=runtime)
    sandboxes = [await backend.start(SandboxSpec()) for _ in range(2)]
    async with asyncio.TaskGroup() as group:
        group.create_task(sandboxes[0].exec(f"setsid -f sleep {marker}; sleep {marker}", timeout=600))
        print(*(sandbox.id for sandbox in sandboxes), flush=True)

asyncio.run(main(*sys.argv[1:]))
"""
"""The program of a run of two sandboxes that tests kill. Arguments: backend, run id, marker, runtime."""


@dataclass(frozen=True)
class Engine:
    """A backend under test. Tests share one instance and may open more."""

    name: str
    runtime: str | None = None
    pooled: bool = False
    on_hosts: bool = False

    @property
    def factory(self) -> str:
        """The name or path by which ``open_backend`` finds the backend."""
        return "support.remote_docker:open_remote" if self.name == "remote" else self.name

    async def open(self, run_id: str) -> SandboxBackend:
        if self.on_hosts:
            return await open_cluster(self.name, run_id=run_id, sandboxes_per_node=16)
        return open_backend(self.factory, run_id=run_id, runtime=self.runtime)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[None]:
    """A Ray cluster of two nodes on this machine, with a connection of this process.

    Not of package scope: in a directory without ``__init__.py`` that lasts until the session ends, and later tests
    would share this connection.
    """
    with ray_cluster(None, cpus=1), ray_node("second"):
        yield


@pytest.fixture(scope="module", params=[*BUBBLEWRAP, *CONTAINER_ENGINES, REMOTE])
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
    """A sandbox shared by the tests of a module; it must keep working whatever a test does."""
    sandbox = await backend.start(SandboxSpec(env={"FROM_SPEC": "spec"}, memory_mb=256, pids=64))
    yield sandbox
    await sandbox.close()


@pytest.fixture
def marker() -> str:
    """A unique argument of ``sleep``."""
    return f"{1000 + uuid.uuid4().int % 8000}.{uuid.uuid4().int % 10**9:09d}"


class Host:
    """Inspects the host from outside the sandboxes."""

    def processes(self, marker: str) -> int:
        """Return the number of processes with the argument ``marker`` in any namespace."""
        count = 0
        for directory in Path("/proc").iterdir():
            if directory.name.isdigit() and int(directory.name) != os.getpid():
                try:
                    arguments = (directory / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                count += marker.encode() in arguments
        return count

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until ``condition()`` is true; fail after 20 seconds."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"not within {WAIT_SECONDS:.0f} s: {what}"
            await asyncio.sleep(0.02)

    def sandbox_exists(self, backend: str, sandbox_id: str) -> bool:
        """Whether the container, directory or control groups of a sandbox exist on the machine."""
        if backend != "bubblewrap":
            api = connect(backend.removeprefix("remote "))
            try:
                return any(c["Id"].startswith(sandbox_id) for c in api.containers(all=True))
            finally:
                api.close()
        # os.walk ignores groups of other processes that disappear meanwhile; glob raises.
        groups = any(f"agent-rl-{sandbox_id}" in names for _, names, _ in os.walk("/sys/fs/cgroup"))
        directories = Path(tempfile.gettempdir()).glob(f"agent-rl-sandboxes-{os.getuid()}/*/sandboxes/{sandbox_id}")
        return groups or any(True for _ in directories)


class GVisorHost(Host):
    """Inspects gVisor sandboxes through the engine: their processes are not visible on the host."""

    def processes(self, marker: str) -> int:
        api = connect()
        try:
            sandboxes = [container["Id"] for container in api.containers(filters={"label": RUN_LABEL})]
            return sum(self._arguments(api, sandbox).count(marker.encode()) for sandbox in sandboxes)
        finally:
            api.close()

    def _arguments(self, api: EngineClient, sandbox: str) -> list[bytes]:
        """Return the arguments of all processes in the sandbox, or an empty list if it has ended."""
        command = ["sh", "-c", "cat /proc/[0-9]*/cmdline"]
        try:
            exec_id = api.exec_create(sandbox, command, user="65534", stderr=False)["Id"]
            return bytes(api.exec_start(exec_id)).split(b"\0")
        except docker.errors.APIError:
            return []


@pytest.fixture
def host(request: pytest.FixtureRequest) -> Host:
    gvisor = "engine" in request.fixturenames and request.getfixturevalue("engine").runtime is not None
    return GVisorHost() if gvisor else Host()
