"""Timeouts of infrastructure that pause while it waits for a pool slot or an image pull."""

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
"""The innermost timeout that the running task is charged to."""


@asynccontextmanager
async def bounded(seconds: float, what: str) -> AsyncIterator[None]:
    """Raise ``SandboxError`` with ``what`` in its message if the block takes longer than ``seconds``.

    Time inside :func:`uncharged` does not count, including that of tasks started in the block.
    """
    limit = PausableTimeout(seconds)
    try:
        async with limit:
            with charged_to(limit):
                yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise SandboxError(f"{what} took longer than {seconds:g} s") from error


@contextmanager
def charged_to(limit: PausableTimeout) -> Iterator[None]:
    """Time inside :func:`uncharged` within the block does not count for ``limit``."""
    token = _clock.set(limit)
    try:
        yield
    finally:
        _clock.reset(token)


@contextmanager
def uncharged() -> Iterator[None]:
    """Pause the timeout that the running task is charged to, if any, for a wait that has its own limit."""
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
async def acquire_slot(slots: asyncio.Semaphore) -> AsyncIterator[None]:
    """Acquire one of ``slots`` for the block; the wait is :func:`uncharged`."""
    with uncharged():
        await slots.acquire()
    try:
        yield
    finally:
        slots.release()


def _now() -> float:
    return asyncio.get_running_loop().time()
