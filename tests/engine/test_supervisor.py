"""Engines that die and come back, each in its own process: no request is lost or sampled from other weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fake_server import FakeServer
from support.fake_sglang import SPEC

from agent_rl.config import EngineConfig, parse_addresses
from agent_rl.engine import supervisor
from agent_rl.engine.factory import open_engine
from agent_rl.engine.fleet import Fleet, Phase
from agent_rl.engine.launch import free_port
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.engine.supervisor import EngineSupervisor, phase_change
from agent_rl.errors import EngineLost, UserError
from agent_rl.types import Completion, SamplingParams
from agent_rl.utils.concurrency import run_alongside
from agent_rl.utils.http import AsyncHttp

SAMPLE = SamplingParams(max_new_tokens=2)


class Supervised:
    """Supervised fake engines; ``notes`` are the lines that a user reads."""

    def __init__(self, engine: SGLangEngine, servers: Mapping[str, FakeServer]) -> None:
        self.engine, self.fleet, self.servers, self.notes = engine, engine.fleet, servers, list[str]()
        self.fleet.listeners.append(lambda before, after: self.notes.append(phase_change(before, after) or ""))

    async def publish(self, version: str, *urls: str) -> None:
        """Publish as a weight update does, to all engines in use or to those at ``urls``."""
        self.fleet.publishing(version)
        async with AsyncHttp(5.0) as http:
            for url in urls or self.fleet.in_use:
                await http.post(f"{url}/set_version", {"version": version})
                self.fleet.published(url)
        self.fleet.settled()

    async def publish_to_waiting(self, version: str) -> None:
        while True:
            url, *_ = await self.fleet.until(lambda fleet: fleet.waiting)
            await self.publish(version, url)

    async def sample(self, session: str) -> Completion:
        return await self.engine.generate([1, 2], SAMPLE, routes_from=0, session=session)

    async def phase(self, name: str, *phases: Phase) -> None:
        async with asyncio.timeout(20):
            await self.fleet.until(lambda fleet: fleet[name].phase in phases)


@asynccontextmanager
async def external(directory: Path, count: int) -> AsyncIterator[Sequence[FakeServer]]:
    """Running servers that no supervisor of ours restarts."""
    servers = [FakeServer(free_port(), directory) for _ in range(count)]
    await asyncio.gather(*(server.start() for server in servers))
    try:
        yield servers
    finally:
        for server in servers:
            await server.stop()


@asynccontextmanager
async def supervised(
    directory: Path, *, ours: int = 0, given: int = 0, starts: int = 100, restarts: int = 3, interval: float = 0.1
) -> AsyncIterator[Supervised]:
    """Engines that the supervisor starts (``engine-N``) and engines that are given by address."""
    config = EngineConfig(health_interval=interval, restarts=restarts, start_timeout=5.0, weight_sync_timeout=5.0)
    servers = {f"engine-{n}": FakeServer(free_port(), directory, starts=starts) for n in range(ours)}
    async with external(directory, given) as others:
        by_url = {server.url: server for server in others}
        fleet = Fleet(config.restarts)
        for name in (*servers, *by_url):
            fleet.add(name, name if name in by_url else "")
        async with SGLangEngine((), SPEC, config, fleet=fleet, backoff=0.01) as engine:
            supervising = EngineSupervisor(engine, servers, config)
            try:
                await supervising.open()
                async with run_alongside(supervising.run()):
                    yield Supervised(engine, servers | by_url)
            finally:
                await supervising.close()


async def test_a_dead_engine_is_restarted_and_joins_by_a_publish(tmp_path: Path) -> None:
    async with supervised(tmp_path, ours=2) as run:
        await run.publish("1")
        run.servers["engine-0"].kill()
        got = await asyncio.gather(*(run.sample(f"s{n}") for n in range(20)))
        assert {(each.engine, each.weight_version) for each in got} == {(run.servers["engine-1"].url, "1")}
        async with asyncio.timeout(20):
            assert await run.fleet.until(lambda fleet: fleet.waiting) == (run.servers["engine-0"].url,)
        assert (await run.sample("new")).weight_version == "1"
        await run.publish("1", run.servers["engine-0"].url)
        assert (await run.sample("newer")).engine == run.servers["engine-0"].url, "it has the fewest sessions"
    notes = [note for note in run.notes if note]
    assert notes[0] == f"engine engine-0 ({run.servers['engine-0'].url}) is out of use: the engine server died"
    assert [note.rpartition(") ")[2] for note in notes[1:]] == ["is restarting", "serves again"]


async def test_requests_wait_for_the_only_engine(tmp_path: Path) -> None:
    async with supervised(tmp_path, ours=1) as run:
        await run.publish("1")
        (tmp_path / "seconds").write_text("30")
        running = [asyncio.create_task(run.sample(f"s{n}")) for n in range(4)]
        await asyncio.sleep(0.1)  # they are with the server, or on their way to it
        (tmp_path / "seconds").unlink()
        run.servers["engine-0"].kill()
        async with run_alongside(run.publish_to_waiting("1")):
            got = [*await asyncio.gather(*running), await run.sample("later")]
        assert {each.weight_version for each in got} == {"1"}
        assert run.fleet.metrics()["engines/deaths"] == 1


async def test_a_restart_by_others_is_noticed_before_a_token_is_used(tmp_path: Path) -> None:
    """By the first request: the supervisor's next check is 600 s away."""
    async with supervised(tmp_path, given=2, interval=600.0) as run:
        await run.publish("4")
        first, second = [(await run.sample(session)).engine for session in "ab"]
        server = run.servers[first]
        server.kill()
        await server.start()  # with base weights, at the same address
        got = await run.sample("a")
        assert (got.engine, got.weight_version) == (second, "4")
        assert run.fleet[first].phase is Phase.JOINING
        reason = f"{first} answers from weights 'default', not '4': it was restarted"
        assert f"engine {first} waits for the published weights: {reason}" in run.notes
        assert (tmp_path / f"{server.port}.answers").read_text().endswith(" default\n"), "it did respond"


async def test_base_weights_are_found_without_any_request(tmp_path: Path) -> None:
    async with supervised(tmp_path, ours=0, given=2) as run:
        await run.publish("4")
        url, (name, server) = run.engine.urls[0], next(iter(run.servers.items()))
        server.kill()
        await server.start()
        await run.phase(name, Phase.JOINING)
        async with run_alongside(run.publish_to_waiting("4")):
            await run.phase(name, Phase.SERVING)
        assert run.engine.urls[0] == url
        assert {(await run.sample(f"s{n}")).weight_version for n in range(6)} == {"4"}


async def test_an_engine_that_keeps_dying_is_retired_and_the_others_go_on(tmp_path: Path) -> None:
    async with supervised(tmp_path, ours=2, restarts=2) as run:
        await run.publish("1")
        async with run_alongside(run.publish_to_waiting("1")):
            for _ in range(3):
                await run.phase("engine-1", Phase.SERVING)
                run.servers["engine-1"].kill()
                await run.phase("engine-1", Phase.DEAD, Phase.STARTING, Phase.RETIRED)
            await run.phase("engine-1", Phase.RETIRED)
            assert (await run.sample("s")).engine == run.servers["engine-0"].url
    assert run.notes[-1] == f"engine engine-1 ({run.servers['engine-1'].url}) is retired: the engine server died"


async def test_an_engine_that_cannot_start_gives_its_reason(tmp_path: Path) -> None:
    async with supervised(tmp_path, ours=1, starts=1, restarts=1) as run:
        await run.publish("1")
        run.servers["engine-0"].kill()
        with pytest.raises(EngineLost, match="no engine is left: out of memory"):
            await run.sample("s")


@asynccontextmanager
async def opened_from_file(directory: Path, count: int = 1) -> AsyncIterator[tuple[SGLangEngine, Path, list[str]]]:
    """An engine client whose file of addresses lists the first of ``count`` servers; the file, and all addresses."""
    file = directory / "urls"
    async with external(directory, count) as servers, asyncio.timeout(20):
        file.write_text(f"# engines\n{servers[0].url}/\n")
        config = EngineConfig(urls_file=file, health_interval=0.02)
        async with open_engine(config, directory, SPEC, directory) as engine:
            assert engine.urls == (servers[0].url,)
            yield engine, file, [server.url for server in servers]


async def test_lines_of_a_file_add_and_remove_engines(tmp_path: Path) -> None:
    async with opened_from_file(tmp_path, 2) as (engine, file, urls):
        for lines in (urls, urls[1:], urls):
            file.write_text("\n".join(lines))
            await engine.fleet.until(lambda fleet, lines=lines: set(fleet.in_use) == set(lines))


async def test_a_file_that_is_being_written_removes_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_empty = asyncio.Event()

    def watched(text: str) -> Sequence[str]:
        if not text:
            read_empty.set()
        return parse_addresses(text)

    monkeypatch.setattr(supervisor, "parse_addresses", watched)
    async with opened_from_file(tmp_path) as (engine, file, urls):
        file.write_text("")
        await read_empty.wait()
        assert engine.urls == tuple(urls)


async def test_an_engine_whose_line_comes_back_has_one_supervisor(tmp_path: Path) -> None:
    """The previous one may still wait for a response, whose failure would count twice."""
    connected = asyncio.Event()
    silent = await asyncio.start_server(lambda reader, writer: connected.set(), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    async with opened_from_file(tmp_path) as (engine, file, urls):
        file.write_text(f"{urls[0]}\n{url}")
        await connected.wait()
        file.write_text(urls[0])
        await engine.fleet.until(lambda fleet: fleet[url].phase is Phase.RETIRED)
        file.write_text(f"{urls[0]}\n{url}")
        while engine.fleet[url].phase is Phase.RETIRED:  # noqa: ASYNC110 adding an engine notifies no listener
            await asyncio.sleep(0.01)
        assert [task.get_name() for task in asyncio.all_tasks()].count(f"supervise-{url}") == 1
    silent.close()


async def test_a_file_without_addresses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# none yet\n")
    for name, message in (("none", "none: No such file"), ("empty", "empty contains no URL")):
        with pytest.raises(UserError, match=rf"^engine.urls_file: {tmp_path}/{message}"):
            async with open_engine(EngineConfig(urls_file=tmp_path / name), tmp_path, SPEC, tmp_path):
                pass
    assert parse_addresses(" http://a/ # first\n\nhttp://b\nhttp://a\n") == ["http://a", "http://b"]
