"""Leases in a real engine and in real directories: heartbeats of invisible owners, and the reap command."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox import SandboxSpec, lease
from sandbox.bubblewrap.backend import BubblewrapBackend, reap_dirs
from sandbox.bubblewrap.run_dir import RunDirectory, dir_leases
from sandbox.docker import lease as dockerlease
from sandbox.docker.backend import DockerBackend, reap_containers
from sandbox.docker.client import connect
from sandbox.lease import EXPIRY_SECONDS, Owner
from tests.sandbox.conftest import RUN

pytestmark = pytest.mark.timeout(120)


def unseen() -> Owner:
    """An owner in another process-id namespace."""
    return replace(Owner.current(f"unseen-{uuid.uuid4().hex[:8]}"), pid=1 << 30, pid_namespace="pid:[1]")


def test_a_run_directory_is_removed_after_its_heartbeat_stopped(tmp_path: Path) -> None:
    owner = unseen()
    directory = RunDirectory.make(tmp_path, owner, None)
    (directory.path / "sandboxes" / "one").mkdir()
    silent = time.time() - EXPIRY_SECONDS - 5
    os.utime(directory.path / "owner.json", (silent, silent))
    directory.beat()
    assert reap_dirs(tmp_path) == 0, "its heartbeat is recent"
    os.utime(directory.path / "owner.json", (silent, silent))
    (found,) = dir_leases(tmp_path)
    assert (found.owner, found.sandboxes, found.dead) == (owner, ("one",), True)
    assert reap_dirs(tmp_path) == 1
    assert not directory.path.exists()


@pytest.mark.bubblewrap
async def test_an_open_backend_renews_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease.Heartbeat.__init__, "__defaults__", (0.01,))
    backend = BubblewrapBackend(run_id="beats", base=tmp_path / "base")
    (file,) = (tmp_path / "base").glob("*/owner.json")
    os.utime(file, (0, 0))
    deadline = time.monotonic() + 20
    while file.stat().st_mtime == 0:
        assert time.monotonic() < deadline, "no heartbeat"
        time.sleep(0.005)  # noqa: ASYNC251  (a busy event loop, through which heartbeats go on)
    await backend.close()
    assert not file.exists()


@pytest.mark.docker
async def test_containers_are_removed_after_their_heartbeat_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, api = unseen(), connect()
    monkeypatch.setattr(Owner, "current", lambda run_id: owner)
    backend = DockerBackend(run_id="ignored")
    sandbox = await backend.start(SandboxSpec())
    backend._heartbeat.stop()

    def mine() -> list[lease.Lease]:
        return [found for found in dockerlease.engine_leases(api, "docker") if found.owner == owner]

    (found,) = mine()
    assert [name[:12] for name in found.sandboxes] == [sandbox.id]
    assert (-2 < found.silence_seconds < 60, found.dead) == (True, False)
    before = backend._lease._volume
    backend._lease.renew()
    volumes = [volume["Name"] for volume in dockerlease._list_volumes(api) if dockerlease._parse_owner(volume) == owner]
    assert volumes == [backend._lease._volume] != [before], "a new beat replaces the last one"
    monkeypatch.setattr(lease, "EXPIRY_SECONDS", -10)  # all that can't be seen has been silent for too long
    assert reap_containers(api, "docker") >= 1
    assert mine() == []
    await backend.close()
    api.close()


@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("bubblewrap", "docker")]
)
def test_reap_command_removes_only_dead_runs(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marker: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run_id = f"command-{uuid.uuid4().hex[:8]}"

    def reap(*arguments: str) -> str:
        command = [sys.executable, "-m", "sandbox.reap", "--backend", backend, *arguments]
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
        return "".join(line for line in lines if run_id in line)

    # In an engine, which all runs of the machine share, another one's start may be the first to reap.
    reaped_by_another = ("",) if backend != "bubblewrap" else ()
    run = subprocess.Popen([sys.executable, "-c", RUN, backend, run_id, marker], stdout=subprocess.PIPE)
    try:
        assert len(run.stdout.readline().split()) == 2
        assert reap() == f"{backend}: run {run_id}, 2 sandbox(es), alive"
        run.kill()
        run.wait()
        dead = f"{backend}: run {run_id}, 2 sandbox(es), dead: its process has ended"
        assert reap("--list") in (dead, *reaped_by_another)
        assert reap() in (f"{dead}; removed 2", *reaped_by_another)
        assert reap() == ""
    finally:
        run.kill()
        run.wait()


def test_an_unusable_backend_option_is_one_line(tmp_path: Path) -> None:
    environment = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    command = [sys.executable, "-m", "sandbox.reap"]
    explicit = subprocess.run([*command, "--backend", "docker"], env=environment, capture_output=True, text=True)
    assert explicit.returncode == 2
    assert "no container engine responds" in explicit.stderr
    assert explicit.stderr.count("\n") == 1
    assert subprocess.run([*command, "--list"], env=environment, capture_output=True).returncode == 0
