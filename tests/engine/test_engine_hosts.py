"""Engines on the nodes of a Ray cluster: where they are started, and what becomes of them when a node is lost.

The Ray nodes are real, all on this machine; the servers are fakes that the real ``serve.py`` runs.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_interpreter import make_interpreter
from support.fake_sglang import SPEC as DENSE_BELOW
from support.ray_nodes import driver_environment, kill_node, ray_node

from agent_rl.commands.health import check_engines_of
from agent_rl.config import EngineConfig, RolloutConfig, RunConfig
from agent_rl.controller import preflight
from agent_rl.controller.cluster_resources import ClusterRequest
from agent_rl.controller.placement import open_reservations
from agent_rl.controller.train import train
from agent_rl.engine import ray_servers as hosts
from agent_rl.engine.factory import open_engine
from agent_rl.engine.fleet import Phase
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.errors import EngineStartError, UserError
from agent_rl.models.spec import ModelSpec, read_model_spec
from agent_rl.train.ray_launch import placement_options, worker_bundles
from agent_rl.train.ray_session import ray_cluster
from agent_rl.types import SamplingParams

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(180), pytest.mark.usefixtures("cluster")]
SPEC = replace(DENSE_BELOW, moe=(True, True, True))
SAMPLE = SamplingParams(max_new_tokens=2)
GREEDY = SamplingParams(max_new_tokens=20, temperature=0.0)
SOON = {"initial_delay_ms": "500", "period_ms": "500", "timeout_ms": "500", "failure_threshold": "2"}
"""Health checks with which Ray notices within seconds that a node is gone."""
Configure = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray of two nodes with two CPUs each on this machine, which this process is connected to."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for name, value in SOON.items():
            patch.setenv(f"RAY_health_check_{name}", value)
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")  # SGLang wants a core named for each rank
        stack.enter_context(ray_cluster(None, cpus=2))
        stack.enter_context(ray_node("second", cpus=2))
        yield


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """Makes configs of engines that take a whole node each."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")

    def config_of(model: Path = tmp_path / "model", **engine: Any) -> RunConfig:
        settings = {
            "placement": "ray", "python": str(make_interpreter(tmp_path)), "device": "cpu", "threads": 2,
            "health_interval": 0.1, "start_timeout": 30.0, **engine,
        }  # fmt: skip
        return RunConfig.model_validate({"name": "n", "model": model, "runs_dir": tmp_path, "engine": settings})

    return config_of


@asynccontextmanager
async def opened(config: RunConfig, notes: list[str], spec: ModelSpec = SPEC) -> AsyncIterator[SGLangEngine]:
    engine, logs = config.engine, config.runs_dir / "logs"
    async with open_reservations(ClusterRequest.of(config), ranks=False) as reserved:
        rooms = reserved.engines
        async with open_engine(engine, config.model, spec, logs, notes.append, reservations=rooms) as client:
            yield client


async def engines_of(engine: SGLangEngine, sessions: str) -> set[str]:
    got = await asyncio.gather(*(engine.generate([1, 2], SAMPLE, routes_from=0, session=name) for name in sessions))
    return {each.engine for each in got}


def starts(directory: Path) -> list[dict[str, str]]:
    """The options of every server that was started."""
    return [dict(pairwise(line.split())) for line in (directory / "starts").read_text().splitlines()]


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def processes(directory: Path, option: str = "") -> list[int]:
    """The servers that run below ``directory``, and were started with ``option``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_text()
        except OSError:
            continue  # it ended while we looked
        if "serve.py" in line and str(directory) in line and option in line:
            found.append(int(entry.name))
    return found


async def none_of(directory: Path) -> None:
    async with asyncio.timeout(20):
        while processes(directory):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.long
async def test_the_engine_of_a_lost_node_is_started_on_the_next_that_joins(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run begins with the two engines that fit; the third starts when its node joins, and again on another node when
    that is lost, while the others serve."""
    monkeypatch.setattr(hosts, "_NOTIFY_SECONDS", 0.2)
    config, notes = configure(count=3, min_count=2, restarts=9), list[str]()
    with ExitStack() as nodes:
        async with opened(config, notes) as engine, asyncio.timeout(120):
            first = set(engine.urls)
            assert len(first) == 2
            assert await engines_of(engine, "abcd") == first
            nodes.enter_context(ray_node("third", cpus=2))
            await engine.fleet.until(lambda fleet: len(fleet.in_use) == 3)
            (third,) = set(engine.urls) - first
            assert [note for note in notes if "engine-2" in note] == [
                "engine-2 waits until the Ray cluster has 2 CPUs on 1 node",
                "engine-2 starts on third",
            ]
            assert third in await engines_of(engine, "efgh")
            await asyncio.to_thread(kill_node, "third")
            await engine.fleet.until(lambda fleet: fleet["engine-2"].phase is not Phase.SERVING)
            assert await engines_of(engine, "efgh") == first
            nodes.enter_context(ray_node("fourth", cpus=2))
            await engine.fleet.until(lambda fleet: fleet["engine-2"].losses)
            await engine.fleet.until(lambda fleet: fleet["engine-2"].phase is Phase.SERVING)
            assert "engine-2 starts on fourth" in notes
            assert notes[-1].endswith("serves again")
        await none_of(tmp_path)


async def test_a_killed_actor_ends_its_server_and_is_started_again(configure: Configure, tmp_path: Path) -> None:
    config, notes = configure(count=1), list[str]()
    async with opened(config, notes) as engine, asyncio.timeout(60):
        (server,) = processes(tmp_path)
        os.kill(parent_of(server), signal.SIGKILL)
        await engine.fleet.until(lambda fleet: fleet["engine-0"].losses)
        await engine.fleet.until(lambda fleet: fleet["engine-0"].phase is Phase.SERVING)
        assert server not in processes(tmp_path)
        assert await engines_of(engine, "ab") == set(engine.urls)
    assert re.search(r"is out of use: node \S+ is lost", notes[0])
    await none_of(tmp_path)


@pytest.mark.long
async def test_an_engine_on_two_nodes_is_restarted_as_a_whole(configure: Configure, tmp_path: Path) -> None:
    notes = list[str]()
    async with opened(configure(nodes=2, gpus=2), notes) as engine:
        options = sorted(starts(tmp_path), key=lambda each: each["--node-rank"])
        assert [each["--node-rank"] for each in options] == ["0", "1"]
        assert {(each["--nnodes"], each["--tp-size"], each["--dist-init-addr"]) for each in options} == {
            ("2", "2", options[0]["--dist-init-addr"])
        }
        assert engine.urls == (f"http://{options[0]['--host']}:{options[0]['--port']}",)
        (second,) = processes(tmp_path, "--node-rank\x001")
        os.killpg(second, signal.SIGKILL)
        async with asyncio.timeout(60):
            await engine.fleet.until(lambda fleet: fleet["engine-0"].losses)
            await engine.fleet.until(lambda fleet: fleet["engine-0"].phase is Phase.SERVING)
        assert len(starts(tmp_path)) == 4
        assert await engines_of(engine, "ab") == set(engine.urls)
    await none_of(tmp_path)
    assert "the engine server died (signal SIGKILL)" in notes[0]
    assert notes[0].endswith(f"log: {tmp_path}/logs/engine-0.1.log")
    assert (tmp_path / "logs/engine-0.1.log").exists()


@pytest.mark.long
async def test_a_log_that_cannot_be_kept_frees_the_reservation(configure: Configure, tmp_path: Path) -> None:
    config = configure()
    async with open_reservations(ClusterRequest.of(config), ranks=False) as reserved, asyncio.timeout(60):
        log, (room,) = tmp_path / "logs/engine-0.log", reserved.engines
        server = hosts.RayEngineServer(
            config.engine, config.model, log, room, number=0, capture_routes=True, notify=lambda line: None
        )
        await server.start()
        log.parent.touch()
        with pytest.raises(FileExistsError):
            await server.stop()
        log.parent.unlink()
        await server.start()
        assert server.death() is None
        await server.stop()
        assert log.exists()


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("none", (), r"model: \S+/none: not a Hugging Face checkpoint .* same path on every node[^;]*$"),
        ("model", ("--die",), r"the engine server died .*: ValueError: no such thing as --die; log: (\S+)"),
    ],
)
async def test_an_engine_that_cannot_start_names_its_node(
    configure: Configure, tmp_path: Path, model: str, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(EngineStartError, match=rf"^\S+: {message}") as raised:
        async with opened(configure(tmp_path / model, extra_args=arguments), []):
            pass
    if arguments:
        log = tmp_path / "logs/engine-0.log"
        assert str(raised.value).endswith(f"log: {log}")
        assert "ValueError: no such thing" in log.read_text()
    assert processes(tmp_path) == []


async def test_a_cluster_that_is_too_small_is_reported_before_anything_starts(
    configure: Configure, model: Path, tmp_path: Path
) -> None:
    changes = {"runs_dir": tmp_path / "runs", "rollout": RolloutConfig(max_tokens=1024)}
    with pytest.raises(UserError) as raised:
        await train(preflight.run(configure(model, count=2).model_copy(update=changes), "train"))
    assert str(raised.value).startswith(
        "the Ray cluster has too few CPUs: engine.count for 2 engines of 2 CPUs and train.parallel.world_size for 1 "
        "rank of 1 CPU request 5, and its nodes have "
    )
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "runs").glob("*/config.yaml")), "the directory is free for another config"
    assert processes(tmp_path) == []


@pytest.mark.parametrize(
    ("tensor", "bundles", "note"), [(1, 4, None), (2, 2, None), (4, 4, "train.parallel: tensor groups (tensor=4)")]
)
async def test_consecutive_ranks_are_on_one_node(tmp_path: Path, tensor: int, bundles: int, note: str | None) -> None:
    import ray

    parallel = {"world_size": 4, "tensor": tensor}
    train = {"ray_address": ray.get_runtime_context().gcs_address, "parallel": parallel}
    config = RunConfig.model_validate({"name": "ranks", "model": tmp_path, "train": train})
    async with open_reservations(ClusterRequest.of(config), ranks=True) as reserved:
        assert reserved.engines == ()
        assert reserved.ranks is not None
        assert reserved.ranks.bundle_count == bundles
        assert len(placement_options(reserved.ranks)) == 4
        nodes = [node for _, node in worker_bundles(reserved.ranks)]
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
        assert (reserved.note or "").startswith(note or "")
        assert (reserved.note is None) == (note is None)
    async with asyncio.timeout(20):
        while ray.available_resources().get("CPU") != 4:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.sglang
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nodes", [1, 2])
async def test_a_real_engine_is_killed_with_its_actor_and_serves_again(
    engine_config: EngineConfig, model: Path, tmp_path: Path, nodes: int
) -> None:
    """SGLang itself, on one node, and on two that hold half of each weight."""
    changes = {"placement": "ray", "threads": 1, "nodes": nodes, "gpus": nodes, "start_timeout": 300.0}
    engine = engine_config.model_copy(update={**changes, "health_interval": 0.5})
    config, notes = RunConfig(name="n", model=model, runs_dir=tmp_path, engine=engine), list[str]()
    async with opened(config, notes, read_model_spec(model)) as client:
        before = await client.generate([5, 6, 7], GREEDY, routes_from=0, session="a")
        assert len(processes(model)) == nodes
        os.kill(parent_of(processes(model)[-1]), signal.SIGKILL)
        after = await client.generate([5, 6, 7], GREEDY, routes_from=0, session="b")
        assert after.tokens == before.tokens
    await none_of(model)
    assert [note.rpartition(") ")[2] for note in notes][-2:] == ["is restarting", "serves again"]


async def test_the_doctor_checks_every_node(configure: Configure, tmp_path: Path) -> None:
    room, *machines = await check_engines_of(configure(count=4))
    assert room.detail.startswith("the Ray cluster has too few CPUs: engine.count for 4 engines of 2 CPUs and train.")
    assert [(each.ok, each.detail) for each in machines] == [(True, "SGLang 0.9, 2 CPUs")] * 2
    assert machines[1].name == "engine on second"


async def test_the_doctor_names_a_node_that_does_not_respond(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "_CHECK_SECONDS", 0.2)
    config = configure()
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 5\n")
    _, *machines = await check_engines_of(config)
    assert [(each.ok, each.detail) for each in machines] == [(False, "no response within 0.2 s")] * 2


_RUN = """
    import asyncio, sys
    from agent_rl.config import RunConfig
    from test_engine_hosts import opened

    async def main(config):
        async with opened(RunConfig.model_validate_json(config), []):
            print("up", flush=True)
            await asyncio.sleep(600)

    asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.long
async def test_servers_end_with_a_run_that_is_killed(configure: Configure, tmp_path: Path) -> None:
    import ray

    config = configure()
    address = ray.get_runtime_context().gcs_address
    config = config.model_copy(update={"train": config.train.model_copy(update={"ray_address": address})})
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path]
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(_RUN), config.model_dump_json(),
        stdout=subprocess.PIPE, env={**os.environ, **driver_environment(), "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert run.stdout is not None
    assert await run.stdout.readline() == b"up\n"
    assert len(processes(tmp_path)) == 1
    run.kill()
    await run.wait()
    await none_of(tmp_path)
