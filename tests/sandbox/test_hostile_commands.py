"""Commands and paths that try to turn an episode into an infrastructure failure, or to write beyond the limits."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
from support.contexts import context_of, used_backend_of

from envs.swe import start_episode
from sandbox import SandboxBackend, SandboxFileError, SandboxSpec
from sandbox.files import TreeCollector
from sandbox.types import TreeLimits
from tests.redteam.attack import report_stopped
from tests.redteam.test_damage import LOCAL, MINI
from tools import ToolCall

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
SIGNALS = ("HUP", "INT", "QUIT", "ABRT", "SEGV", "USR1", "PIPE", "TERM", "XCPU", "KILL")
PIECES = (
    *("f() { f | f & }; f", "for i in $(seq 90); do setsid sleep 99 & done", "head -c 20M /dev/zero > b$RANDOM"),
    *("python3 -c 'x = bytearray(1 << 30)'", "head -c 1G /dev/zero | tail -c 1", "head -c 200M /dev/zero > /dev/shm/x"),
    *("for i in $(seq 300); do : > $RANDOM; done", "for i in $(seq 200); do mkdir -p d && cd d; done", "cd; rm -rf *"),
    *("chmod -R 000 . /tmp", "chmod 700 .", "rm -rf .git *", "mkfifo p .git/x calc.py", "ln -sf / l; ln -sf l l2"),
    *("kill -SIGNAL -1", "kill -SIGNAL $PPID", "for p in /proc/[0-9]*; do kill -SIGNAL ${p#/proc/}; done"),
    *(
        "head -c 400000 /dev/urandom",
        "head -c 400000 /dev/urandom >&2",
        "exec >&-",
        "exec 2>&- <&-",
        "ulimit -f 0 -n 4",
    ),
    *(
        "exit CODE",
        "exec 3>x; rm x; head -c 9M /dev/zero >&3",
        "while read x; do :; done",
        "sleep 3 & disown",
        "kill -STOP $$",
    ),
    *(
        "truncate -s 900M calc.py",
        "export PATH= LD_PRELOAD=/x",
        "trap 'sleep 9' EXIT TERM",
        "mv /testbed /t; ln -s /t /testbed",
    ),
    *(
        "git config core.fsmonitor 'kill -9 -1'",
        "echo x > .git/HEAD",
        "rm -rf /tmp/*",
        "printf '\\000agent-rl end\\000'",
    ),
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


def commands(seed: int) -> list[str]:
    pick = random.Random(seed)
    lines = []
    for _ in range(pick.randint(1, 3)):
        pieces = pick.choices(PIECES, k=pick.randint(1, 4))
        separator = pick.choice(("; ", " & ", " && ", " || ", " | ", "\n"))
        lines.append(
            separator.join(
                p.replace("SIGNAL", pick.choice(SIGNALS)).replace("CODE", str(pick.randint(0, 255))) for p in pieces
            )
        )
    return lines


async def fuzz(backend: str, count: int) -> None:
    """Play ``count`` episodes; any exception would be an infrastructure failure."""
    async with context_of(backend, LIMITS, tool_timeout=1.0, grade_timeout=20.0, start_retries=0) as context:
        for seed in range(count):
            async with start_episode(context, (LOCAL, MINI)[seed % 2]) as episode:
                for command in commands(seed):
                    await episode.tools.call(ToolCall("execute_bash", {"cmd": command}))
                await episode.tools.call(ToolCall("file_editor", {"command": "view", "path": PATHS[seed % len(PATHS)]}))
                grade = await episode.grade()
            assert (grade.reward, grade.resolved) == (0.0, False), commands(seed)
    report_stopped(f"{count} fuzzed episodes on {backend}", "reward 0 each, no infrastructure failure")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("backend", "count"),
    [
        pytest.param("bubblewrap", 60, marks=pytest.mark.bubblewrap),
        pytest.param("docker", 10, marks=pytest.mark.docker),
    ],
)
async def test_no_fuzzed_episode_is_an_infrastructure_failure(backend: str, count: int) -> None:
    await fuzz(backend, count)


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("backend", "count"),
    [
        pytest.param("bubblewrap", 4000, marks=pytest.mark.bubblewrap),
        pytest.param("docker", 700, marks=pytest.mark.docker),
        pytest.param("podman", 300, marks=pytest.mark.podman),
    ],
)
async def test_none_of_5000_fuzzed_episodes_is_an_infrastructure_failure(backend: str, count: int) -> None:
    await fuzz(backend, count)
