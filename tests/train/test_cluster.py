"""Ray addresses are checked; a local Ray has few processes, and none outlives its owner."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_rl.config import RunConfig, TrainConfig
from agent_rl.errors import TrainerError, UserError
from agent_rl.train.ray_session import check_ray, ray_session
from agent_rl.train.ray_trainer import RayTrainer

OWNER = """
import os
import sys
import ray
from agent_rl.train.ray_session import ray_cluster

@ray.remote(num_cpus=1)
class Rank:
    def niceness(self):
        return os.nice(0)

with ray_cluster(None, cpus=1):
    with ray_cluster(None, cpus=7):  # the same one: two would be counted below
        rank = Rank.remote()
        assert ray.cluster_resources()["CPU"] == 1
    assert ray.get(rank.niceness.remote()) == os.nice(0)
    print("ready", flush=True)
    sys.stdin.read()
"""
SESSIONS = """
from concurrent.futures import ThreadPoolExecutor
import ray
from agent_rl.train.ray_session import ray_cluster

first, second = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
for starter in (first, second):
    session = ray_cluster(None, cpus=1)
    starter.submit(session.__enter__).result()
    values = [(thread, at) for at in range(3) for thread in (0, 1)]
    put = [(first, second)[thread].submit(ray.put, (thread, at)).result() for thread, at in values]
    assert len({reference.hex() for reference in put}) == len(values), put
    assert ray.get(put) == values
    del put
    starter.submit(session.__exit__, None, None, None).result()
"""
KINDS = ("gcs_server", "raylet/raylet", "Agent", "ray::Rank")
"""In the order in which command lines are told apart."""


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """pytest's own directories are too long for the paths of Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory:
        yield Path(directory)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("scheme", ["", "ray://", "auto"])
async def test_an_address_without_a_server_is_refused(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` checks the address that Ray would take."""
    pytest.importorskip("ray", reason="needs the trainer environment")
    port = free_port()
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(UserError, match=rf"train\.ray_address: (auto, |ray://)?\S+:{port}: .* correct the address"):
        await check_ray("auto" if scheme == "auto" else f"{scheme}127.0.0.1:{port}", seconds=5)


async def test_an_address_with_a_server_is_accepted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        await check_ray(f"127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize("address", ["127.0.0.1", "http://127.0.0.1:1", "127.0.0.1:port", "127.0.0.1:99999", ":6379"])
async def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(UserError, match=f"train.ray_address: {address}: write it as HOST:PORT, ray://HOST:PORT or"):
        await check_ray(address)


@pytest.mark.megatron
async def test_the_trainer_checks_the_address_before_it_starts(tiny_moe: Path) -> None:
    train = TrainConfig(ray_address=f"127.0.0.1:{free_port()}", device="cpu")
    with pytest.raises(UserError, match=r"train\.ray_address: 127\.0\.0\.1"):
        await RayTrainer(RunConfig(name="test", model=tiny_moe, train=train)).start()


@pytest.mark.slow
@pytest.mark.megatron
def test_a_local_rays_processes_are_few_and_die_with_a_killed_owner(short_dir: Path) -> None:
    pytest.importorskip("ray", reason="needs the trainer environment")
    environment, pipe = {**os.environ, "TMPDIR": str(short_dir)}, subprocess.PIPE
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=pipe, stdout=pipe, text=True, env=environment)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        running = {pid: line for pid, line in processes(short_dir).items() if pid != owner.pid}
        guards = [pid for pid, line in running.items() if "ray_leftovers" in line]
        counted = Counter(kind_of(line) for pid, line in running.items() if pid not in guards)
        assert len(guards) == 1
        assert counted == Counter(["Agent", *KINDS]), running
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    deadline = time.monotonic() + 10
    while processes(short_dir) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes(short_dir)
    assert not list(short_dir.iterdir())


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.megatron
def test_threads_that_outlive_a_session_have_distinct_object_ids_in_the_next(short_dir: Path) -> None:
    pytest.importorskip("ray", reason="needs the trainer environment")
    environment = {**os.environ, "TMPDIR": str(short_dir)}
    subprocess.run([sys.executable, "-c", SESSIONS], env=environment, check=True, timeout=120)


def kind_of(line: str) -> str:
    return next((kind for kind in KINDS if kind in line), line)


def processes(directory: Path) -> dict[int, str]:
    """The command lines of the processes with ``directory`` as their TMPDIR."""
    mark, lines = f"TMPDIR={directory}".encode(), {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                lines[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue
    return lines


async def test_too_few_cpus_for_the_ranks_are_refused_at_once(tiny_moe: Path) -> None:
    """The connection that is there has 1 CPU: the second actor would never start."""
    config = RunConfig(name="test", model=tiny_moe, train=TrainConfig(device="cpu", parallel={"world_size": 2}))
    async with ray_session(None, cpus=1):
        with pytest.raises(TrainerError, match=r"Ray has 1 CPUs for 2 ranks"):
            await RayTrainer(config).start()
