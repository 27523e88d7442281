"""Every backend for the conformance suite, and helpers that look at the host from outside the boxes."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from sandbox import (
    ImageMissingError,
    Sandbox,
    SandboxBackend,
    SandboxPool,
    SandboxSpec,
    SandboxUnavailableError,
    open_backend,
)
from sandbox.docker.engine import connect

WAIT_SECONDS = 20.0
# Runs reach every backend through a pool. The one here is in front of the backend whose boxes cost least.
BACKENDS = [
    pytest.param("bubblewrap in a pool", marks=pytest.mark.bubblewrap),
    pytest.param("docker", marks=pytest.mark.docker),
    pytest.param("podman"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=BACKENDS)
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[SandboxBackend]:
    name, _, pooled = request.param.partition(" in a ")
    try:
        backend = open_backend(name, run_id=f"test-{uuid.uuid4().hex[:8]}")
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    if pooled:
        backend = SandboxPool(backend, max_starts=4, max_execs=16, warm=2)
    try:
        await (await backend.start(SandboxSpec())).close()
    except ImageMissingError as error:
        await backend.close()
        pytest.skip(str(error))
    yield backend
    await backend.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(backend: SandboxBackend) -> AsyncIterator[Sandbox]:
    """A box that the tests of a module share: whatever one of them does, it must go on working."""
    box = await backend.start(SandboxSpec(env={"FROM_SPEC": "spec"}, memory_mb=256, pids=64))
    yield box
    await box.close()


@pytest.fixture
def marker() -> str:
    """An argument of ``sleep`` that no other process on this machine has."""
    return f"{1000 + uuid.uuid4().int % 8000}.{uuid.uuid4().int % 10**9:09d}"


class Host:
    """Looks at the host from outside the boxes."""

    def processes(self, marker: str) -> list[int]:
        """The host's processes with ``marker`` among their arguments, whatever namespace they are in."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != os.getpid():
                try:
                    arguments = (folder / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if marker.encode() in arguments:
                    found.append(int(folder.name))
        return found

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until ``condition()`` is true; fail after some seconds."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"not within {WAIT_SECONDS:.0f} s: {what}"
            await asyncio.sleep(0.02)

    def box_exists(self, backend: str, box_id: str) -> bool:
        """Whether anything of a box is left on the machine: its container, or its folder or control groups."""
        if backend != "bubblewrap":
            api = connect(backend)
            try:
                return any(c["Id"].startswith(box_id) for c in api.containers(all=True))
            finally:
                api.close()
        # Not glob, which stumbles over groups of others' that go away under it.
        groups = any(f"agent-rl-{box_id}" in names for _, names, _ in os.walk("/sys/fs/cgroup"))
        folders = Path(tempfile.gettempdir()).glob(f"agent-rl-boxes-{os.getuid()}/*/boxes/{box_id}")
        return groups or any(True for _ in folders)


@pytest.fixture
def host() -> Host:
    return Host()
