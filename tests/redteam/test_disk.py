"""Attacks of one sandbox on the disk that it shares with its neighbours."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

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
from sandbox.docker.disk import Written
from sandbox.docker.engine import connect
from sandbox.docker.sandbox import DockerSandbox
from sandbox.types import OVERGROWN
from tests.envs.images import SYSTEM, directory_image
from tests.redteam.attack import held

pytestmark = [pytest.mark.redteam]

BACKENDS = [
    pytest.param("bubblewrap", marks=pytest.mark.bubblewrap),
    pytest.param("docker", marks=pytest.mark.docker),
    pytest.param("podman"),
]
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
HONEST = "head -c 5000000 /dev/zero > a; for i in $(seq 99); do ln a a$i; done; truncate -s 900M hole; sleep 2; echo on"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes are measured every half second: these tests have many to wait for."""
    monkeypatch.setattr("sandbox.disk_watch._EVERY", 0.5)


@pytest.fixture(params=BACKENDS)
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[SandboxBackend]:
    async with used_backend_of(request.param) as backend:
        yield backend


@pytest.mark.parametrize("growth", GROWTHS)
async def test_a_sandbox_that_grows_is_ended_and_named(backend: SandboxBackend, growth: str) -> None:
    sandbox, neighbour = await backend.start(SMALL), await backend.start(SMALL)
    assert isinstance(sandbox, BaseSandbox)
    result = await sandbox.exec(GROWTHS[growth], timeout=50)
    assert result.exit_code == OVERGROWN
    assert sandbox.id in result.text
    assert result.seconds < 40
    taken = await sandbox._used()
    assert taken is None or taken.bytes < 20 << 20, "what the sandbox took is given back at once"
    again = await sandbox.exec("echo on", timeout=20)
    assert (again.exit_code, again.stdout) == (OVERGROWN, b"")
    with pytest.raises(SandboxFileError, match="grew to"):
        await sandbox.read_file("big")
    assert (await neighbour.exec("echo on", timeout=20)).stdout == b"on\n"
    held(f"filling the disk of {backend.name} with {growth}", result.text.strip())


async def test_what_is_no_growth_is_left_alone(backend: SandboxBackend) -> None:
    """Names of one file count once, holes not at all."""
    sandbox = await backend.start(SMALL)
    assert (await sandbox.exec(HONEST, timeout=50)).stdout == b"on\n"


ENGINES = [pytest.param("docker", marks=pytest.mark.docker), pytest.param("podman")]


@pytest.mark.parametrize("backend", ENGINES, indirect=True)
async def test_an_engine_whose_directories_can_not_be_read_is_asked(backend: SandboxBackend) -> None:
    sandbox = await backend.start(SMALL)
    assert isinstance(sandbox, DockerSandbox)
    sandbox._written = Written((), by_engine=True)
    result = await sandbox.exec(GROWTHS["one large file"], timeout=50)
    assert result.exit_code == OVERGROWN
    held(f"filling the disk of {backend.name}, which is elsewhere", result.text.strip())


@pytest.mark.parametrize("backend", ENGINES, indirect=True)
async def test_an_image_that_declares_a_volume_is_no_way_out(backend: SandboxBackend) -> None:
    api = connect(backend.name)
    base = api.create_container(DEFAULT_IMAGE, ["true"], host_config=api.create_host_config(network_mode="none"))
    try:
        api.commit(base, "redteam-volume", "1", changes=["VOLUME /var/tmp"])
        sandbox = await backend.start(replace(SMALL, image="redteam-volume:1"))
        result = await sandbox.exec("head -c 40000000 /dev/zero > /var/tmp/big; sleep 60", timeout=50)
        await sandbox.close()
        assert result.exit_code == OVERGROWN
        held(f"filling a volume of {backend.name}", result.text.strip())
    finally:
        api.remove_container(base, force=True)
        api.remove_image("redteam-volume:1", force=True)
        api.close()


@pytest.mark.bubblewrap
async def test_what_an_image_brings_along_is_no_growth(tmp_path: Path) -> None:
    image = directory_image(tmp_path / "images/image", {}, "head -c 40000000 /dev/zero > big")
    backend = BubblewrapBackend(run_id="redteam-image", images=ImagePolicy(root=tmp_path / "images"))
    try:
        sandbox = await backend.start(replace(SMALL, image=str(image), ro_binds=SYSTEM))
        assert (await sandbox.exec("sleep 2; echo on", timeout=50)).stdout == b"on\n"
        await sandbox.exec("cp big more; sleep 2", timeout=50)
        assert (await sandbox.exec("echo on", timeout=50)).exit_code == OVERGROWN
    finally:
        await backend.close()


async def test_short_commands_that_grow_little_by_little(backend: SandboxBackend) -> None:
    sandbox = await backend.start(SMALL)
    for number in range(400):
        result = await sandbox.exec(f"head -c 4000000 /dev/zero > {number % 8}; sleep 0.1", timeout=20)
        if not result.ok:
            break
    assert result.exit_code == OVERGROWN
    held("growing by many short commands", result.text.strip())


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
@pytest.mark.parametrize(
    "growth", ["head -c 100000000 /dev/zero > big", "for i in $(seq 5000); do : > $i || exit 1; done"]
)
async def test_a_full_disk_is_the_doing_of_the_sandbox_that_grew(small_disk: Path, growth: str) -> None:
    """Faster than any timer: its own failure is its own, and its neighbour goes on."""
    backend = BubblewrapBackend(run_id="redteam-full", base=small_disk)
    try:
        greedy, neighbour = await backend.start(SMALL), await backend.start(SMALL)
        result = await greedy.exec(growth, timeout=50)
        assert result.exit_code == OVERGROWN
        assert (await neighbour.exec("for i in $(seq 100); do : > $i || exit 1; done", timeout=20)).ok
    finally:
        await backend.close()
    held("filling the disk at once", result.text.strip())


@pytest.mark.bubblewrap
async def test_a_neighbour_on_a_disk_without_inodes_is_not_blamed(small_disk: Path) -> None:
    backend = BubblewrapBackend(run_id="redteam-inodes", base=small_disk)
    try:
        greedy, neighbour = await backend.start(SandboxSpec()), await backend.start(SandboxSpec())
        with pytest.raises(SandboxDiskFullError, match="inodes free"):
            await greedy.exec("for i in $(seq 5000); do : > $i || exit 1; done", timeout=50)
        with pytest.raises(SandboxDiskFullError, match="inodes free") as error:
            await neighbour.exec(": > a", timeout=20)
    finally:
        await backend.close()
    held("using up the inodes within a limit that is larger than the disk", error.value)


async def test_an_agent_that_fills_its_sandbox_gets_no_reward_and_no_retry(backend: SandboxBackend) -> None:
    old, new = {"calc.py": "a = 1\n"}, {"calc.py": "a = 2\n"}
    record = SweRecord(
        repo_name="calc",
        task_id="calc-a",
        expected_output_json='{"t.py::test_a": "PASSED"}',
        problem_statement="a is 1.",
        files=old,
        test_command="true",
        gold_patch=diff_files(old, new),
    )
    async with start_episode(EnvContext(backend, limits=SMALL), record) as episode:
        assert (await episode.sandbox.exec(GROWTHS["one large file"], timeout=50)).exit_code == OVERGROWN
        grade = await episode.grade()
    assert (grade.reward, grade.resolved) == (0.0, False)
    held("filling the own sandbox before the grading", grade.suspected_hack or grade.log)
