import asyncio

import pytest

from agent_rl.rollout.group import Limiter


async def test_no_more_than_the_limit_are_in_flight() -> None:
    limiter, release, entered = Limiter(3), asyncio.Event(), asyncio.Queue[int]()

    async def worker(index: int) -> None:
        async with limiter:
            entered.put_nowait(index)
            await release.wait()

    async with asyncio.TaskGroup() as scope:
        for index in range(10):
            scope.create_task(worker(index))
        first = [await entered.get() for _ in range(3)]
        assert first == [0, 1, 2]
        assert (limiter.in_flight, limiter.waiting) == (3, 7)
        release.set()
    assert [entered.get_nowait() for _ in range(7)] == [3, 4, 5, 6, 7, 8, 9]
    assert (limiter.in_flight, limiter.waiting, limiter.peak) == (0, 0, 3)


async def test_a_cancelled_waiter_takes_no_slot() -> None:
    limiter = Limiter(1)

    async def hold() -> None:
        async with limiter:
            pass

    async with limiter:
        waiter = asyncio.create_task(hold())
        await asyncio.sleep(0)
        assert limiter.waiting == 1
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
    assert (limiter.in_flight, limiter.waiting) == (0, 0)
    async with limiter:
        assert limiter.in_flight == 1


async def test_an_error_inside_frees_the_slot() -> None:
    limiter = Limiter(1)
    with pytest.raises(ZeroDivisionError):
        async with limiter:
            raise ZeroDivisionError
    assert limiter.in_flight == 0


def test_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="limit: 0"):
        Limiter(0)
