"""Attacks of one sandbox on the disk that it shares with other sandboxes."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.contexts import used_backend_of

from envs import EnvContext
from envs.swe import SweRecord, diff_files, start_episode
from sandbox import (
    ImagePolicy,
    SandboxBackend,
    SandboxDiskFullError,
    SandboxFileError,
    SandboxSpec,
)
from sandbox.base import BaseSandbox
from sandbox.bubblewrap.backend import BubblewrapBackend
from sandbox.docker.backend import DEFAULT_IMAGE
from sandbox.docker.client import WritableDirectories, connect
from sandbox.docker.sandbox import DockerSandbox
from sandbox.types import EXIT_DISK_LIMIT
from tests.envs.images import SYSTEM, directory_image
from tests.redteam.attack import report_stopped
from tools import ToolCall

pytestmark = [pytest.mark.redteam]

BUBBLEWRAP = pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)
DOCKER = pytest.param("docker", marks=pytest.mark.docker)
PODMAN = pytest.param("podman", marks=[pytest.mark.podman, pytest.mark.exhaustive])
SMALL = SandboxSpec(disk_mb=20, inodes=500)
GROWTHS = {
    "one large file": "head -c 40000000 /dev/zero > big; sleep 60",
    "many small files": "mkdir d; for i in $(seq 600); do : > d/$i; done; sleep 60",
    "links without end": "for i in $(seq 600); do ln -s x $i; done; sleep 60",
    "files below more directories than a path is long": (
        "for i in $(seq 300); do mkdir -p aaaaaaaaaaaaaaaaaaaaaaaaaaaa && cd -P aaaaaaaaaaaaaaaaaaaaaaaaaaaa; done; "
        "head -c 40000000 /dev/zero > big; sleep 60"
    ),
    "in its home and /tmp": "head -c 15000000 /dev/zero > ~/a; head -c 15000000 /dev/zero > /tmp/b; sleep 60",
}
FAST_GROWTHS = ("head -c 100000000 /dev/zero > big", "for i in $(seq 5000); do : > $i || exit 1; done")
HONEST = "head -c 5000000 /dev/zero > a; for i in $(seq 99); do ln a a$i; done; truncate -s 900M hole; sleep 2; echo on"

OLD, NEW = {"calc.py": "a = 1\n"}, {"calc.py": "a = 2\n"}
CALC = SweRecord(
    repo_name="calc",
    task_id="calc-a",
    expected_output_json='{"t.py::test_a": "PASSED"}',
    problem_statement="a is 1.",
    files=OLD,
    test_command="true",
    gold_patch=diff_files(OLD, NEW),
)


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure every 0.5 s to shorten the tests."""
    monkeypatch.setattr("sandbox.disk._EVERY", 0.5)


@pytest.fixture(params=[BUBBLEWRAP, DOCKER, PODMAN])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[SandboxBackend]:
    async with used_backend_of(request.param) as backend:
        yield backend


def growths() -> list[Any]:
    """Every growth on every backend; the ordinary suite has all on bubblewrap and those that an engine decides on."""
    ordinary = {"docker": ("one large file", "files below more directories than a path is long")}
    ordinary["podman"] = ordinary["docker"][:1]
    engines = [
        pytest.param(
            engine,
            name,
            marks=[getattr(pytest.mark, engine), *([] if name in ordinary[engine] else [pytest.mark.exhaustive])],
        )
        for engine in ordinary
        for name in GROWTHS
    ]
    return [*(pytest.param("bubblewrap", name, marks=pytest.mark.bubblewrap) for name in GROWTHS), *engines]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "growth"), growths(), indirect=["backend"])
async def test_a_sandbox_that_grows_is_ended_and_named(backend: SandboxBackend, growth: str) -> None:
    sandbox, neighbour = await backend.start(SMALL), await backend.start(SMALL)
    assert isinstance(sandbox, BaseSandbox)
    result = await sandbox.exec(GROWTHS[growth], timeout=50)
    assert result.exit_code == EXIT_DISK_LIMIT
    assert sandbox.id in result.text
    assert result.seconds < 40
    taken = await sandbox._measure_disk()
    assert taken is None or taken.bytes < 20 << 20, "the files are removed at once"
    again = await sandbox.exec("echo on", timeout=20)
    assert (again.exit_code, again.stdout) == (EXIT_DISK_LIMIT, b"")
    with pytest.raises(SandboxFileError, match="grew to"):
        await sandbox.read_file("big")
    assert (await neighbour.exec("echo on", timeout=20)).stdout == b"on\n"
    report_stopped(f"filling the disk of {backend.name} with {growth}", result.text.strip())


@pytest.mark.slow
async def test_hard_links_and_holes_do_not_count(backend: SandboxBackend) -> None:
    """Hard links count once, holes not at all."""
    sandbox = await backend.start(SMALL)
    assert (await sandbox.exec(HONEST, timeout=50)).stdout == b"on\n"


@pytest.mark.slow
@pytest.mark.parametrize("backend", [DOCKER, PODMAN], indirect=True)
async def test_unreadable_engine_directories_are_measured_by_the_engine(backend: SandboxBackend) -> None:
    sandbox = await backend.start(SMALL)
    assert isinstance(sandbox, DockerSandbox)
    sandbox._writable = WritableDirectories((), layer_missing=True)
    result = await sandbox.exec(GROWTHS["one large file"], timeout=50)
    assert result.exit_code == EXIT_DISK_LIMIT
    report_stopped(f"filling the disk of {backend.name}, which is elsewhere", result.text.strip())


@pytest.mark.slow
@pytest.mark.parametrize("backend", [DOCKER, PODMAN], indirect=True)
async def test_volumes_of_an_image_count(backend: SandboxBackend) -> None:
    api = connect(backend.name)
    base = api.create_container(DEFAULT_IMAGE, ["true"], host_config=api.create_host_config(network_mode="none"))
    try:
        api.commit(base, "redteam-volume", "1", changes=["VOLUME /var/tmp"])
        sandbox = await backend.start(replace(SMALL, image="redteam-volume:1"))
        result = await sandbox.exec("head -c 40000000 /dev/zero > /var/tmp/big; sleep 60", timeout=50)
        await sandbox.close()
        assert result.exit_code == EXIT_DISK_LIMIT
        report_stopped(f"filling a volume of {backend.name}", result.text.strip())
    finally:
        api.remove_container(base, force=True)
        api.remove_image("redteam-volume:1", force=True)
        api.close()


@pytest.mark.bubblewrap
@pytest.mark.slow
async def test_files_of_the_image_do_not_count(tmp_path: Path) -> None:
    image = directory_image(tmp_path / "images/image", {}, "head -c 40000000 /dev/zero > big")
    backend = BubblewrapBackend(run_id="redteam-image", images=ImagePolicy(root=tmp_path / "images"))
    try:
        sandbox = await backend.start(replace(SMALL, image=str(image), ro_binds=SYSTEM))
        assert (await sandbox.exec("sleep 2; echo on", timeout=50)).stdout == b"on\n"
        await sandbox.exec("cp big more; sleep 2", timeout=50)
        assert (await sandbox.exec("echo on", timeout=50)).exit_code == EXIT_DISK_LIMIT
    finally:
        await backend.close()


@pytest.mark.slow
async def test_growth_by_many_short_commands_is_ended(backend: SandboxBackend) -> None:
    sandbox = await backend.start(SMALL)
    for number in range(400):
        result = await sandbox.exec(f"head -c 4000000 /dev/zero > {number % 8}; sleep 0.1", timeout=20)
        if not result.ok:
            break
    assert result.exit_code == EXIT_DISK_LIMIT
    report_stopped("growing by many short commands", result.text.strip())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m,nr_inodes=4000,mode=0700", "none", disk]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small disk can't be mounted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.bubblewrap
@pytest.mark.parametrize("growth", FAST_GROWTHS)
async def test_a_full_disk_is_charged_to_the_sandbox_that_filled_it(small_disk: Path, growth: str) -> None:
    """Faster than the timer: only its own command fails, and its neighbour continues."""
    backend = BubblewrapBackend(run_id="redteam-full", base=small_disk)
    try:
        greedy, neighbour = await backend.start(SMALL), await backend.start(SMALL)
        result = await greedy.exec(growth, timeout=50)
        assert result.exit_code == EXIT_DISK_LIMIT
        assert (await neighbour.exec("for i in $(seq 100); do : > $i || exit 1; done", timeout=20)).ok
    finally:
        await backend.close()
    report_stopped("filling the disk at once", result.text.strip())


@pytest.mark.bubblewrap
@pytest.mark.parametrize("growth", FAST_GROWTHS)
async def test_growth_within_the_limits_that_fills_the_disk_is_ended(small_disk: Path, growth: str) -> None:
    """The limits are larger than the disk: the neighbour's failure is infrastructure, the greedy one's is not."""
    backend = BubblewrapBackend(run_id="redteam-within", base=small_disk)
    try:
        greedy, neighbour = await backend.start(SandboxSpec()), await backend.start(SandboxSpec())
        assert (await greedy.exec(f"({growth}) || true", timeout=50)).ok
        with pytest.raises(SandboxDiskFullError, match="free on its disk"):
            await neighbour.exec("false", timeout=20)
        with pytest.raises(SandboxDiskFullError, match="free on its disk"):
            await neighbour.write_files({"a": b"1"})
        result = await greedy.exec("false", timeout=20)
        assert result.exit_code == EXIT_DISK_LIMIT
        assert (await neighbour.exec("for i in $(seq 100); do : > $i || exit 1; done", timeout=20)).ok
    finally:
        await backend.close()
    report_stopped(f"filling the disk within its limits: {growth}", result.text.strip())


@pytest.mark.bubblewrap
@pytest.mark.parametrize("growth", [*FAST_GROWTHS, "head -c 51M /dev/zero > big"])
async def test_an_agent_that_fills_the_disk_within_its_limits_gets_no_reward_and_no_retry(
    small_disk: Path, growth: str
) -> None:
    """The last growth leaves enough space for the agent's commands but not for the grading sandbox."""
    backend = BubblewrapBackend(run_id="redteam-reward", base=small_disk)
    try:
        async with start_episode(EnvContext(backend), CALC) as episode:
            await episode.tools.call(ToolCall("execute_bash", {"cmd": growth}))
            await episode.tools.call(ToolCall("execute_bash", {"cmd": "false"}))
            grade = await episode.grade()
    finally:
        await backend.close()
    assert (grade.reward, grade.resolved) == (0.0, False)
    report_stopped(f"turning a loss into infrastructure by a full disk: {growth}", grade.suspected_hack or grade.log)


@pytest.mark.slow
async def test_an_agent_that_fills_its_sandbox_gets_no_reward_and_no_retry(backend: SandboxBackend) -> None:
    async with start_episode(EnvContext(backend, limits=SMALL), CALC) as episode:
        assert (await episode.sandbox.exec(GROWTHS["one large file"], timeout=50)).exit_code == EXIT_DISK_LIMIT
        grade = await episode.grade()
    assert (grade.reward, grade.resolved) == (0.0, False)
    report_stopped("filling the own sandbox before the grading", grade.suspected_hack or grade.log)
