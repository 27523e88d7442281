"""What many requests in flight cost the engine's client, through real HTTP and the reading of real-sized answers.

Run: ``python benchmarks/bench_http.py [requests in flight ...]`` (default 64 256 512 1024 2048)

A process of its own answers every request with 0.4 MB (log-probs of 256 tokens and 1,500 rows of routes) after 4 s, or
20 s at 2,048 in flight. Each caller sends 8,000 token ids twice; they begin evenly spread over the time of one answer,
as episodes do. Printed for each number in flight: wall time over the ideal (the answers' time alone), processor time a
request, and how late the event loop woke a task that sleeps 10 ms at worst. The requests are sent twice: once with that
task, and once more, when code and memory are warm, for the processor time, which the task would have a part in.
The same follows of httpx, the library that the client does not use here, asked the same without reading the answer.
Then the processor time of nothing but reading one such answer, back to back and at the pace at which the requests come:
the work is the same, so what the second is longer is what other processes left of the core's caches between two.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import multiprocessing
import resource
import time
from array import array
from collections.abc import Awaitable, Callable

import httpx
import numpy as np
import orjson

from agent_rl.config import EngineConfig
from agent_rl.engine.response import RequestContext, read_completion
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.models.spec import ModelSpec
from agent_rl.types import SamplingParams
from agent_rl.utils.concurrency import LoopLag, reduce_gc_pauses, run_alongside

REQUESTS, PROMPT, SAMPLED, ROWS = 2, 8000, 256, 1500
LAYERS, TOP_K = 12, 4
ROUTES_FROM = PROMPT + SAMPLED - 1 - ROWS
FACTS = ModelSpec(
    "qwen3_moe", moe=(True,) * LAYERS, hidden=8, heads=2, kv_heads=1, head_dim=4, inner=8, vocab_size=100_000,
    max_positions=16384, num_experts=64, top_k=TOP_K,
)  # fmt: skip
Call = Callable[[int], Awaitable[None]]


def answer() -> bytes:
    """What SGLang answers, of 0.4 MB."""
    tokens = list(range(SAMPLED))
    routes = np.broadcast_to(np.arange(TOP_K, dtype="<i4"), (ROWS, LAYERS, TOP_K))
    meta = {
        "id": "request",
        "finish_reason": {"type": "length", "length": SAMPLED},
        "weight_version": "1",
        "output_token_logprobs": [[-0.123456789, token, None] for token in tokens],
        "cached_tokens": 0,
        "routed_experts": base64.b64encode(routes.tobytes()).decode(),
    }
    return orjson.dumps({"text": "", "output_ids": tokens, "meta_info": meta})


class Answering(asyncio.Protocol):
    """Answers each request of a connection a fixed time after it came, whatever it says."""

    def __init__(self, reply: bytes, seconds: float) -> None:
        self._reply, self._seconds = reply, seconds
        self._missing, self._head = 0, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._missing:
            self._head += data
            if b"\r\n\r\n" not in self._head:
                return
            head, _, data = self._head.partition(b"\r\n\r\n")
            self._missing, self._head = int(head.lower().partition(b"content-length:")[2].split()[0]), b""
        self._missing -= len(data)
        if not self._missing:
            asyncio.get_running_loop().call_later(self._seconds, self._transport.write, self._reply)


def serve(seconds: float, ports: multiprocessing.Queue[int]) -> None:
    """Answer until this process is ended; its port goes into ``ports``."""
    body = answer()
    reply = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Answering(reply, seconds), "127.0.0.1", 0, backlog=4096)
        ports.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


async def measure(callers: int, seconds: float, call: Call) -> str:
    """Wall time over ideal and the loop's longest stall; then, by the same once more, processor time a request."""
    lag = LoopLag(interval=0.01)  # at 16 requests a second its looks would cost a third of what the requests cost
    async with run_alongside(lag.watch()):
        wall = await load(callers, seconds, call)
    before = _processor_seconds()
    again = await load(callers, seconds, call)
    each = 1e3 * (_processor_seconds() - before) / (callers * REQUESTS)
    stall = 1e3 * max(lag.delays)
    return (
        f"wall over ideal {max(wall, again):.2f}, {each:.2f} ms of processor time a request (goal 2), longest stall "
        f"{stall:.0f} ms (goal 100)"
    )


async def load(callers: int, seconds: float, call: Call) -> float:
    """The wall time over the ideal of :data:`REQUESTS` by each of the ``callers``."""

    async def caller(number: int) -> None:
        await asyncio.sleep(seconds * number / callers)
        for _ in range(REQUESTS):
            await call(number)

    began = time.perf_counter()
    await asyncio.gather(*map(caller, range(callers)))
    return (time.perf_counter() - began) / ((REQUESTS + (callers - 1) / callers) * seconds)


async def reading(pace: float, times: int = 32) -> float:
    """Processor time of reading an answer, ``pace`` seconds after the one before, in ms."""
    body, asked = answer(), RequestContext("request", "session", "engine", PROMPT, ROUTES_FROM, FACTS.layout)
    spent = 0.0
    for _ in range(times):
        await asyncio.sleep(pace)
        before = _processor_seconds()
        read_completion(body, asked, 0.0)
        spent += _processor_seconds() - before
    return 1e3 * spent / times


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def main(url: str, callers: int, seconds: float) -> None:
    reduce_gc_pauses()  # as every run does that opens an engine
    prompt, sampling = array("i", range(PROMPT)), SamplingParams(max_new_tokens=SAMPLED)
    engine = SGLangEngine(url, FACTS, EngineConfig(retries=0))

    async def generate(number: int) -> None:
        await engine.generate(prompt, sampling, routes_from=ROUTES_FROM, session=str(number))

    print(f"{callers} in flight: {await measure(callers, seconds, generate)}", flush=True)
    await engine.close()
    content = orjson.dumps({"input_ids": prompt.tolist()})
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
    async with httpx.AsyncClient(limits=limits, trust_env=False, timeout=600.0) as client:

        async def post(number: int) -> None:
            (await client.post(f"{url}/generate", content=content)).raise_for_status()

        print(f"    with httpx: {await measure(callers, seconds, post)}", flush=True)
    hot, paced = await reading(0.0), await reading(seconds / callers)
    print(f"    reading one answer alone: {hot:.2f} ms back to back, {paced:.2f} ms at that pace", flush=True)


def with_server(callers: int) -> None:
    """Measure ``callers`` requests in flight against a server of their own."""
    seconds = 20.0 if callers >= 2048 else 4.0
    ports: multiprocessing.Queue[int] = multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(seconds, ports), daemon=True)
    server.start()
    try:
        asyncio.run(main(f"http://127.0.0.1:{ports.get(timeout=30)}", callers, seconds))
    finally:
        server.kill()
        server.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("callers", nargs="*", type=int, default=[64, 256, 512, 1024, 2048], help="requests in flight")
    for number in parser.parse_args().callers:
        with_server(number)
