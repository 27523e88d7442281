"""How long infrastructure may take, not counting what it waits for: its turn in a pool, and images that are fetched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

from sandbox.errors import SandboxError


class _Clock:
    """An ``asyncio.timeout`` that stands still while anything under it waits."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limit, self._waits, self._left = limit, 0, 0.0

    def stop(self) -> None:
        if self._waits == 0:
            self._left = (self._limit.when() or 0.0) - _now()
            self._limit.reschedule(None)
        self._waits += 1

    def go_on(self) -> None:
        self._waits -= 1
        if self._waits == 0:
            self._limit.reschedule(_now() + self._left)


_clock: ContextVar[_Clock | None] = ContextVar("clock", default=None)
"""The clock of the innermost :func:`bounded` block around the running task."""


@asynccontextmanager
async def bounded(seconds: float, what: str) -> AsyncIterator[None]:
    """Raise ``SandboxError``, which names ``what``, where the block takes longer than ``seconds``.

    Time inside :func:`uncharged` does not count, also that of tasks which the block starts.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            token = _clock.set(_Clock(limit))
            try:
                yield
            finally:
                _clock.reset(token)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise SandboxError(f"{what} took longer than {seconds:g} s") from error


@contextmanager
def uncharged() -> Iterator[None]:
    """Stop the clock of the :func:`bounded` block around, where there is one: what is waited for has its own bound."""
    clock = _clock.get()
    if clock is None:
        yield
        return
    clock.stop()
    try:
        yield
    finally:
        clock.go_on()


@asynccontextmanager
async def turn(slots: asyncio.Semaphore) -> AsyncIterator[None]:
    """Hold one of ``slots``; waiting for it is uncharged."""
    with uncharged():
        await slots.acquire()
    try:
        yield
    finally:
        slots.release()


def _now() -> float:
    return asyncio.get_running_loop().time()
