"""No completion spans a weight update, no turn is lost to one, and no time limit elapses during one."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

import pytest
from support.fake_sglang import SPEC, generated
from support.local_server import serving
from support.loop_clock import LoopClock

from agent_rl.config import EngineConfig
from agent_rl.engine.generation_gate import GenerationGate
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.types import FinishReason, SamplingParams
from sandbox.timeouts import PausableTimeout


class Server:
    """Answers a request when it is aborted, or at once where ``at_once``. Aborts that overtake theirs find nothing."""

    def __init__(self) -> None:
        self.at_once = False
        self.running: dict[str, asyncio.Event] = {}
        self.prompts: list[int] = []
        self.begun, self.lost_aborts = asyncio.Event(), 0

    async def handle(self, path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/abort_request":
            if self.lost_aborts:
                self.lost_aborts -= 1
            else:
                self.running[request["rid"]].set()
            return 200, b""
        self.prompts.append(len(request["input_ids"]))
        aborted = self.running[request["rid"]] = asyncio.Event()
        self.begun.set()
        if not self.at_once:
            await aborted.wait()
        return 200, generated(request, "length" if self.at_once else "abort")


@pytest.mark.parametrize("lost_aborts", [0, 2])
async def test_closing_interrupts_running_requests_and_holds_new_ones(lost_aborts: int) -> None:
    server = Server()
    server.lost_aborts = lost_aborts
    async with serving(server.handle) as url:
        engine = SGLangEngine(url, SPEC, EngineConfig(request_timeout=5))
        ask = lambda tokens: engine.generate(tokens, SamplingParams(), routes_from=0, session="s")  # noqa: E731
        first = asyncio.create_task(ask([1, 2, 3]))
        await server.begun.wait()
        async with engine.gate.closed():
            got = await first
            second = asyncio.create_task(ask([1, 2, 3, *got.tokens]))
            for _ in range(20):
                await asyncio.sleep(0)
            assert server.prompts == [3], "no request starts while the gate is closed"
            server.at_once = True
        after = await second
        await engine.close()
    assert (got.finish, got.interrupted, got.tokens) == (FinishReason.ABORT, True, (7, 8))
    assert got.routing is not None
    assert got.routing.tokens == 4
    assert (after.finish, after.interrupted) == (FinishReason.LENGTH, False)
    assert server.prompts == [3, 5]
    assert engine.gate.metrics() == {"async_rollout/interrupted_turns": 1, "async_rollout/reprefilled_tokens": 5}
    assert engine.gate.metrics()["async_rollout/interrupted_turns"] == 0


class Versioned:
    """A server whose weights change by themselves only between requests, if nothing of ours runs then."""

    def __init__(self) -> None:
        self.version, self.running, self.answered = 0, dict[str, asyncio.Event](), list[tuple[int, int]]()

    async def handle(self, path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/abort_request":
            self.running[request["rid"]].set()
            return 200, b""
        begun, aborted = self.version, asyncio.Event()
        self.running[request["rid"]] = aborted
        with suppress(TimeoutError):
            async with asyncio.timeout(random.uniform(0, 0.01)):
                await aborted.wait()
        self.answered.append((begun, self.version))
        return 200, generated(request, "abort" if aborted.is_set() else "length")


async def test_no_update_falls_within_a_completion() -> None:
    server, cut = Versioned(), 0
    async with serving(server.handle) as url:
        engine = SGLangEngine(url, SPEC, EngineConfig(request_timeout=30))

        async def request() -> None:
            nonlocal cut
            while True:
                got = await engine.generate([1, 2, 3], SamplingParams(), routes_from=0, session="s")
                cut += got.interrupted

        tasks = [asyncio.create_task(request()) for _ in range(4)]
        for _ in range(200):
            before = len(server.answered)
            while len(server.answered) < before + 2:  # noqa: ASYNC110  (the server tells it by no event)
                await asyncio.sleep(0)
            async with engine.gate.closed():
                server.version += 1
                await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.close()
    assert cut > 0
    assert {end - begun for begun, end in server.answered} == {0}
    assert {begun for begun, _ in server.answered} >= set(range(200)), "every version answered something"


async def test_a_request_that_does_not_end_is_ignored_after_the_timeout() -> None:
    gate, aborts = GenerationGate(drain_timeout=0.02), []

    async def abort() -> None:
        aborts.append(1)

    with gate.in_flight(abort) as request:
        async with gate.closed():
            assert request.interrupted
    assert aborts


async def test_time_limits_pause_while_the_gate_is_closed() -> None:
    gate, clock, expired = GenerationGate(), LoopClock(), list[bool]()
    limit = PausableTimeout(100)

    async def episode() -> None:
        async with limit:
            with gate.uncharged(limit):
                await clock.put_forward(60)
                async with gate.closed():
                    await clock.put_forward(1000)
                await clock.put_forward(30)
                expired.append(limit.expired())
                await clock.put_forward(20)

    with pytest.raises(TimeoutError):
        await episode()
    assert expired == [False]
    async with gate.closed(), PausableTimeout(100) as late:
        with gate.uncharged(late):
            await clock.put_forward(1000)
    assert not late.expired(), "it began while the gate was closed"


async def test_the_gate_opens_after_an_error() -> None:
    gate = GenerationGate()
    with pytest.raises(ValueError, match="publishing failed"):
        async with gate.closed():
            raise ValueError("publishing failed")
    async with asyncio.timeout(1):
        await gate.wait_open()


async def test_a_waiting_request_does_not_start_between_two_updates() -> None:
    gate, passed = GenerationGate(), []

    async def wait() -> None:
        await gate.wait_open()
        passed.append(gate.is_open)

    async with gate.closed():
        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
    async with gate.closed():
        for _ in range(5):
            await asyncio.sleep(0)
        assert not passed
    await waiting
    assert passed == [True]
