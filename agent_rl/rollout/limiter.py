"""A concurrency limit that reports how many episodes run and how many wait."""

from __future__ import annotations

import asyncio


class Limiter:
    """``async with limiter:`` takes one of ``limit`` slots. Waiters get slots in the order they arrived."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit: {limit}, expected 1 or more")
        self.limit = limit
        self._slots = asyncio.Semaphore(limit)
        self._in_flight = 0
        self._waiting = 0
        self._peak = 0

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def peak(self) -> int:
        """The largest number of slots in use at once."""
        return self._peak

    async def __aenter__(self) -> None:
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        self._in_flight += 1
        self._peak = max(self._peak, self._in_flight)

    async def __aexit__(self, *error: object) -> None:
        self._in_flight -= 1
        self._slots.release()
