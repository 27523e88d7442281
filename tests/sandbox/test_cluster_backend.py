"""Sandboxes on several nodes: placement, and the loss of a node or of the run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from support.ray_nodes import driver_environment, kill_node, ray_node

from agent_rl.commands.health import check_sandboxes
from agent_rl.config import RolloutConfig, RunConfig
from agent_rl.errors import UserError
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.group import GroupSettings, Limiter, collect_groups
from agent_rl.rollout.scripted_policies import solver_runner
from agent_rl.train import ray_session as ray_connection
from agent_rl.train.ray_session import ray_session
from envs import EnvContext
from envs.tool_environment import ToolClassEnvironment
from sandbox import (
    ImageMissingError,
    ImagePolicy,
    Sandbox,
    SandboxNodeLostError,
    SandboxPool,
    SandboxSpec,
    SandboxUnavailableError,
)
from sandbox.bubblewrap.backend import BubblewrapBackend
from sandbox.lease import Owner
from sandbox.ray.backend import ClusterBackend, SandboxNode, check_same_backend, open_cluster, sandbox_nodes
from sandbox.ray.node import RemoteNode, SandboxNodeActor
from tools import ToolCall

pytestmark = [pytest.mark.bubblewrap, pytest.mark.megatron, pytest.mark.timeout(120)]
GATE = "/opt/gate"


# Placement, with handles in this process


class Images(BubblewrapBackend):
    """A node's backend with ``images`` (name -> id); each stands for the host image."""

    def __init__(self, images: dict[str, str], pull: bool = False) -> None:
        super().__init__(run_id="placed", images=ImagePolicy(pull=pull))
        self.images = images

    async def image_id(self, image: str) -> str:
        if image not in self.images:
            raise ImageMissingError(f"image {image!r} is not on this machine")
        return self.images[image]

    async def fetch(self, image: str) -> None:
        self.images[image] = f"{image}-fetched"

    async def start(self, spec: SandboxSpec) -> Any:
        await self.image_id(spec.image)
        return await super().start(replace(spec, image="host"))


class FakeHandle:
    """A Ray handle of an actor in this process. ``dead``: calls fail as after the end of its process."""

    def __init__(self, backend: Images) -> None:
        self.actor, self.dead = SandboxNodeActor(), False
        self.actor._local = backend
        self.call = SimpleNamespace(remote=self._call)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self.dead:
            from ray.exceptions import ActorDiedError

            raise ActorDiedError
        return await self.actor.call(method, *args, **kwargs)


@asynccontextmanager
async def open_fake_cluster(
    *node_images: dict[str, str], **options: Any
) -> AsyncIterator[tuple[ClusterBackend, list[FakeHandle]]]:
    """A cluster with one node for each of ``node_images``."""
    handles = [FakeHandle(Images(images)) for images in node_images]
    remotes = [RemoteNode(f"node-{index}", "bubblewrap", handle) for index, handle in enumerate(handles)]
    nodes = [SandboxNode(remote, remote) for remote in remotes]
    try:
        yield ClusterBackend(nodes, **{"max_per_node": 8, **options}), handles
    finally:
        for handle in handles:
            await handle.actor.close()


def sandboxes(cluster: ClusterBackend) -> list[int]:
    return [node.sandboxes for node in cluster.nodes]


async def test_nodes_with_the_image_come_first_then_those_with_fewer_sandboxes() -> None:
    async with open_fake_cluster({"a": "1", "b": "2"}, {"a": "1"}, {}) as (cluster, _):
        for _ in range(3):
            await cluster.start(SandboxSpec(image="b"))
        assert sandboxes(cluster) == [3, 0, 0]
        for _ in range(4):
            await cluster.start(SandboxSpec(image="a"))
        assert sandboxes(cluster) == [4, 3, 0]


async def test_a_start_waits_for_a_full_node_unless_its_task_has_a_sandbox() -> None:
    async with open_fake_cluster({"a": "1"}, {}, max_per_node=1) as (cluster, _):
        first = await asyncio.create_task(cluster.start(SandboxSpec(image="a")))
        waiting = asyncio.create_task(cluster.start(SandboxSpec(image="a")))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await first.close()
        second = await waiting
        assert sandboxes(cluster) == [1, 0]

        async def episode() -> None:
            agents = await cluster.start(SandboxSpec(image="a"))
            await (await cluster.start(SandboxSpec(image="a"))).close()  # to grade, while the agent's is there
            await agents.close()

        await second.close()
        await asyncio.gather(*(episode() for _ in range(3)))
        assert sandboxes(cluster) == [0, 0]


async def test_concurrent_starts_share_one_pull_on_one_node() -> None:
    async with open_fake_cluster({}, {}, pull=True) as (cluster, handles):
        await asyncio.gather(*(cluster.start(SandboxSpec(image="a")) for _ in range(3)))
        assert [handle.actor._local.images for handle in handles] == [{"a": "a-fetched"}, {}]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("images", "image", "message"),
    [
        (({}, {}), "a", r"image 'a' is not on this machine \(on each of the sandbox nodes node-0, node-1\)"),
        (({"a": "sha256:1"}, {"a": "sha256:2"}), "a", r"not the same on all .*node-0: sha256:1, node-1: sha256:2\)"),
    ],
)
async def test_a_missing_or_differing_image_is_one_line(
    images: tuple[dict[str, str], ...], image: str, message: str
) -> None:
    async with open_fake_cluster(*images) as (cluster, handles):
        with pytest.raises(ImageMissingError, match=message) as error:
            await cluster.start(SandboxSpec(image=image))
        assert "\n" not in str(error.value)
        for handle in handles:
            handle.actor._local.images[image] = "mended"  # type: ignore[union-attr]
        assert (await cluster.start(SandboxSpec(image=image))).id


async def test_a_directory_missing_on_one_node_is_one_line(tmp_path: Path) -> None:
    async with open_fake_cluster({"a": "1"}, {"a": "1"}) as (cluster, handles):
        probe = await handles[1].actor.probe("a", [str(tmp_path)])
        blind = AsyncMock(return_value=replace(probe, missing_directories=(str(tmp_path),)))
        handles[1].actor.probe = blind  # type: ignore[method-assign]
        with pytest.raises(SandboxUnavailableError, match=rf"{tmp_path}: no such .*on the sandbox node node-1"):
            await cluster.start(SandboxSpec(image="a", ro_binds={str(tmp_path): "/opt/site"}))


async def test_a_start_moves_to_another_node_after_a_loss_and_fails_without_nodes() -> None:
    notes: list[str] = []
    async with open_fake_cluster({"a": "1"}, {"a": "1"}, on_note=notes.append) as (cluster, handles):
        sandbox = await cluster.start(SandboxSpec(image="a"))
        handles[0].dead = True
        other, another = await cluster.start(SandboxSpec(image="a")), await cluster.start(SandboxSpec(image="a"))
        for _ in range(2):
            with pytest.raises(SandboxNodeLostError, match="node-0"):
                await sandbox.exec("true", timeout=5)
        await sandbox.close()
        assert ((await other.exec("true", timeout=5)).ok, (await another.exec("true", timeout=5)).ok) == (True, True)
        assert (cluster.lost, len(notes)) == (1, 1)
        handles[1].dead = True
        with pytest.raises(SandboxUnavailableError, match=r"every sandbox node is lost: .*node-0.*node-1"):
            await cluster.start(SandboxSpec(image="a"))


# Refused before a start


def test_nodes_with_different_backends_are_one_line() -> None:
    with pytest.raises(SandboxUnavailableError, match=r"sandbox.backend: .*\(a: docker, b: bubblewrap\)"):
        check_same_backend({"a": "docker", "b": "bubblewrap"})


async def test_placement_on_ray_without_ray_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_connection, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"Ray is not installed.*sandbox.placement=ray"):
        async with ray_session(None, cpus=1):
            pass


def test_sandbox_nodes_declare_the_resource_or_are_all_living_nodes() -> None:
    def node(name: str, id: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
        return {"NodeName": name, "NodeID": id, "Alive": alive, "Resources": resources}

    nodes = [node("a", "1"), node("b", "2"), node("b", "3"), node("c", "4", alive=False)]
    assert sandbox_nodes(nodes) == {"a": "1", "b/2": "2", "b/3": "3"}
    assert sandbox_nodes([*nodes, node("d", "5", sandboxes=1.0)]) == {"d": "5"}


# Over a real Ray of two nodes


async def test_doctor_checks_every_node(two_nodes: None, tmp_path: Path) -> None:
    def config(**sandbox: Any) -> RunConfig:
        settings = {"placement": "ray", "backend": "bubblewrap", "disk_mb": 64, **sandbox}
        return RunConfig.model_validate({"name": "doctor", "model": str(tmp_path), "sandbox": settings})

    first, second, image = await check_sandboxes(config())
    assert (second.name, image.name) == ("sandbox on second", "sandbox image")
    for check in (first, second):
        assert all(part in check.detail for part in ("Python 3", "CPUs", "GiB free")), check
    assert (first.ok, second.ok, image.ok) == (True, True, True)
    assert image.detail.endswith("on 2 of 2 nodes")
    missing_directories = await check_sandboxes(config(image=str(tmp_path / "none")))
    assert [check.ok for check in missing_directories] == [False] * 3
    assert f"{tmp_path}/none" in missing_directories[1].detail
    assert "on each of the sandbox nodes" in missing_directories[2].detail
    assert all("\n" not in check.detail for check in missing_directories)


# Lost nodes and killed runs


class Worker:
    """Waits in a sandbox until the gate is open."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox, self.done = sandbox, False

    @classmethod
    def tasks(cls, split: str, options: Any) -> list[dict[str, Any]]:
        return [{"id": f"task-{at}"} for at in range(64)]

    async def setup(self, task: Any) -> str:
        return "work"

    async def work(self) -> str:
        """Wait."""
        result = await self.sandbox.exec(f"touch in; until [ -e {GATE}/open ]; do sleep 0.1; done", timeout=100)
        self.done = result.ok
        return "done"

    async def grade(self) -> float:
        return float(self.done)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def base() -> Path:
    return Path(tempfile.gettempdir(), f"agent-rl-sandboxes-{os.getuid()}")


def dir_of(sandbox: str) -> Path:
    return base() / sandbox.rpartition("-")[0]


def working(cluster: ClusterBackend) -> int:
    """Number of sandboxes in which an episode waits."""
    return sum((dir_of(sandbox) / "sandboxes" / sandbox / "work/in").exists() for sandbox in cluster._sandboxes)


async def run_through_a_loss(count: int, gate: Path, lose: Callable[[Path], Awaitable[None]]) -> None:
    """Run ``count`` episodes and end the last node with ``lose``, which gets the directory of its sandboxes."""
    notes: list[str] = []
    cluster = await open_cluster("bubblewrap", run_id="lost", sandboxes_per_node=count, on_note=notes.append)
    limits = SandboxSpec(ro_binds={str(gate): GATE}, workdir="/testbed")
    env = ToolClassEnvironment(EnvContext(cluster, limits=limits), Worker, "worker", {})
    rules = EpisodeRules(RolloutConfig(time_limit=100), routes=None)
    run = solver_runner(env, lambda env, task: [ToolCall("work", {}), ToolCall("finish", {})], rules)
    tasks, groups = env.tasks("train")[: count // 4], GroupSettings(size=4, retries=0, min_size=4)
    try:
        collecting = asyncio.create_task(collect_groups(tasks, run, groups, limiter=Limiter(count)))
        await until(lambda: working(cluster) == count)
        left = sorted(sandbox for sandbox, (node, _) in cluster._sandboxes.items() if node is cluster.nodes[-1])
        await lose(dir_of(left[0]))
        await until(lambda: cluster.lost == 1)
        (gate / "open").touch()
        rollout = await collecting
        assert len(left) == count // len(cluster.nodes)
        assert [len(group.trajectories) for group in rollout.groups] == [4] * (count // 4)
        assert {group.infrastructure_failures for group in rollout.groups} == {0}
        assert {each.reward for group in rollout.groups for each in group.trajectories} == {1.0}
        assert (rollout.dropped, cluster.lost, len(notes)) == ((), 1, 1)
        assert f"{len(left)} sandboxes" in notes[0]
        assert cluster.sandboxes == 0
    finally:
        await cluster.close()
    await reap()
    assert not [sandbox for sandbox in left if (dir_of(sandbox) / "sandboxes" / sandbox).exists()]


async def reap() -> None:
    """Remove what dead runs left, as the start of the next run does."""
    following = await open_cluster("bubblewrap", run_id="following")
    try:
        await following.reap()
    finally:
        await following.close()


async def test_groups_complete_after_a_node_actor_is_killed(two_nodes: None, tmp_path: Path) -> None:
    async def kill_process(directory: Path) -> None:
        os.kill(Owner.from_json((directory / "owner.json").read_text()).pid, signal.SIGKILL)

    await run_through_a_loss(8, tmp_path, kill_process)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
async def test_groups_complete_after_a_node_with_64_sandboxes_is_lost(two_nodes: None, tmp_path: Path) -> None:
    with ray_node("doomed"):

        async def kill_whole_node(directory: Path) -> None:
            await asyncio.to_thread(kill_node, "doomed")

        await run_through_a_loss(192, tmp_path, kill_whole_node)


_RUN = """
import asyncio, json, sys
from agent_rl.train.ray_session import ray_session
from sandbox import SandboxSpec
from sandbox.ray.backend import open_cluster

async def main(address, marker):
    async with ray_session(address, cpus=1):
        cluster = await open_cluster("bubblewrap", run_id="killed")
        sandboxes = [await cluster.start(SandboxSpec()) for _ in range(4)]
        commands = [asyncio.create_task(sandbox.exec(f"sleep {marker}", timeout=600)) for sandbox in sandboxes]
        print(json.dumps([sandbox.id for sandbox in sandboxes]), flush=True)
        await asyncio.wait(commands)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_sandboxes_of_a_killed_run_are_removed_on_every_node(two_nodes: None, marker: str, host: Any) -> None:
    import ray

    command = [sys.executable, "-c", _RUN, ray.get_runtime_context().gcs_address, marker]
    environment = {**os.environ, **driver_environment()}
    run = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, env=environment)
    ids = json.loads(await run.stdout.readline())
    await until(lambda: host.processes(marker) >= 4)
    owners = {Owner.from_json((dir_of(sandbox) / "owner.json").read_text()) for sandbox in ids}
    assert len(owners) == 2, "two on each node"
    run.kill()
    await run.wait()
    await until(lambda: not host.processes(marker) and not any(owner.running for owner in owners))
    await reap()
    assert not any(host.sandbox_exists("bubblewrap", sandbox) for sandbox in ids)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
async def test_500_sandboxes_on_4_nodes(two_nodes: None) -> None:
    run_id = f"many{uuid.uuid4().hex[:8]}"
    with ExitStack() as stack:
        for name in ("third", "fourth"):
            stack.enter_context(ray_node(name))
        cluster = await open_cluster("bubblewrap", run_id=run_id, sandboxes_per_node=125, pool=SandboxPool)
        try:

            async def one(number: int) -> str:
                sandbox = await cluster.start(SandboxSpec())
                await full.wait()
                result = await sandbox.exec(f"echo {number} > n; cat n", timeout=100)
                await sandbox.close()
                return result.text

            full = asyncio.Event()
            running = [asyncio.create_task(one(number)) for number in range(500)]
            await until(lambda: cluster.sandboxes == 500)
            assert sandboxes(cluster) == [125] * 4
            full.set()
            assert await asyncio.gather(*running) == [f"{number}\n" for number in range(500)]
            assert (sandboxes(cluster), cluster.lost) == ([0] * 4, 0)
            assert [len(list(directory.glob("sandboxes/*"))) for directory in base().glob(f"{run_id}-*")] == [0] * 4
        finally:
            await cluster.close()
        assert not list(base().glob(f"{run_id}-*"))
