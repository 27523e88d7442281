"""Remote sandboxes: what becomes of one whose connection, agent or run fails, and what commands can do to the agent."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.remote_docker import SOCKET, DockerProvider, open_remote

from sandbox import (
    SandboxFileError,
    SandboxLostError,
    SandboxSpec,
    SandboxStartError,
    SandboxUnavailableError,
    open_backend,
)
from sandbox.remote.backend import RemoteBackend, agent_command
from sandbox.types import EXIT_DISK_LIMIT
from tests.redteam.attack import report_stopped

pytestmark = [pytest.mark.docker, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> AsyncIterator[RemoteBackend]:
    backend = open_remote(run_id="test-remote")
    yield backend
    await backend.close()


async def test_a_command_cannot_reach_the_agent(backend: RemoteBackend) -> None:
    sandbox = await backend.start(SandboxSpec())
    attacks = (
        "cat /proc/1/environ",
        "cat /proc/1/maps",
        "ls -l /proc/1/fd/",
        "echo 0 > /proc/1/oom_score_adj",
        f"python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect(\"{SOCKET}\")'",
        "kill -9 1",
        "python3 -c 'import os; os.setuid(65534)'",
        "su nobody -s /bin/sh -c true",
    )
    for attack in attacks:
        assert not (await sandbox.exec(attack, timeout=20)).ok, attack
    assert (await sandbox.exec("kill -9 -1; kill -STOP 1; true", timeout=20)).exit_code in (0, 137)
    for path in ("/proc/1/environ", "/proc/self/mem"):
        with pytest.raises(SandboxFileError):
            await sandbox.read_file(path)
        with pytest.raises(SandboxFileError):
            await sandbox.write_files({path: b"x"})
    assert (await sandbox.exec("echo alive", timeout=20)).stdout == b"alive\n"
    report_stopped("reading and ending the agent of a remote sandbox", f"{len(attacks)} attacks")
    await sandbox.close()


async def test_changed_programs_do_not_change_what_the_agent_reads(backend: RemoteBackend) -> None:
    sandbox = await backend.start(SandboxSpec())
    await sandbox.write_files({"kept": b"content"})
    poison = "echo 'raise SystemExit' > $(python3 -c 'import os; print(os.path.dirname(os.__file__))')/stat.py"
    assert (
        await sandbox.exec(f"{poison}; rm -f /bin/cat /usr/bin/cat /bin/ls; rm -rf /usr/lib/python3*", timeout=60)
    ).ok
    assert await sandbox.read_file("kept") == b"content"
    assert set(await sandbox.read_tree("/testbed")) == {"kept"}
    await sandbox.close()


async def test_a_sandbox_whose_connection_breaks_is_lost(backend: RemoteBackend) -> None:
    sandbox = await backend.start(SandboxSpec())
    _, instance = backend._sandboxes[sandbox.id]
    running = asyncio.ensure_future(sandbox.exec("sleep 600", timeout=700))
    await asyncio.sleep(0)  # the request is under way
    await instance.stream.close()
    with pytest.raises(SandboxLostError, match="connection"):
        await running
    with pytest.raises(SandboxLostError):
        await sandbox.read_file("x")
    await sandbox.close()


async def _running(provider: DockerProvider, container: str) -> bool:
    return bool((await asyncio.to_thread(provider.api.inspect_container, container))["State"]["Running"])


async def _until_ended(provider: DockerProvider, container: str) -> None:
    async with asyncio.timeout(30):
        await asyncio.to_thread(provider.api.wait, container)


async def test_an_instance_ends_with_its_connection_and_after_silence(backend: RemoteBackend) -> None:
    provider = DockerProvider("test-silence")
    silent = await provider.start(SandboxSpec(), [*agent_command(SOCKET)[:-1], "1.0"])
    await _until_ended(provider, silent.id)
    left = await provider.start(SandboxSpec(), agent_command(SOCKET))
    assert await _running(provider, left.id)
    await left.stream.close()
    await _until_ended(provider, left.id)
    for instance in (silent, left):
        await instance.end()
    await provider.close()


async def test_only_the_token_opens_the_connection(backend: RemoteBackend) -> None:
    provider = DockerProvider("test-token")
    instance = await provider.start(SandboxSpec(), agent_command(SOCKET), guess="0" * 32)
    with pytest.raises((EOFError, OSError)):
        await asyncio.wait_for(instance.stream.read(1), 30)
    await instance.end()
    await provider.close()


@pytest.mark.parametrize(
    "grow",
    ["head -c 80M /dev/zero > /var/big; sleep 60", "cd /tmp; for i in $(seq 300); do mkdir d; cd d; done; sleep 60"],
    ids=["bytes", "depth"],
)
async def test_a_sandbox_beyond_its_disk_limit_is_ended(backend: RemoteBackend, grow: str) -> None:
    sandbox = await backend.start(SandboxSpec(disk_mb=40))
    ended = await sandbox.exec(grow, timeout=60)
    assert ended.exit_code == EXIT_DISK_LIMIT
    assert b"sandbox.disk_mb" in ended.stderr
    assert (await sandbox.exec("true", timeout=20)).exit_code == EXIT_DISK_LIMIT
    with pytest.raises(SandboxFileError, match="limit"):
        await sandbox.read_file("x")
    await sandbox.close()


async def test_an_image_without_python_is_a_failed_start(backend: RemoteBackend, monkeypatch: Any) -> None:
    monkeypatch.setattr("sandbox.remote.backend.agent_command", lambda address: ["sh", "-c", "exit 1"])
    with pytest.raises((SandboxStartError, TimeoutError)):
        await backend.start(SandboxSpec())


async def test_modal_without_its_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modal", None)
    with pytest.raises(SandboxUnavailableError, match=r"pip install 'agent-rl\[modal\]'"):
        open_backend("modal", run_id="x")
