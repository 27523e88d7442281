"""A hostile agent program at the endpoint: other sessions stay theirs and are served, and the controller lives."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from support.endpoint_sessions import CHAT, HELLO, MODEL, rendering, served

from agent_rl.endpoint.messages import MAX_BODY
from agent_rl.endpoint.session import Session
from agent_rl.render import ChatRenderer
from tests.redteam.attack import report_stopped

pytestmark = pytest.mark.redteam
BODY = json.dumps({"messages": HELLO}).encode()


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return ChatRenderer(MODEL)


@asynccontextmanager
async def attacked(renderer: ChatRenderer) -> AsyncIterator[SimpleNamespace]:
    """The program's own session (``session``), and another one that it attacks (``other``)."""
    async with served(renderer, "one", "two", max_turns=500) as opened:
        own = opened.session
        opened.served = 0
        opened.other = Session("other", own.engine, rendering(renderer), own.rules, context=4000)
        async with opened.endpoint.serving(opened.other):
            yield opened


async def raw(opened: Any, *parts: bytes, wait: float = 0.3) -> bytes:
    """What the endpoint sends for the bytes of ``parts``."""
    reader, writer = await asyncio.open_connection("127.0.0.1", opened.endpoint.port)
    try:
        with suppress(OSError):
            for part in parts:
                writer.write(part)
                await writer.drain()
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(wait):
                return await reader.read(1 << 16)
        return b""
    finally:
        writer.close()


def request(key: str, body: bytes = BODY, *headers: bytes, path: str = CHAT, prefix: str = "/s/") -> bytes:
    lines = [f"POST {prefix}{key}{path} HTTP/1.1".encode(), b"host: x", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def statuses(opened: Any, keys: list[str]) -> set[int]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{opened.endpoint.port}") as client:
        return {
            (await client.post(f"/s/{key}{CHAT}", content=BODY, headers={"x-api-key": key})).status_code for key in keys
        }


async def guess_keys(opened: Any) -> object:
    guesses = [f"{number:032x}" for number in range(20)]
    return await statuses(opened, guesses)


async def guess_parts_of_a_key(opened: Any) -> object:
    key = opened.other.key
    return await statuses(opened, [key[:-1], key[:16], key + "0", key.upper() + "x", "%30" + key[1:-1]])


async def leave_the_own_path(opened: Any) -> object:
    paths = [f"{opened.session.key}/../x", f"{opened.session.key}%2f..%2fx", f"{opened.session.key}/sandbox/../../x"]
    return [(await raw(opened, request(path)))[9:12] for path in paths]


async def name_another_by_header(opened: Any) -> object:
    """Its own address counts; the header names another session, by a name that is no secret."""
    headers = (b"x-session: other", b"authorization: Bearer other", b"x-api-key: other", b"cookie: session=other")
    return (await raw(opened, request("other", BODY, *headers)))[9:12]


async def smuggle_a_request(opened: Any) -> object:
    inner = request("x" * 32)
    body = b"0\r\n\r\n" + inner
    head = f"POST /s/{opened.session.key}{CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n".encode()
    return (await raw(opened, head + b"transfer-encoding: chunked\r\n\r\n" + body))[9:12]


async def send_another_protocol(opened: Any) -> object:
    hello = b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0" * 4096, b"GET\r\n\r\n"
    return [(await raw(opened, each))[9:12] for each in hello]


async def send_endless_headers(opened: Any) -> object:
    return (await raw(opened, b"GET / HTTP/1.1\r\n", *[b"x: " + b"y" * 60_000 + b"\r\n"] * 99))[9:12]


async def send_an_endless_line(opened: Any) -> object:
    return (await raw(opened, b"GET /", *[b"y" * 60_000] * 99))[9:12]


async def upgrade_to_a_websocket(opened: Any) -> object:
    head = f"GET /s/{opened.session.key}{CHAT} HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n"
    return (await raw(opened, head.encode()))[9:12]


async def declare_a_terabyte(opened: Any) -> object:
    head = f"POST /s/{opened.session.key}{CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {1 << 40}\r\n\r\n{{"
    return (await raw(opened, head.encode()))[9:12]


async def hold_many_large_bodies(opened: Any) -> object:
    """Each lacks its last byte, so that the endpoint keeps what it has read."""
    head = f"POST /s/{opened.session.key}{CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {MAX_BODY}\r\n\r\n".encode()

    async def hold() -> None:
        await raw(opened, head, *[b" " * (1 << 20)] * ((MAX_BODY >> 20) - 1), wait=6.0)

    holding = [asyncio.create_task(hold()) for _ in range(60)]
    await asyncio.wait(holding, timeout=4)
    await check_other(opened)
    for task in holding:
        task.cancel()
    await asyncio.wait(holding)
    return "few bodies of a session are read at once"


async def hold_many_connections(opened: Any) -> object:
    connections = [await asyncio.open_connection("127.0.0.1", opened.endpoint.port) for _ in range(800)]
    for _, writer in connections[:400]:
        writer.write(b"POST /s/")
    await check_other(opened)
    for _, writer in connections:
        writer.close()
    return "others are served beside 800 connections"


async def leave_at_once(opened: Any) -> object:
    for _ in range(200):
        await raw(opened, request(opened.session.key), wait=0.001)
    return f"{len(opened.session.tree.nodes)} replies for 200 requests"


async def pipeline_requests(opened: Any) -> object:
    return (await raw(opened, request(opened.session.key) * 200, wait=2.0))[9:12]


async def replay_a_reply_of_another(opened: Any) -> object:
    """It names the id of another session's reply as its own history."""
    url = f"http://127.0.0.1:{opened.endpoint.port}/s/{opened.other.key}"
    async with httpx.AsyncClient() as client:
        reply = (await client.post(url + CHAT, content=BODY)).json()
        opened.served += 1
    forged = {**reply["choices"][0]["message"], "id": reply["id"]}
    await opened.post(CHAT, messages=[*HELLO, forged, {"role": "user", "content": "more"}])
    trained = [node.context.tolist() for node in opened.session.tree.nodes]
    assert not any(node in opened.other.tree.nodes for node in opened.session.tree.nodes)
    return f"a text of its own prompt: {len(trained)} reply of its own"


async def post_bodies(opened: Any, *bodies: object) -> list[int]:
    contents = [body if isinstance(body, bytes) else json.dumps(body).encode() for body in bodies]
    return [(await opened.client.post(CHAT, content=content)).status_code for content in contents]


async def nest_messages(opened: Any) -> object:
    return await post_bodies(opened, b"[" * 100_000, b'{"messages":' + b"[" * 100_000, b'{"a":' * 50_000)


async def send_many_messages(opened: Any) -> object:
    return await post_bodies(opened, {"messages": HELLO * 50_000})


async def send_a_text_of_thirty_megabytes(opened: Any) -> object:
    waiting = asyncio.create_task(post_bodies(opened, {"messages": [{"role": "user", "content": "a b " * 7_500_000}]}))
    slowest = 0.0
    while not waiting.done():
        began = time.perf_counter()
        await asyncio.sleep(0.01)
        slowest = max(slowest, time.perf_counter() - began)
    assert slowest < 5, "the event loop stood still"
    return waiting.result(), f"the event loop waited {slowest:.2f} s at most"


async def send_many_tools(opened: Any) -> object:
    tool = {"type": "function", "function": {"name": "x", "parameters": {"type": "object"}}}
    return await post_bodies(opened, {"messages": HELLO, "tools": [tool] * 20_000})


async def ask_for_impossible_samples(opened: Any) -> object:
    limits = [{"max_tokens": value} for value in (-1, 0, 10**30, 1.5, "x", None, True)]
    fields = [*limits, {"n": 10**6}, {"stop": [""] * 999}]
    return await post_bodies(opened, *({"messages": HELLO, **each} for each in fields))


async def call_tools_that_are_not_its_own(opened: Any) -> object:
    url = f"http://127.0.0.1:{opened.endpoint.port}/s/guess/sandbox/call"
    async with httpx.AsyncClient() as client:
        guessed = await client.post(url, json={"name": "bash", "arguments": {"command": "id"}})
        own = await client.post(f"{opened.url}/sandbox/call", json={"name": "submit", "arguments": {}})
    return guessed.status_code, own.status_code


ATTACKS: dict[str, Callable[[Any], Awaitable[object]]] = {
    "guesses keys": guess_keys,
    "guesses parts of a key": guess_parts_of_a_key,
    "leaves its own path": leave_the_own_path,
    "names another session by a header": name_another_by_header,
    "smuggles a request behind a body": smuggle_a_request,
    "sends another protocol": send_another_protocol,
    "sends endless headers": send_endless_headers,
    "sends an endless line": send_an_endless_line,
    "upgrades to a websocket": upgrade_to_a_websocket,
    "declares a terabyte": declare_a_terabyte,
    "holds many large bodies": hold_many_large_bodies,
    "holds many connections": hold_many_connections,
    "leaves at once, again and again": leave_at_once,
    "pipelines requests": pipeline_requests,
    "replays a reply of another session": replay_a_reply_of_another,
    "nests messages": nest_messages,
    "sends a hundred thousand messages": send_many_messages,
    "sends a text of thirty megabytes": send_a_text_of_thirty_megabytes,
    "sends twenty thousand tools": send_many_tools,
    "asks for impossible samples": ask_for_impossible_samples,
    "calls tools that are not its own": call_tools_that_are_not_its_own,
}
SLOW = ("holds many large bodies", "holds many connections", "leaves at once, again and again", "pipelines requests")


async def check_other(opened: Any) -> None:
    """The other session is served within 5 s."""
    url = f"http://127.0.0.1:{opened.endpoint.port}/s/{opened.other.key}{CHAT}"
    async with asyncio.timeout(5), httpx.AsyncClient() as client:
        assert (await client.post(url, content=BODY, timeout=5)).status_code == 200
        opened.served += 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] if name in SLOW else []) for name in ATTACKS]
)
async def test_a_hostile_program_harms_no_other_session(renderer: ChatRenderer, name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with attacked(renderer) as opened:
        stopped = await ATTACKS[name](opened)
        started = time.perf_counter()
        await check_other(opened)
        seconds = time.perf_counter() - started
        assert len(opened.other.tree.nodes) == opened.served, "nobody else wrote to the other session"
        assert opened.other.ended is None
        assert not opened.session.broken.done()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700 << 10
    report_stopped(f"a program that {name}", f"{stopped}; the other session is served in {seconds:.2f} s")
