"""Sandboxes on several hosts: where they are placed, and what becomes of them when a host or the run dies."""

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

import pytest
from support.ray_nodes import kill_node, ray_node

from agent_rl.commands.health import check_sandboxes
from agent_rl.config import RolloutConfig, RunConfig
from agent_rl.errors import UserError
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.group import GroupSettings, collect_groups
from agent_rl.rollout.limiter import Limiter
from agent_rl.rollout.scripted_policies import solver_runner
from agent_rl.train import ray_session as ray_connection
from agent_rl.train.ray_session import ray_session
from envs import EnvContext
from envs.tool_environment import ToolClassEnvironment
from sandbox import (
    ImageMissingError,
    ImagePolicy,
    Sandbox,
    SandboxHostLostError,
    SandboxPool,
    SandboxSpec,
    SandboxUnavailableError,
    open_pipes,
)
from sandbox.bubblewrap.backend import BubblewrapBackend
from sandbox.owner import Owner
from sandbox.ray.backend import ClusterBackend, Place
from sandbox.ray.host import SandboxHost
from sandbox.ray.open import check_alike, host_nodes, open_cluster
from sandbox.ray.remote import RemoteHost
from tools import ToolCall

pytestmark = [pytest.mark.bubblewrap, pytest.mark.megatron, pytest.mark.timeout(120)]
GATE = "/opt/gate"


# Placement: hosts of this process, called as through Ray


class Images(BubblewrapBackend):
    """A host with ``held`` images, by name; each is the machine's own directories."""

    def __init__(self, held: dict[str, str], pull: bool = False) -> None:
        super().__init__(run_id="placed", images=ImagePolicy(pull=pull))
        self.held = held

    async def image_id(self, image: str) -> str:
        if image not in self.held:
            raise ImageMissingError(f"image {image!r} is not on this machine")
        return self.held[image]

    async def fetch(self, image: str) -> None:
        self.held[image] = f"{image}-fetched"

    async def start(self, spec: SandboxSpec) -> Any:
        await self.image_id(spec.image)
        return await super().start(replace(spec, image="host"))


class Actor:
    """The handle of a host in this process. ``dead``: it answers as one whose process has ended."""

    def __init__(self, backend: Images) -> None:
        self.host, self.dead = SandboxHost(), False
        self.host._local = backend
        self.ask = SimpleNamespace(remote=self._ask)

    async def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self.dead:
            from ray.exceptions import ActorDiedError

            raise ActorDiedError
        return await self.host.ask(method, *args, **kwargs)


@asynccontextmanager
async def placed(*held: dict[str, str], **options: Any) -> AsyncIterator[tuple[ClusterBackend, list[Actor]]]:
    """A cluster of hosts that hold these images."""
    actors = [Actor(Images(images)) for images in held]
    hosts = [RemoteHost(f"host-{at}", "bubblewrap", actor) for at, actor in enumerate(actors)]
    try:
        yield ClusterBackend([Place(host, host) for host in hosts], **{"most": 8, **options}), actors
    finally:
        for actor in actors:
            await actor.host.close()


def sandboxes(cluster: ClusterBackend) -> list[int]:
    return [place.sandboxes for place in cluster.places]


async def test_the_host_that_has_the_image_wins_and_then_the_emptier_one() -> None:
    async with placed({"a": "1", "b": "2"}, {"a": "1"}, {}) as (cluster, _):
        for _ in range(3):
            await cluster.start(SandboxSpec(image="b"))
        assert sandboxes(cluster) == [3, 0, 0]
        for _ in range(4):
            await cluster.start(SandboxSpec(image="a"))
        assert sandboxes(cluster) == [4, 3, 0]


async def test_a_full_host_is_waited_for_but_not_by_who_holds_a_sandbox() -> None:
    async with placed({"a": "1"}, {}, most=1) as (cluster, _):
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


async def test_an_image_is_fetched_where_there_is_room_and_by_one_host_for_all_who_ask_meanwhile() -> None:
    async with placed({}, {}, pull=True) as (cluster, actors):
        await asyncio.gather(*(cluster.start(SandboxSpec(image="a")) for _ in range(3)))
        assert [actor.host._local.held for actor in actors] == [{"a": "a-fetched"}, {}]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("held", "image", "told"),
    [
        (({}, {}), "a", r"image 'a' is not on this machine \(so on each of the sandbox hosts host-0, host-1\)"),
        (({"a": "sha256:1"}, {"a": "sha256:2"}), "a", r"not the same on all .*host-0: sha256:1, host-1: sha256:2\)"),
    ],
)
async def test_an_image_that_no_host_has_or_two_have_differently_is_one_line(
    held: tuple[dict[str, str], ...], image: str, told: str
) -> None:
    async with placed(*held) as (cluster, actors):
        with pytest.raises(ImageMissingError, match=told) as error:
            await cluster.start(SandboxSpec(image=image))
        assert "\n" not in str(error.value)
        for actor in actors:
            actor.host._local.held[image] = "mended"  # type: ignore[union-attr]
        assert (await cluster.start(SandboxSpec(image=image))).id


async def test_a_directory_that_a_host_lacks_is_one_line(tmp_path: Path) -> None:
    async with placed({"a": "1"}, {"a": "1"}) as (cluster, actors):
        look = actors[1].host.look

        async def blind(image: str, directories: Any) -> Any:
            return replace(await look(image, directories), lacking=tuple(directories))

        actors[1].host.look = blind  # type: ignore[method-assign]
        with pytest.raises(SandboxUnavailableError, match=rf"{tmp_path}: no such .*on the sandbox host host-1.*right"):
            await cluster.start(SandboxSpec(image="a", ro_binds={str(tmp_path): "/opt/site"}))


async def test_sandboxes_that_share_pipes_are_on_one_host() -> None:
    async with placed({"a": "1"}, {"a": "1"}, most=1) as (cluster, _):
        spec = SandboxSpec(image="a")
        async with open_pipes(cluster, ["end"], spec) as directory:
            bound = replace(spec, ro_binds={directory: "/opt/pipes"})
            one, two = await cluster.start(bound), await cluster.start(bound)
            assert sorted(sandboxes(cluster)) == [0, 2]
            reading = asyncio.create_task(one.exec("cat /opt/pipes/end", timeout=20))
            assert (await two.exec("echo over > /opt/pipes/end", timeout=20)).ok
            assert (await reading).stdout == b"over\n"
        assert not await asyncio.to_thread(Path(directory).exists)


async def test_a_start_goes_on_elsewhere_when_its_host_is_lost_and_ends_when_none_is_left() -> None:
    told: list[str] = []
    async with placed({"a": "1"}, {"a": "1"}, tell=told.append) as (cluster, actors):
        sandbox = await cluster.start(SandboxSpec(image="a"))
        actors[0].dead = True
        other, another = await cluster.start(SandboxSpec(image="a")), await cluster.start(SandboxSpec(image="a"))
        for _ in range(2):
            with pytest.raises(SandboxHostLostError, match="host-0"):
                await sandbox.exec("true", timeout=5)
        await sandbox.close()
        assert ((await other.exec("true", timeout=5)).ok, (await another.exec("true", timeout=5)).ok) == (True, True)
        assert (cluster.lost, len(told)) == (1, 1)
        actors[1].dead = True
        with pytest.raises(SandboxUnavailableError, match=r"no sandbox host is left: .*host-0.*host-1"):
            await cluster.start(SandboxSpec(image="a"))


# What is refused before a sandbox is started


def test_hosts_with_different_backends_are_one_line() -> None:
    with pytest.raises(SandboxUnavailableError, match=r"sandbox.backend: .*\(a: docker, b: bubblewrap\): name the one"):
        check_alike({"a": "docker", "b": "bubblewrap"})


async def test_hosts_without_ray_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_connection, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"Ray is not installed, which sandbox.placement=ray"):
        async with ray_session(None, cpus=1):
            pass


def test_the_nodes_that_declare_sandboxes_are_the_hosts_else_all_that_live() -> None:
    def node(name: str, id: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
        return {"NodeName": name, "NodeID": id, "Alive": alive, "Resources": resources}

    nodes = [node("a", "1"), node("b", "2"), node("b", "3"), node("c", "4", alive=False)]
    assert host_nodes(nodes) == {"a": "1", "b/2": "2", "b/3": "3"}
    assert host_nodes([*nodes, node("d", "5", sandboxes=1.0)]) == {"d": "5"}


# Over a real Ray of two nodes


async def test_the_doctor_looks_at_every_host(two_nodes: None, tmp_path: Path) -> None:
    def config(**sandbox: Any) -> RunConfig:
        settings = {"placement": "ray", "backend": "bubblewrap", **sandbox}
        return RunConfig.model_validate({"name": "doctor", "model": str(tmp_path), "sandbox": settings})

    first, second, image = await check_sandboxes(config())
    assert (second.name, image.name) == ("sandbox on second", "sandbox image")
    for check in (first, second):
        assert check.ok, check
        assert "Python 3" in check.detail
        assert "CPUs" in check.detail
        assert "GiB free" in check.detail
    assert image.ok
    assert image.detail.endswith("on 2 of 2 hosts")
    lacking = await check_sandboxes(config(image=str(tmp_path / "none")))
    assert [check.ok for check in lacking] == [False] * 3
    assert f"{tmp_path}/none" in lacking[1].detail
    assert "so on each of the sandbox hosts" in lacking[2].detail
    assert all("\n" not in check.detail for check in lacking)


# Hosts and runs that die


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
    """Sandboxes in which an episode has come to wait."""
    return sum((dir_of(sandbox) / "sandboxes" / sandbox / "work/in").exists() for sandbox in cluster._sandboxes)


async def run_through_a_loss(count: int, gate: Path, lose: Callable[[Path], Awaitable[None]]) -> None:
    """``count`` episodes at once, half of them on a host that ``lose`` ends, given the directory of its sandboxes."""
    told: list[str] = []
    cluster = await open_cluster("bubblewrap", run_id="lost", sandboxes_per_node=count, tell=told.append)
    limits = SandboxSpec(ro_binds={str(gate): GATE}, workdir="/testbed")
    env = ToolClassEnvironment(EnvContext(cluster, limits=limits), Worker, "worker", {})
    rules = EpisodeRules(RolloutConfig(time_limit=100), routes=None)
    run = solver_runner(env, lambda env, task: [ToolCall("work", {}), ToolCall("finish", {})], rules)
    try:
        tasks = env.tasks("train")[: count // 4]
        collecting = asyncio.create_task(
            collect_groups(tasks, run, GroupSettings(size=4, retries=0, min_size=4), limiter=Limiter(count))
        )
        await until(lambda: working(cluster) == count)
        left = sorted(sandbox for sandbox, (place, _) in cluster._sandboxes.items() if place is cluster.places[-1])
        await lose(dir_of(left[0]))
        await until(lambda: cluster.lost == 1)
        (gate / "open").touch()
        rollout = await collecting
        assert len(left) == count // len(cluster.places)
        assert [len(group.trajectories) for group in rollout.groups] == [4] * (count // 4)
        assert {group.infrastructure_failures for group in rollout.groups} == {0}
        assert {each.reward for group in rollout.groups for each in group.trajectories} == {1.0}
        assert (rollout.dropped, cluster.lost, len(told)) == ((), 1, 1)
        assert f"{len(left)} sandboxes" in told[0]
        assert cluster.sandboxes == 0
    finally:
        await cluster.close()
    following = await open_cluster("bubblewrap", run_id="following")
    try:
        await following.reap()
        assert not [sandbox for sandbox in left if (dir_of(sandbox) / "sandboxes" / sandbox).exists()]
    finally:
        await following.close()


async def test_a_host_killed_with_sandboxes_costs_no_group_anything(two_nodes: None, tmp_path: Path) -> None:
    async def kill_process(directory: Path) -> None:
        os.kill(Owner.from_json((directory / "owner.json").read_text()).pid, signal.SIGKILL)

    await run_through_a_loss(8, tmp_path, kill_process)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
async def test_a_machine_lost_with_64_sandboxes_costs_no_group_anything(two_nodes: None, tmp_path: Path) -> None:
    with ray_node("doomed"):

        async def kill_whole_node(directory: Path) -> None:
            await asyncio.to_thread(kill_node, "doomed")

        await run_through_a_loss(192, tmp_path, kill_whole_node)


_RUN = """
import asyncio, json, sys
from agent_rl.train.ray_session import ray_session
from sandbox import SandboxSpec
from sandbox.ray.open import open_cluster

async def main(address, marker):
    async with ray_session(address, cpus=1):
        cluster = await open_cluster("bubblewrap", run_id="killed")
        sandboxes = [await cluster.start(SandboxSpec()) for _ in range(4)]
        commands = [asyncio.create_task(sandbox.exec(f"sleep {marker}", timeout=600)) for sandbox in sandboxes]
        print(json.dumps([sandbox.id for sandbox in sandboxes]), flush=True)
        await asyncio.wait(commands)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_sandboxes_of_a_run_that_is_killed_go_on_every_host(two_nodes: None, marker: str, host: Any) -> None:
    import ray

    command = [sys.executable, "-c", _RUN, ray.get_runtime_context().gcs_address, marker]
    run = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert run.stdout is not None
    ids = json.loads(await run.stdout.readline())
    await until(lambda: host.processes(marker) >= 4)
    owners = {Owner.from_json((dir_of(sandbox) / "owner.json").read_text()) for sandbox in ids}
    assert len(owners) == 2, "two on each host"
    run.kill()
    await run.wait()
    await until(lambda: not host.processes(marker) and not any(owner.running for owner in owners))
    following = await open_cluster("bubblewrap", run_id="following")
    try:
        await following.reap()
        assert not any(host.sandbox_exists("bubblewrap", sandbox) for sandbox in ids)
    finally:
        await following.close()


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
async def test_500_sandboxes_over_4_hosts(two_nodes: None) -> None:
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
            assert [len(list(directory.glob("boxes/*"))) for directory in base().glob(f"{run_id}-*")] == [0] * 4
        finally:
            await cluster.close()
        assert not list(base().glob(f"{run_id}-*"))
