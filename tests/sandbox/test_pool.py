"""The pool over real bubblewrap sandboxes: limits, prewarming and close; a gate controls the order of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.loop_clock import LoopClock

from sandbox import Sandbox, SandboxError, SandboxPool, SandboxSpec, SandboxStartError, bounded
from sandbox.bubblewrap.backend import BubblewrapBackend

pytestmark = [pytest.mark.bubblewrap, pytest.mark.timeout(60)]
SPEC = SandboxSpec(env={"A": "1", "B": "2"})
OTHER = replace(SPEC, memory_mb=300)


class Gate:
    """A backend that counts its starts, which wait until ``open`` is set."""

    def __init__(self, backend: BubblewrapBackend) -> None:
        self._backend = backend
        self.open = asyncio.Event()
        self.open.set()
        self.waiting, self.max_waiting, self.started, self.failures = 0, 0, 0, 0

    @property
    def name(self) -> str:
        return self._backend.name

    async def start(self, spec: SandboxSpec) -> Sandbox:
        self.waiting += 1
        self.max_waiting = max(self.max_waiting, self.waiting)
        try:
            await self.open.wait()
        finally:
            self.waiting -= 1
        if self.failures:
            self.failures -= 1
            raise SandboxStartError("refused by the gate")
        self.started += 1
        return await self._backend.start(spec)

    async def reap(self) -> int:
        return await self._backend.reap()

    async def close(self) -> None:
        await self._backend.close()

    def directory(self, sandbox: Sandbox) -> Path:
        """The working directory of ``sandbox``, on the host."""
        return self._backend._directory.path / "sandboxes" / sandbox.id / "work"

    @property
    def sandboxes(self) -> int:
        """Sandboxes that exist."""
        return len(self._backend._sandboxes)


@pytest.fixture
async def gate(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gate]:
    base = tmp_path_factory.getbasetemp() / "pool"  # shared, as making the sandboxes' root file system takes a while
    gate = Gate(BubblewrapBackend(run_id="pool", base=base))
    yield gate
    await gate.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_concurrent_starts_are_limited(gate: Gate) -> None:
    pool = SandboxPool(gate, max_starts=3)
    gate.open.clear()
    starts = [asyncio.create_task(pool.start(SPEC)) for _ in range(8)]
    await until(lambda: gate.waiting == 3)
    gate.open.set()
    sandboxes = await asyncio.gather(*starts)
    assert (gate.max_waiting, len({sandbox.id for sandbox in sandboxes}), pool.idle) == (3, 8, 0)
    await pool.close()
    assert gate.sandboxes == 0
    with pytest.raises(SandboxStartError, match="closed"):
        await pool.start(SPEC)


async def test_waiting_for_a_slot_does_not_count_against_the_start_timeout(gate: Gate) -> None:
    pool, clock = SandboxPool(gate, max_starts=1, prewarmed=1), LoopClock()
    gate.open.clear()

    async def start() -> Sandbox:
        async with bounded(600, "starting"):
            return await pool.start(SPEC)

    starts = [asyncio.create_task(start()) for _ in range(2)]
    await until(lambda: gate.waiting == 1)
    await clock.put_forward(601)
    (late,) = await asyncio.gather(*starts[:1], return_exceptions=True)
    assert isinstance(late, SandboxError)
    gate.open.set()
    assert (await starts[1]).spec == SPEC
    await pool.close()


async def test_concurrent_commands_are_limited_and_waiting_does_not_count(gate: Gate) -> None:
    pool = SandboxPool(gate, max_execs=1)
    first, second = await pool.start(SPEC), await pool.start(SPEC)
    held = asyncio.create_task(first.exec("while ! [ -e go ]; do sleep 0.01; done", timeout=30))
    go = gate.directory(first) / "go"
    waits = asyncio.create_task(second.exec("echo ran", timeout=0.9))
    await asyncio.sleep(1.0)  # longer than the second one's whole time
    assert not waits.done()
    await asyncio.to_thread(go.touch)
    assert (await held).ok
    assert (await waits).stdout == b"ran\n"
    await pool.close()


async def test_prewarmed_sandboxes_are_used_once(gate: Gate) -> None:
    pool = SandboxPool(gate, prewarmed=2)
    first = await pool.start(SPEC)
    await until(lambda: pool.idle == 1)
    gate.open.clear()
    ready = await pool.start(replace(SPEC, env={"B": "2", "A": "1"}))  # no start is needed: the gate is shut
    assert pool.idle == 0
    await ready.write_files({"mark": b"mine"})
    await ready.close()
    gate.open.set()
    await until(lambda: pool.idle == 1)
    again = await pool.start(SPEC)
    assert len({first.id, ready.id, again.id}) == 3
    assert (await again.exec("ls", timeout=20)).stdout == b"", "what an episode leaves is never seen by another"
    await pool.close()
    assert gate.sandboxes == 0


async def test_prewarming_follows_the_number_of_starts_up_to_its_limit(gate: Gate) -> None:
    pool = SandboxPool(gate, prewarmed=3)
    await asyncio.gather(*(pool.start(SPEC) for _ in range(5)))
    await until(lambda: pool.idle == 3)
    gate.open.clear()
    async with asyncio.timeout(20):
        await asyncio.gather(*(pool.start(SPEC) for _ in range(3)))
    assert pool.idle == 0
    gate.open.set()
    await pool.close()


async def test_the_longest_idle_sandbox_is_closed_for_another_spec(gate: Gate) -> None:
    pool = SandboxPool(gate, prewarmed=1)
    first = await pool.start(SPEC)
    await until(lambda: pool.idle == 1)
    other = await pool.start(OTHER)
    await until(lambda: pool.idle == 1 and gate.sandboxes == 3)  # two in use, and the idle one is of the other kind
    gate.open.clear()
    ready = await pool.start(OTHER)
    assert ready.spec == OTHER
    assert gate.max_waiting == 1, "prewarming starts one sandbox at a time"
    gate.open.set()
    await asyncio.gather(*(sandbox.close() for sandbox in (first, other, ready)))
    await pool.close()


async def test_a_failed_prewarm_is_logged_and_has_no_effect(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    pool = SandboxPool(gate, prewarmed=1)
    await pool.start(SPEC)
    await until(lambda: pool.idle == 1)
    gate.failures = 1
    await pool.start(SPEC)
    await until(lambda: gate.failures == 0 and not pool._tasks)
    assert "refused by the gate" in caplog.text
    await pool.start(SPEC)
    await until(lambda: pool.idle == 1)
    await pool.close()


async def test_close_cancels_prewarming(gate: Gate) -> None:
    pool = SandboxPool(gate, prewarmed=4)
    await pool.start(SPEC)
    gate.open.clear()
    await until(lambda: gate.waiting == 1 or pool.idle == 1)
    closing = asyncio.create_task(pool.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert (gate.sandboxes, gate.waiting, pool._tasks) == (0, 0, set())
