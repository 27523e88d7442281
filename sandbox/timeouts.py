"""How long infrastructure may take, not counting what it waits for: its turn in a pool, and images that are fetched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Self

from sandbox.errors import SandboxError


class PausableTimeout:
    """An ``asyncio.timeout`` of ``seconds`` whose time can be paused; pauses nest.

    Outside its block, and once it has expired, a pause changes nothing.
    """

    def __init__(self, seconds: float) -> None:
        self._timeout = asyncio.timeout(seconds)
        self._active, self._pauses, self._left = False, 0, 0.0

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._active = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._active = False
        await self._timeout.__aexit__(kind, error, trace)

    def expired(self) -> bool:
        """Whether the block was, or is being, cancelled because its time was over."""
        return self._timeout.expired()

    @property
    def paused(self) -> bool:
        return self._pauses > 0

    @property
    def left(self) -> float:
        """The seconds that the block may still run."""
        due = self._timeout.when()
        return self._left if due is None else due - _now()

    def pause(self) -> None:
        """Stop the time until :meth:`resume` was called as often."""
        if not self._pauses and self._running:
            self._left = self.left
            self._timeout.reschedule(None)
        self._pauses += 1

    def resume(self) -> None:
        """Take one :meth:`pause` back."""
        self._pauses -= 1
        if not self._pauses and self._running:
            self._timeout.reschedule(_now() + self._left)

    @property
    def _running(self) -> bool:
        return self._active and not self._timeout.expired()


_clock: ContextVar[PausableTimeout | None] = ContextVar("clock", default=None)
"""The time-out of the innermost :func:`bounded` block around the running task."""


@asynccontextmanager
async def bounded(seconds: float, what: str) -> AsyncIterator[None]:
    """Raise ``SandboxError``, which names ``what``, where the block takes longer than ``seconds``.

    Time inside :func:`uncharged` does not count, also that of tasks which the block starts.
    """
    limit = PausableTimeout(seconds)
    try:
        async with limit:
            token = _clock.set(limit)
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
    clock.pause()
    try:
        yield
    finally:
        clock.resume()


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
