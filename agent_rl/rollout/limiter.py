"""Bounded concurrency as an object: how many episodes are in flight, how many wait, and never more than the limit."""

from __future__ import annotations

import asyncio
from types import TracebackType


class Limiter:
    """``async with limiter:`` holds one of ``limit`` slots; waiters are served in the order they came."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a limiter needs at least one slot, not {limit}")
        self.limit = limit
        self._slots = asyncio.Semaphore(limit)
        self._held = 0
        self._waiting = 0
        self._peak = 0

    @property
    def in_flight(self) -> int:
        return self._held

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def peak(self) -> int:
        """The most slots that were ever held at once."""
        return self._peak

    async def __aenter__(self) -> None:
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        self._held += 1
        self._peak = max(self._peak, self._held)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held -= 1
        self._slots.release()
