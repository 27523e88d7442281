"""Ends a sandbox whose files grow beyond its limit: measured on a timer while commands run, and when the disk is full.

A measurement that fails is tried again. Several failures in a row end the sandbox as a failure of the sandbox.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextvars import Context

from sandbox.disk import Usage
from sandbox.errors import SandboxLostError

_log = logging.getLogger(__name__)

_EVERY = 3.0
"""Seconds between two measurements."""
_SHARE = 10.0
"""A measurement takes at most one part in so many of the time."""
_MOST_FAILURES = 5
"""A sandbox whose measurements fail so many times in a row is ended: its limit no longer holds."""


class GrowthWatch:
    """Watches one sandbox. ``measure`` says what it takes of the disk, None where that can't be found out; ``empty``
    kills what runs in the sandbox and removes its files."""

    def __init__(
        self,
        sandbox: str,
        limit: Usage,
        measure: Callable[[], Coroutine[object, object, Usage | None]],
        empty: Callable[[], Coroutine[object, object, None]],
    ) -> None:
        self._sandbox, self._limit, self._measure, self._empty = sandbox, limit, measure, empty
        self._timer: asyncio.Task[None] | None = None
        self._emptying: asyncio.Task[None] | None = None
        self._commands = self._failures = 0
        self.overgrown = ""
        """Why the sandbox was ended, in a line; empty as long as it was not."""
        self.unwatched = False
        """Whether it was ended because it could not be measured: a failure of the sandbox, not of the agent."""

    async def start_from_here(self) -> None:
        """Take what is in the sandbox now as given: what an image brings along is no growth."""
        self._limit += await self._measure() or Usage()

    def command_begins(self) -> None:
        """Measure from now on, unless that is done already."""
        self._commands += 1
        if self._timer is None or self._timer.done():
            self._timer = asyncio.create_task(self._watch(), context=Context())

    def command_ends(self) -> None:
        """Measure once more, and no more after that until another command begins."""
        self._commands -= 1

    async def check(self) -> None:
        """Measure now, and end the sandbox if it has grown beyond its limit."""
        used = await self._measure()
        if used is not None and not used.within(self._limit) and not self.overgrown:
            self._end(
                f"sandbox {self._sandbox}: it was ended, as its files grew to {used}; the limit is {self._limit} "
                "(sandbox.disk_mb, sandbox.inodes)"
            )

    def check_watched(self) -> None:
        """Raise ``SandboxLostError`` where the sandbox was ended because it could not be measured."""
        if self.unwatched:
            raise SandboxLostError(self.overgrown)

    async def emptied(self) -> None:
        """Wait until an ended sandbox's files are gone."""
        if self._emptying is not None:
            await asyncio.wait({self._emptying})

    async def close(self) -> None:
        """Measure no more."""
        if self._timer is not None:
            self._timer.cancel()
            await asyncio.wait({self._timer})
        await self.emptied()

    async def _watch(self) -> None:
        pause = _EVERY
        while self._commands and not self.overgrown:
            await asyncio.sleep(pause)
            began = time.perf_counter()
            await self._check_again()
            pause = max(_EVERY, _SHARE * (time.perf_counter() - began))

    async def _check_again(self) -> None:
        """As :meth:`check`. A measurement that fails is logged; the last of too many in a row ends the sandbox."""
        try:
            await self.check()
        except Exception as error:
            self._failures += 1
            _log.warning("sandbox %s: its files could not be measured: %r", self._sandbox, error)
            if self._failures >= _MOST_FAILURES:
                self.unwatched = True
                self._end(
                    f"sandbox {self._sandbox}: ended after {self._failures} failed measurements in a row: {error!r}"
                )
        else:
            self._failures = 0

    def _end(self, why: str) -> None:
        self.overgrown = why
        self._emptying = asyncio.create_task(self._empty(), context=Context())
