"""``shielded`` awaits its work to the end, then raises a cancellation of the caller."""

from __future__ import annotations

import asyncio

import pytest

from sandbox.shielded import shielded


class Work:
    """Work that waits for ``may_end``, then returns or raises ``error``."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.ended = False
        self._error = error

    async def run(self) -> str:
        self.begun.set()
        await self.may_end.wait()
        self.ended = True
        if self._error is not None:
            raise self._error
        return "done"


async def test_result_without_a_cancellation() -> None:
    work = Work()
    work.may_end.set()
    assert await shielded(work.run()) == "done"


@pytest.mark.parametrize("failure", [None, ValueError("the work's own")])
async def test_work_outlasts_three_cancellations_and_the_first_is_raised(failure: Exception | None) -> None:
    work = Work(failure)
    caller = asyncio.create_task(shielded(work.run()))
    await work.begun.wait()
    for time in range(3):
        caller.cancel(f"cancellation {time}")
        done, _ = await asyncio.wait({caller}, timeout=0)
        assert not done
    assert not work.ended
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError) as raised:
        await caller
    assert str(raised.value) == "cancellation 0"
    assert raised.value.__cause__ is failure
    assert (work.ended, caller.cancelled()) == (True, True)


async def test_an_error_of_the_work_is_raised() -> None:
    work = Work(ValueError("the work's own"))
    work.may_end.set()
    with pytest.raises(ValueError, match="the work's own"):
        await shielded(work.run())


async def test_work_that_is_cancelled_itself_ends_the_wait() -> None:
    work = Work()
    task = asyncio.create_task(work.run())
    caller = asyncio.create_task(shielded(task))
    await work.begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller


async def test_two_callers_wait_for_the_same_work() -> None:
    work = Work()
    task = asyncio.create_task(work.run())
    first, second = asyncio.create_task(shielded(task)), asyncio.create_task(shielded(task))
    await work.begun.wait()
    first.cancel()
    await asyncio.wait({first, second}, timeout=0)
    work.may_end.set()
    assert await second == "done"
    with pytest.raises(asyncio.CancelledError):
        await first
