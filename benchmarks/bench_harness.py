"""What the harness endpoint costs: a request's processor time, and many sessions at once.

    python benchmarks/bench_harness.py [seconds an answer ...]

Requests of 100 messages and 250 kB over loopback, their answers sampled at once; 256 sessions of 50 turns by clients in
a process of their own, each answer so many seconds away; a fork of a conversation of 60,000 tokens, and what a forest
of it holds in memory.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import statistics
import threading
import time
import tracemalloc
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from support.scripted_engine import ScriptedEngine

from agent_rl.config import R3Config, RolloutConfig
from agent_rl.endpoint.server import serve_endpoint
from agent_rl.endpoint.session import HarnessRenderer, Session
from agent_rl.rollout.conversation_tree import ChatMessage, ConversationTree
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.scripted_policies import ByteRenderer
from agent_rl.types import TokenIds
from agent_rl.utils.concurrency import LoopLag, reduce_gc_pauses, run_alongside
from r3.payload import RouteLayout
from tools import ParsedTurn, tool_format

LAYOUT = RouteLayout(4, (0, 1, 2, 3), 32, 4)
SAID = [*b"ok", ByteRenderer.STOP]


class Words(ByteRenderer):
    """A token for every 64 characters: rendering itself is not what is measured."""

    def initial_prompt(self, messages: Sequence[Any], tools: Any) -> list[int]:
        return [len(message["content"]) % 251 for message in messages for _ in range(len(message["content"]) // 64 + 1)]

    def extension(self, messages: Sequence[Any], *, stop: int | None) -> list[int]:
        return self.initial_prompt(messages, None)


def session(name: str, latency: float) -> Session:
    def policy(session: str, turn: int, tokens: TokenIds) -> Sequence[int]:
        return SAID

    engine = ScriptedEngine(policy, layout=LAYOUT, latency=latency)
    rendering = HarnessRenderer(Words(), tool_format("hermes"), describe_tools=False)
    limits = RolloutConfig(max_tokens=1 << 20, max_turns=1 << 20)
    return Session(name, engine, rendering, EpisodeRules(limits, routes=R3Config()), 1 << 20)


class Client:
    """Requests of one session over one connection, as bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str) -> None:
        self.reader, self.writer, self.key = reader, writer, key

    @classmethod
    async def to(cls, port: int, key: str) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 22), key)

    async def talk(self, turns: int) -> None:
        """A conversation that goes on from every reply."""
        messages = [{"role": "user", "content": "go"}]
        for turn in range(turns):
            await self.ask(json.dumps({"messages": messages}).encode())
            messages += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": f"seen {turn}"}]
        self.writer.close()

    async def ask(self, body: bytes) -> bytes:
        head = f"POST /s/{self.key}/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        answer = await self.reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        return await self.reader.readexactly(length)


def talk_all(port: int, keys: Sequence[str], turns: int, took: Connection) -> None:
    """A conversation of each session, all at once; the seconds that they took go into ``took``."""

    async def run() -> None:
        clients = [await Client.to(port, key) for key in keys]
        began = time.perf_counter()
        await asyncio.gather(*(client.talk(turns) for client in clients))
        took.send(time.perf_counter() - began)

    asyncio.run(run())


async def request_cpu(messages: int = 100, size: int = 250_000, requests: int = 20) -> float:
    """Milliseconds of the server thread's processor time a request of a conversation that grows to ``messages`` of
    ``size`` bytes; its client is in a thread of its own."""
    async with serve_endpoint() as endpoint, endpoint.serving(session("cpu", 0.0)) as served:
        clock = time.pthread_getcpuclockid(threading.get_ident())
        path = f"/s/{served.key}/v1/chat/completions"
        costs = await asyncio.to_thread(grow, endpoint.port, path, clock, messages + requests, size // messages)
    return 1000 * statistics.median(costs[-requests:])


def grow(port: int, path: str, clock: int, messages: int, size: int) -> list[float]:
    """What each request of a growing conversation cost on ``clock``, in seconds. ``size``: bytes a message."""
    client = http.client.HTTPConnection("127.0.0.1", port)
    said = [{"role": "user", "content": "x" * 2 * size}]
    costs = []
    while len(said) < messages:
        body = json.dumps({"messages": said}).encode()
        began = time.clock_gettime(clock)
        client.request("POST", path, body)
        client.getresponse().read()
        costs.append(time.clock_gettime(clock) - began)
        said += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "x" * 2 * size + str(len(said))}]
    client.close()
    return costs


@dataclass(frozen=True)
class Many:
    """What many sessions at once took: wall time over that of one alone, the loop's lag in ms (99th percentile), and ms
    of the server thread's processor time a request."""

    wall: float
    lag: float
    cpu: float


async def many(latency: float, sessions: int = 256, turns: int = 50) -> Many:
    """Conversations whose every answer is ``latency`` seconds away; their clients are in a process of their own."""
    lag, spawn = LoopLag(interval=0.005), multiprocessing.get_context("spawn")
    async with serve_endpoint() as endpoint, AsyncExitStack() as open_sessions, run_alongside(lag.watch()):
        served = [
            await open_sessions.enter_async_context(endpoint.serving(session(f"many-{number}", latency)))
            for number in range(sessions)
        ]
        took, sent = spawn.Pipe(duplex=False)
        keys = [each.key for each in served]
        clients = spawn.Process(target=talk_all, args=(endpoint.port, keys, turns, sent), daemon=True)
        began = time.thread_time()
        clients.start()
        sent.close()  # so that clients that fail end the wait
        wall = await asyncio.to_thread(took.recv)
        cpu = time.thread_time() - began
    clients.join()
    return Many(wall / (turns * latency), lag.metrics()["loop/lag_p99_ms"], 1000 * cpu / (sessions * turns))


async def fork(tokens: int = 60_000, turns: int = 50) -> tuple[float, float]:
    """``(ms of processor time to plan a rewritten conversation and begin it, bytes held over bytes of tensors)``."""
    rendering = HarnessRenderer(Words(), tool_format("hermes"), describe_tools=False)
    engine = ScriptedEngine(lambda *asked: SAID, layout=LAYOUT)
    each = "x" * (64 * tokens // turns)
    rules = EpisodeRules(RolloutConfig())
    await engine.generate([0] * (2 * tokens), rules.sampling(99, ()), routes_from=0, session="s")  # makes all its rows
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tree = ConversationTree(rendering, routes=R3Config())
    said = [ChatMessage("user", each)]
    for turn in range(turns):
        node = tree.begin(tree.plan_request(said, []))
        completion = await engine.generate(
            tree.tokens(node).tolist(), rules.sampling(99, ()), routes_from=tree.routes_from(node), session="s"
        )
        assert completion.routing is not None  # copied, as an answer over HTTP has rows of its own
        routing = replace(completion.routing, experts=completion.routing.experts.copy())
        tree.sampled(node, replace(completion, routing=routing))
        tree.commit(node, "ok", ParsedTurn(text="ok"))
        tree.deliver(node)
        said = [*said, ChatMessage("assistant", "ok", reply=node.id), ChatMessage("user", each + str(turn))]
    texts = sum(len(message.text) for message in said)
    held = tracemalloc.get_traced_memory()[0] - before - texts
    tracemalloc.stop()
    (branch,) = tree.branches()
    assert branch.routing is not None
    tensors = branch.tokens.nbytes + 8 * branch.sampled_tokens + branch.routing.experts.nbytes
    changed = [*said[: turns - 2], ChatMessage("assistant", "edited"), *said[turns - 1 :]]
    began = time.process_time()
    tree.routes_from(tree.begin(tree.plan_request(changed, [])))
    return 1000 * (time.process_time() - began), held / tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", nargs="*", type=float, default=[0.05, 0.2, 0.5, 2.0], help="of an answer")
    latencies = parser.parse_args().seconds
    reduce_gc_pauses()  # as every run does that opens an engine
    print(f"processor time a request (100 messages, 250 kB)   {asyncio.run(request_cpu()):.2f} ms (goal 2)")
    for latency in latencies:
        found = asyncio.run(many(latency))
        print(
            f"256 sessions of 50 turns, {latency:g} s a turn: wall {found.wall:.2f} of ideal (goal 1.25), loop lag p99 "
            f"{found.lag:.0f} ms (goal 50), {found.cpu:.2f} ms of the server's processor time a request",
            flush=True,
        )
    cost, memory = asyncio.run(fork())
    print(f"a fork at 60,000 tokens                           {cost:.1f} ms; forest memory {memory:.2f} of its tensors")


if __name__ == "__main__":
    main()
