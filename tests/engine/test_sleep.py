"""Engines that share the trainer's GPUs: how they fall asleep and wake, and what can fail."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from fake_interpreter import make_interpreter
from support.fake_sglang import SPEC, generated
from support.local_server import serving

from agent_rl.config import EngineConfig, RunConfig
from agent_rl.engine import supervisor
from agent_rl.engine.fleet import Fleet, Phase
from agent_rl.engine.launch import EngineServer, group_members
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.engine.sleep import Memory
from agent_rl.engine.supervisor import EngineSupervisor
from agent_rl.errors import ConfigError, EngineLost
from agent_rl.models.spec import read_model_spec
from agent_rl.types import Completion, Sample, SamplingParams
from agent_rl.utils.concurrency import run_alongside
from agent_rl.utils.http import AsyncHttp
from agent_rl.weight_sync.requests import PublishReport
from agent_rl.weight_sync.sync import WeightSync
from sandbox.timeouts import PausableTimeout

SAMPLE = SamplingParams(max_new_tokens=2)
WHOLE = ["flush_cache", "release", "resume weights", "resume kv_cache"]
CALLS = ("flush_cache", "release_memory_occupation", "resume_memory_occupation")


class Server:
    """A fake of SGLang 0.5.23, which dies of whatever it cannot do without memory. ``fails``: what it does instead of
    an entry of ``done`` (``refuse``, ``hang``, ``die``). With ``held``, requests run until they are aborted."""

    def __init__(self) -> None:
        self.done, self.paths = list[str](), list[str]()
        self.fails: dict[str, str] = {}
        self.released: set[str] = set()
        self.version, self.starts, self.killed_by = "", 0, ""
        self.held, self.running = False, dict[str, asyncio.Event]()
        self.begun, self.hanging, self.starting = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.starting.set()
        self.gpus: Sequence[str] = ()
        self._open: AsyncExitStack | None = None

    async def start(self) -> str:
        self.starts += 1
        self.released, self.version = set(), "start"
        await self.starting.wait()
        self._open = AsyncExitStack()
        return await self._open.enter_async_context(serving(self.handle))

    def death(self) -> str | None:
        return None if self._open is not None else "the engine server died"

    async def stop(self) -> None:
        opened, self._open = self._open, None
        self.running.clear()
        if opened is not None:
            await opened.aclose()

    async def handle(self, path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        name = path[1:].partition("?")[0]
        self.paths.append(name)
        if self._open is None:
            return 0, b""
        if name in CALLS:
            return await self._memory(name, request)
        if name == "abort_request":
            self.running[request["rid"]].set()
        if name == "model_info":
            return 200, orjson.dumps({"weight_version": self.version})
        if name == "generate":
            return await self._generate(request)
        return 200, b"{}"

    async def _memory(self, name: str, request: dict[str, Any]) -> tuple[int, bytes]:
        tags = request.get("tags", [])
        entry = name.partition("_memory")[0] if name != "resume_memory_occupation" else f"resume {' '.join(tags)}"
        self.done.append(entry)
        match self.fails.pop(entry, None):
            case "refuse":
                return 400, b'{"error": {"message": "no"}}'
            case "hang":
                self.hanging.set()
                await asyncio.Event().wait()
            case "die":
                return await self._dies(entry)
        if name == "flush_cache":
            return (400, b"pending requests") if self.running else (200, b"")
        if name == "release_memory_occupation":
            if self.running or self.released:
                return await self._dies("release_memory_occupation should be called only when server is idle")
            self.released = set(tags)
        elif not self.released.issuperset(tags):
            return await self._dies(f"KeyError: {tags}")
        else:
            self.released -= set(tags)
        return 200, b"null"

    async def _generate(self, request: dict[str, Any]) -> tuple[int, bytes]:
        if self.released:
            return await self._dies("a request without memory")
        self.begun.set()
        finish = "length"
        if self.held:
            aborted = self.running[request["rid"]] = asyncio.Event()
            await aborted.wait()
            self.running.pop(request["rid"], None)
            finish = "abort"
        return 200, generated(request, finish, weight_version=self.version)

    async def _dies(self, reason: str) -> tuple[int, bytes]:
        self.killed_by, self._open = reason, None
        return 0, b""


class Colocated:
    """Supervised engines, and a trainer that publishes to them as a run does."""

    def __init__(self, engine: SGLangEngine, servers: Sequence[Server], directory: Path) -> None:
        self.engine, self.servers, self.notes = engine, servers, list[str]()
        train: Any = {"parallel": {"world_size": len(servers)}}
        config = RunConfig(name="r", model=directory, engine=_config(len(servers)), train=train)
        self.sync = WeightSync(config.engine, config.model, engine, self, directory / "weights", self.notes.append)

    async def logprobs(self, samples: Sequence[Sample], *, replay: bool) -> Sequence[Sequence[float]]:
        return [[-0.5] * len(sample.tokens) for sample in samples]

    async def publish(self, engine_urls: Sequence[str], weight_version: str, gpus: Any = ()) -> PublishReport:
        """Publish as the trainer's rank 0: an engine that is dead, or has no memory for weights, gets none."""
        failures = {}
        for url in engine_urls:
            server = self.at(url)
            if server is None or Memory.WEIGHTS in server.released:
                failures[url] = f"{url}: no answer"
            else:
                server.done.append("publish")
                server.version = weight_version
        return PublishReport(failures)

    async def export(self, directory: Path) -> None:
        raise AssertionError("no engine lives that would read it")

    def at(self, url: str) -> Server | None:
        found = [name for name in self.engine.fleet.names if self.engine.fleet[name].url == url]
        alive = [server for server in self.servers if server.death() is None]
        return next((server for server in alive if f"engine-{self.servers.index(server)}" in found), None)

    async def wake(self, step: int) -> None:
        """Publish as the controller does."""
        await self.engine.sleep.resume_weights()
        await self.sync.publish(step)
        await self.engine.sleep.end()

    async def sample(self, session: str = "s") -> Completion:
        return await self.engine.generate([1, 2], SAMPLE, routes_from=0, session=session)

    async def rejoin(self) -> None:
        """Publish to the first engine once it waits for weights."""
        await self.engine.fleet.until(lambda fleet: fleet.waiting)
        await self.sync.join(self.engine.fleet["engine-0"].url)

    async def phase(self, phase: Phase) -> None:
        """Wait until the first engine is in ``phase``."""
        await self.engine.fleet.until(lambda fleet: fleet["engine-0"].phase is phase)


def _config(count: int) -> EngineConfig:
    timeouts = {"health_interval": 0.02, "start_timeout": 5.0, "weight_sync_timeout": 0.6}
    return EngineConfig(count=count, colocate=True, retries=3, **timeouts)


@asynccontextmanager
async def colocated(directory: Path, count: int = 1) -> AsyncIterator[Colocated]:
    """``count`` engines, with the weights of version 0."""
    config, servers = _config(count), [Server() for _ in range(count)]
    ours, fleet = {f"engine-{number}": server for number, server in enumerate(servers)}, Fleet(3)
    for name in ours:
        fleet.add(name)
    engine = SGLangEngine((), SPEC, config, fleet=fleet, servers=ours, backoff=0.01)
    supervising = EngineSupervisor(engine, ours, config)
    try:
        await supervising.open()
        run = Colocated(engine, servers, directory)
        await run.wake(0)
        for server in servers:
            server.done.clear()
            server.begun.clear()
        async with asyncio.timeout(5), run_alongside(supervising.run()):
            yield run
    finally:
        await supervising.close()
        await engine.close()


async def test_a_step_releases_all_memory_and_resumes_it_around_the_publish(tmp_path: Path) -> None:
    async with colocated(tmp_path, 2) as run:
        await run.engine.sleep.begin()
        assert [server.released for server in run.servers] == [{"weights", "kv_cache"}] * 2
        await run.engine.sleep.resume_weights()
        assert [server.released for server in run.servers] == [{"kv_cache"}] * 2
        await run.wake(1)
        for server in run.servers:
            assert server.done == [*WHOLE[:3], "publish", WHOLE[3]]
        assert (await run.sample()).weight_version == "1"
        metrics = run.engine.sleep.metrics()
        assert set(metrics) == {"time/engine_sleep", "time/engine_wake"}
        assert run.engine.sleep.metrics() == {}, "it did not sleep since"


async def test_requests_and_their_time_limits_wait_for_the_end_of_the_sleep(tmp_path: Path) -> None:
    async with colocated(tmp_path) as run:
        run.servers[0].held = True
        async with PausableTimeout(30.0) as limit:
            with run.engine.gate.uncharged(limit):
                running = asyncio.create_task(run.sample("running"))
                await run.servers[0].begun.wait()
                await run.engine.sleep.begin()
                assert (await running).interrupted
                assert limit.paused, "no time passes"
                run.servers[0].held = False
                waiting = [
                    asyncio.create_task(run.sample("later")),
                    asyncio.create_task(run.engine.prefill([1, 2], session="audit", afresh=True)),
                    asyncio.create_task(run.engine.rescore([1, 2], session="rescore")),
                ]
                await asyncio.sleep(0.1)
                assert not any(task.done() for task in waiting)
                async with run.engine.gate.closed():  # as a publish does
                    await run.wake(1)
                    assert not run.engine.gate.is_open
                for answer in await asyncio.gather(*waiting):
                    assert answer.weight_version == "1"  # type: ignore[attr-defined]
                assert not limit.paused
        assert run.servers[0].killed_by == ""


@pytest.mark.parametrize("how", ["refuse", "hang", "die"])
@pytest.mark.parametrize("entry", ["flush_cache", "release"])
async def test_an_engine_that_keeps_its_memory_is_stopped_and_restarted_when_the_others_wake(
    tmp_path: Path, entry: str, how: str
) -> None:
    async with colocated(tmp_path, 2) as run:
        first, second = run.servers
        first.fails[entry] = how
        await run.engine.sleep.begin()
        assert first.death() is not None, "it would hold the trainer's memory"
        assert run.engine.fleet["engine-0"].phase is Phase.DEAD
        assert "failed to release its memory" in run.engine.fleet["engine-0"].reason or how == "die"
        await asyncio.sleep(0.1)
        assert first.starts == 1, "nothing starts while the trainer has the memory"
        await run.wake(1)
        assert (await run.sample()).weight_version == "1"
        await run.rejoin()
        assert len(run.engine.fleet.in_use) == 2
        assert (first.starts, second.starts) == (2, 1)


@pytest.mark.parametrize("how", ["refuse", "hang", "die"])
@pytest.mark.parametrize("entry", WHOLE[2:])
async def test_an_engine_that_does_not_wake_is_restarted(tmp_path: Path, entry: str, how: str) -> None:
    async with colocated(tmp_path, 2) as run:
        first, second = run.servers
        await run.engine.sleep.begin()
        first.fails[entry] = how
        await run.wake(1)
        assert second.done == [*WHOLE[:3], "publish", WHOLE[3]]
        assert (await run.sample()).weight_version == "1"
        await run.rejoin()
        assert (first.starts, len(run.engine.fleet.in_use)) == (2, 2)
        assert entry not in first.done[first.done.index(entry) + 1 :], "a second resume would kill SGLang"


async def test_an_engine_that_dies_asleep_is_restarted_when_the_others_wake(tmp_path: Path) -> None:
    async with colocated(tmp_path) as run:
        (server,) = run.servers
        run.engine._router._wait_seconds = 0.1
        await run.engine.sleep.begin()
        await server.stop()
        await run.phase(Phase.DEAD)
        request = asyncio.create_task(run.sample())
        await asyncio.sleep(0.3)
        assert server.starts == 1
        assert not request.done(), "the limit is for an engine that is being started"
        run.engine._router._wait_seconds = 5.0
        request.cancel()
        request = asyncio.create_task(run.sample())
        await run.wake(1)
        await run.rejoin()
        assert server.starts == 2
        assert (await request).weight_version == "1"


async def test_an_engine_that_is_starting_is_stopped_before_the_sleep(tmp_path: Path) -> None:
    async with colocated(tmp_path, 2) as run:
        first = run.servers[0]
        first.starting.clear()
        await first.stop()
        await run.phase(Phase.STARTING)
        asleep = asyncio.create_task(run.engine.sleep.begin())
        await asyncio.sleep(0.1)
        assert not asleep.done()
        first.starting.set()
        await asleep
        assert (first.death(), run.engine.fleet["engine-0"].phase) == ("the engine server died", Phase.DEAD)
        await run.wake(1)
        await run.engine.fleet.until(lambda fleet: fleet.waiting)


async def test_a_sleep_without_any_engine_ends_the_run(tmp_path: Path) -> None:
    async with colocated(tmp_path) as run:
        for _ in range(4):
            run.engine.fleet.died("engine-0", "out of memory")
            run.engine.fleet.restart("engine-0")
        with pytest.raises(EngineLost, match="no engine is left"):
            await run.engine.sleep.begin()


async def test_a_sleeping_suspect_gets_no_health_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's ``/health`` samples a token, which needs the memory that the sleeping engine has released."""
    monkeypatch.setattr(supervisor, "_SUSPECT_SECONDS", 0.01)
    async with colocated(tmp_path) as run:
        await run.engine.sleep.begin()
        run.servers[0].paths.clear()
        run.engine.fleet.failed(run.engine.urls[0], "late")
        await run.phase(Phase.SERVING)
        assert "health" not in run.servers[0].paths


async def test_a_run_that_ends_asleep_stops_its_engines(tmp_path: Path) -> None:
    """As with Ctrl-C, also while one is falling asleep."""
    async with colocated(tmp_path) as run:
        await run.engine.sleep.begin()
    assert run.servers[0].death() is not None
    async with colocated(tmp_path) as run:
        run.servers[0].fails["release"] = "hang"
        asleep = asyncio.create_task(run.engine.sleep.begin())
        await run.servers[0].hanging.wait()
        asleep.cancel()
    assert run.servers[0].death() is not None


async def test_engines_stay_asleep_when_the_trainer_dies(tmp_path: Path) -> None:
    """The run begins anew, from its checkpoint; what it publishes first wakes the engines."""
    async with colocated(tmp_path) as run:
        await run.engine.sleep.begin()
        await run.engine.sleep.resume_weights()  # and the trainer dies in the publish
        await run.wake(1)
        assert run.servers[0].done == [*WHOLE[:3], "publish", WHOLE[3]]
        await run.engine.sleep.begin()
        await run.wake(2)
        assert (await run.sample()).weight_version == "2"


@pytest.mark.slow
async def test_a_launched_server_enables_its_memory_saver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = str(make_interpreter(tmp_path))
    config = EngineConfig(python=python, device="cuda", colocate=True)
    async with EngineServer(config, tmp_path, tmp_path / "engine.log"):
        assert "--enable-memory-saver" in (tmp_path / "starts").read_text().split()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    without = EngineServer(config.model_copy(update={"device": "auto"}), tmp_path, tmp_path / "engine.log")
    with pytest.raises(ConfigError, match=r"^engine\.colocate: this machine has no GPU to share with the trainer"):
        await without.start()


@pytest.mark.sglang
async def test_sglang_keeps_the_protocol_on_a_cpu_where_it_frees_nothing(
    model: Path, engine_config: EngineConfig, second_server: EngineServer
) -> None:
    """SGLang 0.5.23 without its memory saver, which needs a GPU: it takes every call."""
    if second_server.death() is not None:
        await second_server.start()
    url, tokens = second_server.url, list(range(32))
    fleet = Fleet()
    fleet.add("second", url)
    fleet.up("second", url)
    config = engine_config.model_copy(update={"colocate": True})
    servers = {"second": second_server}
    async with SGLangEngine((), read_model_spec(model), config, fleet=fleet, servers=servers) as engine:
        fleet.admitted("second")
        before = await engine.score(tokens)
        long = SamplingParams(max_new_tokens=1500, temperature=0.0)
        running = asyncio.create_task(engine.generate(tokens, long, routes_from=0, session="s"))
        await until_running(url)
        held = resident(second_server)
        await engine.sleep.begin()
        assert (await running).interrupted
        assert resident(second_server) > 0.9 * held, "the memory of a CPU is not released"
        await engine.sleep.resume_weights()
        await engine.sleep.resume_cache(url)
        assert await engine.score(tokens) == before
        await engine.sleep.end()
        assert set(engine.sleep.metrics()) == {"time/engine_sleep", "time/engine_wake"}
        assert fleet["second"].phase is Phase.SERVING


async def until_running(url: str) -> None:
    async with AsyncHttp(5.0) as http:
        while not (await http.get_json(f"{url}/v1/loads"))["loads"][0]["num_running_reqs"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def resident(server: EngineServer) -> int:
    """Bytes of memory of all processes of a server."""
    assert server.pid is not None
    pages = (Path(f"/proc/{pid}/statm").read_text().split()[1] for pid in group_members(server.pid))
    return sum(map(int, pages)) * os.sysconf("SC_PAGE_SIZE")
