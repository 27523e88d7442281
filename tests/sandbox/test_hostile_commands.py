"""Commands and paths that try to turn an episode into an infrastructure failure, or to write beyond the limits."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.contexts import used_backend_of

from sandbox import SandboxBackend, SandboxFileError, SandboxSpec
from sandbox.files import TreeCollector
from sandbox.types import TreeLimits
from tests.redteam.attack import report_stopped
from tests.redteam.fuzz import SIGNALS

BUBBLEWRAP = pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)
DOCKER = pytest.param("docker", marks=pytest.mark.docker)
PODMAN = pytest.param("podman", marks=[pytest.mark.podman, pytest.mark.exhaustive])
pytestmark = [pytest.mark.redteam, pytest.mark.slow]
LIMITS = SandboxSpec(memory_mb=256, pids=64, disk_mb=128, inodes=2000, output_limit_bytes=200_000)
PATHS = (
    "a\ud800",
    "a/" * 5000,
    "n" * 300,
    "f/No such container: x",
    "f/no such container",
    "l/No space left on device",
)


@pytest.fixture(params=[BUBBLEWRAP, DOCKER, PODMAN])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[SandboxBackend]:
    async with used_backend_of(request.param) as backend:
        yield backend


async def test_paths_and_arguments_never_lose_the_sandbox(backend: SandboxBackend) -> None:
    sandbox = await backend.start(LIMITS)
    assert (await sandbox.exec("echo x > f; ln -s /nowhere l; ln -s /proc/self/pagemap p", timeout=20)).ok
    for path in (*PATHS, "p", "/proc/self/pagemap", "/dev/zero"):
        with pytest.raises(SandboxFileError) as error:
            await sandbox.read_file(path)
        assert len(str(error.value)) < 20_000
    for path in PATHS[2:]:
        with pytest.raises(SandboxFileError):
            await sandbox.write_files({path: b"1"})
    for command in ("x" * 200_000, "echo \ud800"):
        assert (await sandbox.exec(command, timeout=20)).exit_code == 126
    assert (await sandbox.exec("echo alive", timeout=20)).stdout == b"alive\n"
    report_stopped(f"losing a sandbox of {backend.name} by paths and arguments", error.value)


async def test_signals_to_every_process_end_only_the_command(backend: SandboxBackend) -> None:
    sandbox = await backend.start(LIMITS)
    for signal in SIGNALS:
        for target in ("-1", "$(cd /proc && echo [0-9]*)"):
            await sandbox.exec(f"kill -{signal} {target}; sleep 0.1", timeout=4)
    assert (await sandbox.exec("echo alive", timeout=20)).stdout == b"alive\n"
    report_stopped(f"ending the shell around a command of {backend.name}", f"{len(SIGNALS)} signals")


@pytest.mark.parametrize("backend", [DOCKER, PODMAN], indirect=True)
async def test_files_of_the_engine_cannot_be_written(backend: SandboxBackend) -> None:
    sandbox = await backend.start(LIMITS)
    mounted = "grep -v -e tmpfs -e '^overlay' /proc/mounts | cut -d' ' -f2"
    command = f'for f in $({mounted}); do if [ -f "$f" ] && echo x >> "$f"; then echo "wrote $f"; fi; done 2>/dev/null'
    assert (await sandbox.exec(command, timeout=20)).stdout == b""
    assert b"sandbox" in (await sandbox.exec("cat /etc/hostname", timeout=20)).stdout
    assert b"host.containers" not in (await sandbox.exec("cat /etc/hosts", timeout=20)).stdout
    report_stopped(f"filling the disk of {backend.name} through its own files", "they are read-only")


class Endless:
    def read(self, size: int, /) -> bytes:
        return bytes(size)


def test_comparing_sparse_files_with_known_ones_is_limited() -> None:
    tree = TreeCollector("/testbed", TreeLimits(compared_bytes=5 << 20), {"a": "0" * 40, "b": "0" * 40})
    tree.read("a", 0o100644, 3 << 20, Endless())
    with pytest.raises(SandboxFileError, match="more than the 5242880 bytes"):
        tree.read("b", 0o100644, 900 << 20, Endless())
