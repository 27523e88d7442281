"""Awaits work to its end although the caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


async def shielded(work: Awaitable[T]) -> T:
    """Await ``work`` to its end, ignoring cancellations until then, and return its result.

    Raises the error of ``work``. If the caller was cancelled, raises the first cancellation after ``work`` has ended,
    with the error of ``work`` as its cause.
    """
    task = asyncio.ensure_future(work)
    cancellation = await wait_until_done(task)
    if cancellation is None:
        return task.result()
    raise cancellation from (None if task.cancelled() else task.exception())


async def wait_until_done(work: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait until ``work`` is done; return the caller's first cancellation during the wait, or None."""
    cancellation: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancellation = cancellation or error
    return cancellation
