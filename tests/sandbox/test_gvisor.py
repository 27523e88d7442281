"""Behavior of docker sandboxes under gVisor that differs from other runtimes; the conformance suite covers the rest."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from support.contexts import used_backend_of

from sandbox import (
    SandboxBackend,
    SandboxFileError,
    SandboxLostError,
    SandboxSpec,
    SandboxUnavailableError,
    open_backend,
)
from sandbox.docker.client import EngineClient
from sandbox.docker.sandbox import DockerSandbox
from sandbox.types import EXIT_DISK_LIMIT

about = EngineClient.info

pytestmark = [pytest.mark.docker, pytest.mark.timeout(120)]

BOMB = """
import os, time
while True:
    if os.fork() == 0:
        time.sleep(60)
"""


@pytest.fixture
async def backend() -> AsyncIterator[SandboxBackend]:
    async with used_backend_of("docker", runtime="runsc") as backend:
        yield backend


async def test_a_sandbox_has_a_kernel_of_its_own_and_works(backend: SandboxBackend) -> None:
    sandbox = await backend.start(SandboxSpec(env={"A": "a"}))
    assert "Starting gVisor" in (await sandbox.exec("dmesg", timeout=20)).text
    result = await sandbox.exec("echo $A; cat; echo err >&2; exit 3", timeout=20, stdin=b"given\n")
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"a\ngiven\n", b"err\n")
    await sandbox.write_files({"d/x": b"written"})
    assert (await sandbox.exec("cat d/x; echo more >> d/x; mkfifo pipe", timeout=20)).stdout == b"written"
    assert await sandbox.read_file("d/x") == b"writtenmore\n"
    assert (await sandbox.read_tree("."))["d/x"].data == b"writtenmore\n"
    with pytest.raises(SandboxFileError):
        await sandbox.read_file("pipe")
    status = (await sandbox.exec("cat /proc/self/status", timeout=20)).text
    assert {line.split()[1] for line in status.splitlines() if line.startswith("Cap")} == {"0" * 16}


async def test_what_a_command_leaves_ends_with_it(backend: SandboxBackend) -> None:
    sandbox = await backend.start(SandboxSpec())
    result = await sandbox.exec("trap '' TERM; setsid -f sleep 1234; echo started; sleep 1234; sleep 1234", timeout=2)
    assert (result.timed_out, result.exit_code, result.stdout) == (True, -9, b"started\n")
    assert (await sandbox.exec("setsid -f sleep 1234; kill -9 -1; echo not reached", timeout=20)).exit_code == 137
    left = await sandbox.exec("kill -9 1; cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout=20)
    assert "1234" not in left.text
    cut = asyncio.create_task(sandbox.exec("sleep 1234", timeout=60))
    await asyncio.sleep(1)
    cut.cancel()
    await asyncio.wait({cut})
    assert (await sandbox.exec("rm /bin/sh; echo alive", timeout=20)).stdout == b"alive\n"
    assert b"were changed" in (await sandbox.exec("true", timeout=20)).stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize(("hog", "memory"), [(BOMB, False), ("bytearray(1 << 30).count(1)", True)])
async def test_a_sandbox_that_runs_into_a_limit_ends_by_its_own_doing(
    backend: SandboxBackend, hog: str, memory: bool
) -> None:
    """Its kernel dies too. This is the result of the command and of all later ones, not an infrastructure failure.

    The engine keeps the connection of a command open after its container has ended; the command ends all the same.
    """
    sandbox, neighbour = await backend.start(SandboxSpec(memory_mb=256, pids=64)), await backend.start(SandboxSpec())
    result = await sandbox.exec(["python3", "-c", hog], timeout=60 if memory else 3)
    assert not result.ok
    assert not memory or (result.exit_code, result.oom_killed, result.seconds < 30) == (137, True, True), result
    after = await sandbox.exec("echo alive", timeout=20)
    assert after.ok or after.exit_code == 137
    assert not memory or after.oom_killed
    assert (await neighbour.exec("echo alive", timeout=20)).stdout == b"alive\n"


async def test_an_oom_kill_that_the_engine_misses_is_found_in_the_kernel_log(
    backend: SandboxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine drops the event if the sandbox's control group is removed first."""
    inspect = EngineClient.inspect_container

    def unaware(api: EngineClient, container: str) -> dict[str, Any]:
        info: dict[str, Any] = inspect(api, container)
        return {**info, "State": {**info["State"], "OOMKilled": False}}

    monkeypatch.setattr(EngineClient, "inspect_container", unaware)
    sandbox, neighbour = await backend.start(SandboxSpec(memory_mb=256)), await backend.start(SandboxSpec())
    await asyncio.wait(
        [asyncio.ensure_future(sandbox.exec(["python3", "-c", "bytearray(1 << 30).count(1)"], timeout=3))]
    )
    if os.access("/dev/kmsg", os.R_OK):
        assert (await sandbox.exec("echo alive", timeout=20)).oom_killed
    else:
        with pytest.raises(SandboxLostError):
            await sandbox.exec("echo alive", timeout=20)
    killed = cast(DockerSandbox, neighbour)
    await asyncio.to_thread(killed._api.kill, killed._container)
    with pytest.raises(SandboxLostError):
        await neighbour.exec("echo alive", timeout=20)


@pytest.mark.exhaustive
async def test_no_process_escapes_by_forking(backend: SandboxBackend) -> None:
    """gVisor's ``kill -9 -1`` misses processes that are being forked."""
    for _ in range(3):
        sandbox = await backend.start(SandboxSpec(memory_mb=256, pids=64))
        await sandbox.exec("bomb() { bomb | bomb & }; bomb; sleep 30", timeout=1.5)
        assert (await sandbox.exec("echo alive", timeout=20)).stdout == b"alive\n"
        await sandbox.close()


async def test_a_runtime_that_would_not_see_written_files_is_refused(
    backend: SandboxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"runsc": {"path": "runsc", "runtimeArgs": ["--network=none"]}}
    monkeypatch.setattr(EngineClient, "info", lambda api: {**about(api), "Runtimes": known})
    with pytest.raises(SandboxUnavailableError, match="--file-access=shared"):
        open_backend("docker", run_id="gvisor", runtime="runsc")


@pytest.mark.exhaustive
async def test_a_sandbox_that_grows_is_ended(backend: SandboxBackend) -> None:
    sandbox = await backend.start(SandboxSpec(disk_mb=20))
    assert (await sandbox.exec("head -c 40000000 /dev/zero > big; sleep 60", timeout=50)).exit_code == EXIT_DISK_LIMIT
