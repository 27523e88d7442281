"""The gate that every request passes, so that weights change between requests and never within a completion.

::

    open      requests run; the episodes' time limits elapse
    closing   no request starts; running requests are aborted by id and return the tokens sampled so far
    closed    no request of ours runs: the weights may change; no time limit elapses
    open      interrupted turns continue from their tokens with a new request, on the new weights

SGLang's own pause aborts whatever runs, but takes a second if requests are running.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

from sandbox.timeouts import PausableTimeout

RETRY_ABORT_SECONDS = 0.1
"""An abort that arrives before its request has no effect, so aborts are repeated after this many seconds."""


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """One request in flight: how to abort it, and whether it was interrupted."""

    abort: Callable[[], Awaitable[None]]
    interrupted: bool = False


class GenerationGate:
    """Initially open. ``drain_timeout``: seconds to wait for aborted requests to end before they are ignored."""

    def __init__(self, drain_timeout: float = 120.0) -> None:
        self._drain_timeout = drain_timeout
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._in_flight: set[InFlightRequest] = set()
        self._closings = 0
        self._limits: set[PausableTimeout] = set()
        self._interrupted_turns = self._reprefilled_tokens = 0

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    async def wait_open(self) -> None:
        """Return once the gate is open. Code that follows without an await still runs with an open gate."""
        while not self.is_open:
            await self._open.wait()

    @contextmanager
    def in_flight(self, abort: Callable[[], Awaitable[None]]) -> Iterator[InFlightRequest]:
        """Marks one request as in flight, started right after :meth:`wait_open`. ``abort`` aborts it on its engine."""
        request = InFlightRequest(abort)
        self._in_flight.add(request)
        self._idle.clear()
        try:
            yield request
        finally:
            self._in_flight.discard(request)
            if not self._in_flight:
                self._idle.set()

    def record_interrupted(self, tokens: int) -> None:
        """Count an interrupted request that had computed ``tokens``."""
        self._interrupted_turns += 1
        self._reprefilled_tokens += tokens

    def metrics(self) -> dict[str, float]:
        """Counts of interrupted requests since the last call."""
        turns, tokens = self._interrupted_turns, self._reprefilled_tokens
        self._interrupted_turns = self._reprefilled_tokens = 0
        return {"async_rollout/interrupted_turns": float(turns), "async_rollout/reprefilled_tokens": float(tokens)}

    @contextmanager
    def uncharged(self, limit: PausableTimeout) -> Iterator[None]:
        """While the gate is not open, the running ``limit`` does not elapse."""
        self._limits.add(limit)
        if not self.is_open:
            limit.pause()
        try:
            yield
        finally:
            self._limits.discard(limit)
            if not self.is_open:
                limit.resume()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Within the block no request runs or starts."""
        try:
            await self.close()
            yield
        finally:
            self.open()

    async def close(self) -> None:
        """Let no new request start; return when none runs. The gate opens again after as many calls of :meth:`open`."""
        self._closings += 1
        if self.is_open:
            self._open.clear()
            for limit in self._limits:
                limit.pause()
        await self._drain()

    def open(self) -> None:
        """Undo one :meth:`close`."""
        self._closings -= 1
        if not self._closings:
            self._open.set()
            for limit in self._limits:
                limit.resume()

    async def _drain(self) -> None:
        """Interrupt the running requests and wait for their end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_timeout):
                while self._in_flight:
                    await asyncio.gather(*(self._interrupt(request) for request in self._in_flight))
                    with suppress(TimeoutError):
                        async with asyncio.timeout(RETRY_ABORT_SECONDS):
                            await self._idle.wait()

    async def _interrupt(self, request: InFlightRequest) -> None:
        request.interrupted = True
        await request.abort()
