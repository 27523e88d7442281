"""What a request costs the engine's client in processor time, with many requests in flight.

Run: ``python tests/bench/bench_http.py [requests in flight, default 64 and 256]``

A process of its own answers every request after 50 ms. Each of the concurrent callers sends ten requests and waits
0 to 100 ms between them, as an episode does while its tool runs. Printed: milliseconds of this process's time a request
with the connections that the client keeps, the same where all of them are kept, and the ratio.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import resource
import sys

import httpx

from agent_rl.engine.http import AsyncHttp

REQUESTS = 10
ANSWER_SECONDS, PAUSE_SECONDS = 0.05, 0.1
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
            await asyncio.sleep(ANSWER_SECONDS)
            writer.write(_ANSWER)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def serve(ports: multiprocessing.Queue[int]) -> None:
    """Answer until this process is ended; its port goes into ``ports``."""

    async def run() -> None:
        server = await asyncio.start_server(_answer, "127.0.0.1", 0, backlog=1024)
        ports.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


async def cost(client: httpx.AsyncClient, url: str, callers: int) -> float:
    """Milliseconds of processor time a request."""

    async def call() -> None:
        for _ in range(REQUESTS):
            await client.post(url, content=b"x" * 500)
            await asyncio.sleep(random.uniform(0, PAUSE_SECONDS))

    before = _seconds()
    await asyncio.gather(*(call() for _ in range(callers)))
    return (_seconds() - before) / (callers * REQUESTS) * 1e3


def _seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def main(url: str, callers: int) -> None:
    everything = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=everything, trust_env=False, timeout=60.0) as client:
        all_kept = await cost(client, url, callers)
    async with AsyncHttp(60.0) as http:
        few_kept = await cost(http._client, url, callers)
    print(
        f"{callers} in flight: {few_kept:.2f} ms a request, all connections kept {all_kept:.2f}, "
        f"{all_kept / few_kept:.1f} x"
    )


if __name__ == "__main__":
    ports: multiprocessing.Queue[int] = multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(ports,), daemon=True)
    server.start()
    address = f"http://127.0.0.1:{ports.get(timeout=30)}"
    try:
        for number in map(int, sys.argv[1:] or (64, 256)):
            asyncio.run(main(address, number))
    finally:
        server.kill()
