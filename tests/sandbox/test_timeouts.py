"""Time limits of infrastructure: they do not count waits, and hold after a wait as before it."""

from __future__ import annotations

import asyncio

import pytest
from support.loop_clock import LoopClock

from sandbox import SandboxError
from sandbox.timeouts import PausableTimeout, acquire_slot, bounded, uncharged


async def test_a_wait_does_not_count() -> None:
    clock, reached = LoopClock(), list[str]()

    async def start() -> None:
        async with bounded(600, "starting"):
            await clock.put_forward(400)
            with uncharged():
                await clock.put_forward(5000)
            await clock.put_forward(150)
            reached.append("550 s")
            await clock.put_forward(100)
            reached.append("650 s")

    with pytest.raises(SandboxError, match="starting took longer"):
        await start()
    assert reached == ["550 s"]


async def test_the_timeout_is_paused_while_any_task_waits() -> None:
    clock, events = LoopClock(), [asyncio.Event(), asyncio.Event()]

    async def wait(event: asyncio.Event) -> None:
        with uncharged():
            await event.wait()

    async with bounded(600, "starting"), asyncio.TaskGroup() as group:
        for event in events:
            group.create_task(wait(event))
        await asyncio.sleep(0)
        for event in events:
            await clock.put_forward(1000)
            event.set()


async def test_uncharged_outside_of_a_block_does_nothing() -> None:
    clock = LoopClock()
    async with bounded(600, "starting"):
        pass
    with uncharged():
        await clock.put_forward(5000)


async def test_a_cancelled_holder_releases_its_slot() -> None:
    slots, held = asyncio.Semaphore(1), asyncio.Event()

    async def hold() -> None:
        async with bounded(600, "starting"), acquire_slot(slots):
            held.set()
            await asyncio.Event().wait()

    first, second = asyncio.create_task(hold()), asyncio.create_task(hold())
    await held.wait()
    held.clear()
    first.cancel()
    await held.wait()
    second.cancel()
    ended = await asyncio.gather(first, second, return_exceptions=True)
    assert all(isinstance(error, asyncio.CancelledError) for error in ended)
    assert not slots.locked()


async def test_other_timeout_errors_pass_through() -> None:
    with pytest.raises(TimeoutError):
        async with bounded(600, "starting"):
            raise TimeoutError


async def test_clean_up_may_wait_uncharged_after_the_bound_has_passed() -> None:
    """Closing a sandbox acquires a slot of the pool again: the clock of an expired bound can't be stopped."""
    slots, cleaned = asyncio.Semaphore(1), list[str]()

    async def start() -> None:
        async with bounded(600, "starting"):
            try:
                await LoopClock().put_forward(601)
            finally:
                async with acquire_slot(slots):
                    cleaned.append("closed")

    with pytest.raises(SandboxError, match="starting took longer than 600 s"):
        await start()
    assert cleaned == ["closed"]


async def test_a_task_that_outlives_the_bound_may_wait_uncharged() -> None:
    go = asyncio.Event()

    async def outlive() -> None:
        await go.wait()
        with uncharged():
            await asyncio.sleep(0)

    async with bounded(600, "starting"):
        task = asyncio.create_task(outlive())
    go.set()
    await task


async def test_a_pause_that_ends_in_clean_up_leaves_the_time_out_expired() -> None:
    clock, limit = LoopClock(), PausableTimeout(100)

    async def wait() -> None:
        async with limit:
            try:
                await clock.put_forward(101)
            finally:
                limit.pause()
                limit.resume()

    with pytest.raises(TimeoutError):
        await wait()
    assert limit.expired()
