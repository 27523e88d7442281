"""Engines that die and come back, as processes of their own: no request is lost, none answered from other weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from standin import StandIn

from agent_rl.config import EngineConfig, parse_addresses
from agent_rl.engine import supervisor as keeper
from agent_rl.engine.factory import open_engine
from agent_rl.engine.fleet import Fleet, Phase
from agent_rl.engine.launch import free_port
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.engine.supervisor import EngineSupervisor, phase_change
from agent_rl.errors import EngineLost, UserError
from agent_rl.models.spec import ModelSpec
from agent_rl.types import Completion, SamplingParams
from agent_rl.utils.concurrency import run_alongside
from agent_rl.utils.http import AsyncHttp

FACTS = ModelSpec(
    "qwen3_moe", moe=(False, True, True), hidden=8, heads=2, kv_heads=1, head_dim=4, inner=8, vocab_size=100,
    max_positions=64, num_experts=8, top_k=2,
)  # fmt: skip
SAMPLE = SamplingParams(max_new_tokens=2)


class Kept:
    """A fleet of stand-ins that is looked after; ``notes``: what a user is told."""

    def __init__(self, engine: SGLangEngine, servers: Mapping[str, StandIn]) -> None:
        self.engine, self.servers, self.notes = engine, servers, list[str]()
        engine.fleet.listeners.append(lambda before, after: self.notes.append(phase_change(before, after) or ""))

    async def publish(self, version: str, *urls: str) -> None:
        """As a weight update does it, to all engines in use or to those at ``urls``."""
        self.engine.fleet.publishing(version)
        async with AsyncHttp(5.0) as http:
            for url in urls or self.engine.fleet.in_use:
                await http.post(f"{url}/set_version", {"version": version})
                self.engine.fleet.published(url)
        self.engine.fleet.settled()

    async def welcome(self, version: str) -> None:
        """Publish to whoever waits for it."""
        while True:
            url, *_ = await self.engine.fleet.until(lambda fleet: fleet.waiting)
            await self.publish(version, url)

    async def sample(self, session: str) -> Completion:
        return await self.engine.generate([1, 2], SAMPLE, routes_from=0, session=session)

    async def phase(self, name: str, *phases: Phase) -> None:
        async with asyncio.timeout(20):
            await self.engine.fleet.until(lambda fleet: fleet[name].phase in phases)


@asynccontextmanager
async def kept(
    directory: Path, *, ours: int, given: int = 0, starts: int = 100, restarts: int = 3
) -> AsyncIterator[Kept]:
    """Stand-ins that the keeper starts (``engine-N``) and such that it is given by address."""
    config = EngineConfig(health_interval=0.1, restarts=restarts, start_timeout=5.0, weight_sync_timeout=5.0)
    servers = {f"engine-{n}": StandIn(free_port(), directory, starts=starts) for n in range(ours)}
    others = [StandIn(free_port(), directory) for _ in range(given)]
    fleet = Fleet(config.restarts)
    for name in (*servers, *(await asyncio.gather(*(other.start() for other in others)))):
        fleet.add(name, "" if name in servers else name)
    engine = SGLangEngine((), FACTS, config, fleet=fleet, backoff=0.01)
    keeper = EngineSupervisor(engine, servers, config)
    try:
        await keeper.open()
        async with run_alongside(keeper.run()):
            yield Kept(engine, servers | {other.url: other for other in others})
    finally:
        await keeper.close()
        await engine.close()
        for other in others:
            await other.stop()


async def test_one_that_dies_is_started_again_and_joins_by_a_publish(tmp_path: Path) -> None:
    async with kept(tmp_path, ours=2) as fleet:
        await fleet.publish("1")
        fleet.servers["engine-0"].kill()
        got = await asyncio.gather(*(fleet.sample(f"s{n}") for n in range(20)))
        assert {(each.engine, each.weight_version) for each in got} == {(fleet.servers["engine-1"].url, "1")}
        async with asyncio.timeout(20):
            assert await fleet.engine.fleet.until(lambda fleet: fleet.waiting) == (fleet.servers["engine-0"].url,)
        assert (await fleet.sample("new")).weight_version == "1"
        await fleet.publish("1", fleet.servers["engine-0"].url)
        assert (await fleet.sample("newer")).engine == fleet.servers["engine-0"].url, "it has the fewest sessions"
    told = [note for note in fleet.notes if note]
    assert told[0] == f"engine engine-0 ({fleet.servers['engine-0'].url}) is out of use: the engine server died"
    assert [note.rpartition(") ")[2] for note in told[1:]] == ["is restarting", "serves again"]


async def test_the_only_one_is_waited_for(tmp_path: Path) -> None:
    """Requests that run while it dies, and those that come later, are answered by the one that comes back."""
    async with kept(tmp_path, ours=1) as fleet:
        await fleet.publish("1")
        (tmp_path / "seconds").write_text("30")
        running = [asyncio.create_task(fleet.sample(f"s{n}")) for n in range(4)]
        await asyncio.sleep(0.1)  # they are with the server, or on their way to it
        (tmp_path / "seconds").unlink()
        fleet.servers["engine-0"].kill()
        async with run_alongside(fleet.welcome("1")):
            got = [*await asyncio.gather(*running), await fleet.sample("later")]
        assert {each.weight_version for each in got} == {"1"}
        assert fleet.engine.fleet.metrics()["engines/deaths"] == 1


async def test_a_supervisors_restart_is_noticed_before_a_token_is_used(tmp_path: Path) -> None:
    """The first request finds it out: the poller is kept from being faster by a question that is never due."""
    config = EngineConfig(health_interval=600.0)
    server, other = StandIn(free_port(), tmp_path), StandIn(free_port(), tmp_path)
    fleet = Fleet(restarts=3)
    for url in (await server.start(), await other.start()):
        fleet.add(url, url)
    engine = SGLangEngine((), FACTS, config, fleet=fleet, backoff=0.01)
    keeper = EngineSupervisor(engine, {}, config)
    await keeper.open()
    watched = Kept(engine, {})
    await watched.publish("4")
    got = [await watched.sample(session) for session in "ab"]
    assert [each.engine for each in got] == [server.url, other.url]
    server.kill()
    await server.start()  # with base weights, at the same address
    answered = await watched.sample("a")
    assert (answered.engine, answered.weight_version) == (other.url, "4")
    assert fleet[server.url].phase is Phase.JOINING
    assert watched.notes[-1] == (
        f"engine {server.url} waits for the published weights: {server.url} answers from weights 'default', "
        "not '4': it was restarted"
    )
    assert (tmp_path / f"{server.port}.answers").read_text().endswith(" default\n"), "it did answer"
    await keeper.close()
    await engine.close()
    for each in (server, other):
        await each.stop()


async def test_the_poller_finds_base_weights_without_any_request(tmp_path: Path) -> None:
    async with kept(tmp_path, ours=0, given=2) as fleet:
        await fleet.publish("4")
        url, (name, server) = fleet.engine.urls[0], next(iter(fleet.servers.items()))
        server.kill()
        await server.start()
        await fleet.phase(name, Phase.JOINING)
        async with run_alongside(fleet.welcome("4")):
            await fleet.phase(name, Phase.SERVING)
        assert fleet.engine.urls[0] == url
        assert {(await fleet.sample(f"s{n}")).weight_version for n in range(6)} == {"4"}


async def test_one_that_keeps_dying_is_retired_and_the_others_go_on(tmp_path: Path) -> None:
    async with kept(tmp_path, ours=2, restarts=2) as fleet:
        await fleet.publish("1")
        async with run_alongside(fleet.welcome("1")):
            for _ in range(3):
                await fleet.phase("engine-1", Phase.SERVING)
                fleet.servers["engine-1"].kill()
                await fleet.phase("engine-1", Phase.DEAD, Phase.STARTING, Phase.RETIRED)
            await fleet.phase("engine-1", Phase.RETIRED)
            assert (await fleet.sample("s")).engine == fleet.servers["engine-0"].url
    assert fleet.notes[-1] == f"engine engine-1 ({fleet.servers['engine-1'].url}) is retired: the engine server died"


async def test_where_none_can_be_started_the_reason_is_told(tmp_path: Path) -> None:
    async with kept(tmp_path, ours=1, starts=1, restarts=1) as fleet:
        await fleet.publish("1")
        fleet.servers["engine-0"].kill()
        with pytest.raises(EngineLost, match="no engine is left: out of memory"):
            await fleet.sample("s")


async def test_lines_of_a_file_add_engines_and_take_them_away(tmp_path: Path) -> None:
    first, second = StandIn(free_port(), tmp_path), StandIn(free_port(), tmp_path)
    urls = [await first.start(), await second.start()]
    file = tmp_path / "urls"
    file.write_text(f"# engines\n{urls[0]}/\n")
    config = EngineConfig(urls_file=file, health_interval=0.1)
    async with open_engine(config, tmp_path, FACTS, tmp_path) as engine, asyncio.timeout(20):
        assert engine.urls == (urls[0],)
        file.write_text("\n".join(urls))
        await engine.fleet.until(lambda fleet: len(fleet.in_use) == 2)
        file.write_text(urls[1])
        await engine.fleet.until(lambda fleet: fleet.in_use == (urls[1],))
        file.write_text("\n".join(urls))
        await engine.fleet.until(lambda fleet: len(fleet.in_use) == 2)
    for server in (first, second):
        await server.stop()


async def test_a_file_that_is_being_written_takes_no_engine_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, file, looked = StandIn(free_port(), tmp_path), tmp_path / "urls", asyncio.Event()

    def watched(text: str) -> Sequence[str]:
        if not text:
            looked.set()
        return parse_addresses(text)

    monkeypatch.setattr(keeper, "parse_addresses", watched)
    file.write_text(await server.start())
    config = EngineConfig(urls_file=file, health_interval=0.02)
    async with open_engine(config, tmp_path, FACTS, tmp_path) as engine, asyncio.timeout(20):
        file.write_text("")
        await looked.wait()
        assert engine.urls == (server.url,)
    await server.stop()


async def test_an_engine_whose_line_comes_back_has_one_keeper(tmp_path: Path) -> None:
    """The one before may still wait for the answer to a question, which then would have counted twice."""
    server, file, asked = StandIn(free_port(), tmp_path), tmp_path / "urls", asyncio.Event()
    file.write_text(await server.start())
    silent = await asyncio.start_server(lambda reader, writer: asked.set(), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    config = EngineConfig(urls_file=file, health_interval=0.02)
    async with open_engine(config, tmp_path, FACTS, tmp_path) as engine, asyncio.timeout(20):
        file.write_text(f"{server.url}\n{url}")
        await asked.wait()
        file.write_text(server.url)
        await engine.fleet.until(lambda fleet: fleet[url].phase is Phase.RETIRED)
        file.write_text(f"{server.url}\n{url}")
        while engine.fleet[url].phase is Phase.RETIRED:  # noqa: ASYNC110 no listener is told that an engine was added
            await asyncio.sleep(0.01)
        assert [task.get_name() for task in asyncio.all_tasks()].count(f"supervise-{url}") == 1
    silent.close()
    await server.stop()


async def test_a_file_without_addresses_is_a_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# none yet\n")
    for name, told in (("none", "none: No such file"), ("empty", "empty contains no URL")):
        with pytest.raises(UserError, match=rf"^engine.urls_file: {tmp_path}/{told}"):
            async with open_engine(EngineConfig(urls_file=tmp_path / name), tmp_path, FACTS, tmp_path):
                pass
    assert parse_addresses(" http://a/ # first\n\nhttp://b\nhttp://a\n") == ["http://a", "http://b"]
