"""Work that a cancelled caller does not cut short."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


async def shielded(work: Awaitable[T]) -> T:
    """Await ``work`` to its end, however often the caller is cancelled meanwhile, and return its result.

    Raises what ``work`` raises; where the caller was cancelled, that cancellation once ``work`` has ended, with the
    work's own error as its cause.
    """
    task = asyncio.ensure_future(work)
    cancellation = await outlast(task)
    if cancellation is None:
        return task.result()
    raise cancellation from (None if task.cancelled() else task.exception())


async def outlast(work: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait until ``work`` is done, whatever its outcome; the first cancellation that the caller met meanwhile."""
    cancellation: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancellation = cancellation or error
    return cancellation
