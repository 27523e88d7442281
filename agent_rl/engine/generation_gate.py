"""The gate that every request of a run passes, so that weights change between tokens and never within a completion.

::

    open      requests run, the time limits of episodes too
    closing   no request begins; those that run are aborted by their ids, and answered with what they have
    closed    nothing of ours runs: the weights may change; no time limit runs
    open      a turn that was cut goes on from its tokens, by a request of the new weights

SGLang's own pause, which aborts whatever runs, takes a second where requests run and none where none does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

from sandbox.timeouts import PausableTimeout

AGAIN_SECONDS = 0.1
"""An abort that overtook its request finds nothing to abort: it is sent again after so long."""


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """One request on its way through: how it is aborted, and whether it was."""

    abort: Callable[[], Awaitable[None]]
    cut: bool = False


class GenerationGate:
    """Open at first. ``patience``: seconds until requests that do not end although they were aborted are left alone."""

    def __init__(self, patience: float = 120.0) -> None:
        self._patience = patience
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._passing: set[InFlightRequest] = set()
        self._closings = 0
        self._limits: set[PausableTimeout] = set()
        self._cut_turns = self._cut_tokens = 0

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    async def opened(self) -> None:
        """Return when it is open; what follows without waiting is still of an open gate."""
        while not self.is_open:
            await self._open.wait()

    @contextmanager
    def passing(self, abort: Callable[[], Awaitable[None]]) -> Iterator[InFlightRequest]:
        """Around one request, begun where :meth:`opened` returned; ``abort`` asks its engine to give it up."""
        passage = InFlightRequest(abort)
        self._passing.add(passage)
        self._idle.clear()
        try:
            yield passage
        finally:
            self._passing.discard(passage)
            if not self._passing:
                self._idle.set()

    def note_interrupted(self, tokens: int) -> None:
        """A request was cut that had computed ``tokens``."""
        self._cut_turns += 1
        self._cut_tokens += tokens

    def metrics(self) -> dict[str, float]:
        """What was cut since this was last asked."""
        turns, tokens = self._cut_turns, self._cut_tokens
        self._cut_turns = self._cut_tokens = 0
        return {"async_rollout/interrupted_turns": float(turns), "async_rollout/reprefilled_tokens": float(tokens)}

    @contextmanager
    def uncharged(self, limit: PausableTimeout) -> Iterator[None]:
        """While the gate is not open, the time of ``limit``, which is running, does not pass."""
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
        """Within the block no request runs, and none begins."""
        try:
            await self.close()
            yield
        finally:
            self.open()

    async def close(self) -> None:
        """From now on no request begins; return when none runs. It opens when :meth:`open` was called as often."""
        self._closings += 1
        if self.is_open:
            self._open.clear()
            for limit in self._limits:
                limit.pause()
        await self._drain()

    def open(self) -> None:
        """Take one :meth:`close` back."""
        self._closings -= 1
        if not self._closings:
            self._open.set()
            for limit in self._limits:
                limit.resume()

    async def _drain(self) -> None:
        """Cut what runs, and wait for its end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience):
                while self._passing:
                    await asyncio.gather(*(self._cut(passage) for passage in self._passing))
                    with suppress(TimeoutError):
                        async with asyncio.timeout(AGAIN_SECONDS):
                            await self._idle.wait()

    async def _cut(self, passage: InFlightRequest) -> None:
        passage.cut = True
        await passage.abort()
