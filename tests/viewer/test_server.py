"""The viewer's server: resources, refused requests, and events of changes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing

import httpx
import pytest
from support.viewer_samples import SampleRun, SampleSource, Served

from agent_rl.errors import UserError
from agent_rl.utils.concurrency import run_alongside
from agent_rl.viewer import server
from agent_rl.viewer.server import Changes, affected, listen

SOURCE = SampleSource(SampleRun())


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(SOURCE) as started:
        yield started


def test_the_page_and_its_resources(served: Served) -> None:
    page = httpx.get(served.address)
    assert '<script src="app.js" defer>' in page.text
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert httpx.get(f"{served.address}/app.js").headers["content-type"].startswith("text/javascript")
    assert httpx.get(f"{served.address}/api/0/t/1-3").json()["id"] == "1-3"
    absent = httpx.get(f"{served.address}/api/0/nothing")
    assert absent.status_code == 404
    assert absent.json()["error"]["kind"] == "unknown"


def test_an_answer_is_sent_at_once(served: Served) -> None:
    """Without TCP_NODELAY, its body waits 40 ms for the client to acknowledge its head."""
    with httpx.Client(base_url=served.address) as client:
        seconds = [client.get("/api/runs").elapsed.total_seconds() for _ in range(60)]
    # A connection's first answers are acknowledged at once. On a loaded machine single answers take longer.
    assert min(seconds[20:]) < 0.03


def test_the_built_files_are_small() -> None:
    assert sum(path.stat().st_size for path in server.STATIC.iterdir()) <= 160_000


@pytest.mark.parametrize("path", ["/", "/app.js", "/api/runs", "/api/changes"])
def test_a_request_that_names_another_host_is_refused(served: Served, path: str) -> None:
    """Else a page from elsewhere whose name resolves to this machine could read the run."""
    assert httpx.get(f"{served.address}{path}", headers={"host": "evil.example"}).status_code == 400


def test_only_reading_is_possible(served: Served) -> None:
    assert httpx.post(f"{served.address}/api/runs").status_code == 405
    assert httpx.get(f"{served.address}/../pyproject.toml").status_code == 404


def test_a_port_that_is_taken_is_one_line() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port}: Address already in use; choose another, or 0"):
            listen(port)


def test_fifty_listeners_hear_of_a_change(served: Served) -> None:
    async def one(client: httpx.AsyncClient, ready: asyncio.Semaphore) -> str:
        async with client.stream("GET", f"{served.address}/api/changes") as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ": listening"
            ready.release()
            return await anext(line async for line in lines if line.startswith("data:"))

    async def all_of_them() -> set[str]:
        ready = asyncio.Semaphore(0)
        async with httpx.AsyncClient(timeout=20, limits=httpx.Limits(max_connections=60)) as client:
            tasks = [asyncio.create_task(one(client, ready)) for _ in range(50)]
            for _ in tasks:
                await ready.acquire()
            SOURCE.revisions["0/live"] = "changed"
            return set(await asyncio.gather(*tasks))

    assert asyncio.run(all_of_them()) == {'data: ["0/live"]'}


def test_a_listener_that_leaves_is_forgotten() -> None:
    async def listen_and_leave() -> int:
        changes = Changes(SampleSource())
        events = changes.events()
        await anext(events)
        await events.aclose()
        return len(changes._listeners)

    assert asyncio.run(listen_and_leave()) == 0


async def test_the_disk_is_read_only_while_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "POLL_SECONDS", 0.001)
    looks, source = list[Mapping[str, str]](), SampleSource()
    loop, looked = asyncio.get_running_loop(), asyncio.Event()

    class Counted(SampleSource):
        def stamps(self) -> dict[str, str]:
            looks.append(found := source.stamps())
            loop.call_soon_threadsafe(looked.set)
            return found

    changes = Changes(Counted())
    async with run_alongside(changes.watch()):
        await asyncio.wait_for(looked.wait(), 10)
        await asyncio.sleep(0.05)  # as long as fifty looks would take
        assert len(looks) == 1
        source.revisions["0/live"] = "changed"
        events = changes.events()
        await anext(events)
        assert await anext(events) == b'data: ["0/live"]\n\n'
        await events.aclose()


def test_a_step_changes_the_lists_that_it_is_in() -> None:
    """Among them the list of runs: each sample of an evaluation changes its Pass@1 there."""
    changed = ["0/loads/2", "0/run", "0/steps/2", "0/trajectories", "runs"]
    assert affected({"0/steps/1": "a"}, {"0/steps/1": "a", "0/steps/2": "b"}) == changed
    assert affected({"1/run": "a"}, {"1/run": "b"}) == ["1/run", "runs"]
    assert affected({"0/metrics": "a"}, {"0/metrics": "b"}) == ["0/metrics", "0/run", "runs"]
    assert affected({"0/live": "a"}, {}) == ["0/live"]
