"""Ends a sandbox that exceeds its disk limit. It measures on a timer while commands run, and when the disk is full.

It repeats a failed measurement. After 5 consecutive failures it ends the sandbox with ``SandboxLostError``.
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
"""The pause after a measurement is at least this multiple of its duration."""
_MAX_FAILURES = 5
"""Consecutive failed measurements after which the sandbox is ended, because its limit is not enforced."""
_NOTHING = Usage()


class DiskWatch:
    """Watches the disk usage of one sandbox.

    ``measure`` returns the usage, or None if it is unknown. ``empty`` kills all processes and removes the files.
    """

    def __init__(
        self,
        sandbox: str,
        limit: Usage,
        measure: Callable[[], Coroutine[object, object, Usage | None]],
        empty: Callable[[], Coroutine[object, object, None]],
    ) -> None:
        self._sandbox, self._limit, self._measure, self._empty = sandbox, limit, measure, empty
        self._baseline = Usage()
        self._timer: asyncio.Task[None] | None = None
        self._emptying: asyncio.Task[None] | None = None
        self._commands = self._failures = 0
        self.overgrown = ""
        """One line with the reason after the sandbox was ended; empty before."""
        self.unmeasurable = False
        """Whether it was ended because measurements failed: a failure of the sandbox, not of the agent."""

    async def set_baseline(self) -> None:
        """Take the current usage (the files of the image) as the start of the sandbox's growth."""
        self._baseline = await self._measure() or Usage()

    def command_begins(self) -> None:
        """Start measuring, if not started yet."""
        self._commands += 1
        if self._timer is None or self._timer.done():
            self._timer = asyncio.create_task(self._watch(), context=Context())

    def command_ends(self) -> None:
        """Stop after one more measurement, unless another command runs."""
        self._commands -= 1

    async def check(self, lacking: Usage = _NOTHING) -> None:
        """Measure now. End the sandbox if it grew beyond its limit, or by more than the ``lacking`` space of a full
        disk."""
        used = await self._measure()
        if used is None or self.overgrown:
            return
        grown = used - self._baseline
        if not grown.within(self._limit):
            self._end(
                f"sandbox {self._sandbox}: it was ended, as its files grew to {grown}; the limit is {self._limit} "
                "(sandbox.disk_mb, sandbox.inodes)"
            )
        elif grown.explains(lacking):
            self._end(f"sandbox {self._sandbox}: it was ended, as its files grew to {grown} and filled the disk")

    def raise_if_unmeasurable(self) -> None:
        """Raise ``SandboxLostError`` if the sandbox was ended because measurements failed."""
        if self.unmeasurable:
            raise SandboxLostError(self.overgrown)

    async def emptied(self) -> None:
        """Wait until the files of an ended sandbox are removed."""
        if self._emptying is not None:
            await asyncio.wait({self._emptying})

    async def close(self) -> None:
        """Stop measuring."""
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
        """Call :meth:`check`; log a failure, and end the sandbox after ``_MAX_FAILURES`` consecutive ones."""
        try:
            await self.check()
        except Exception as error:
            self._failures += 1
            _log.warning("sandbox %s: its files could not be measured: %r", self._sandbox, error)
            if self._failures >= _MAX_FAILURES:
                self.unmeasurable = True
                self._end(
                    f"sandbox {self._sandbox}: ended after {self._failures} failed measurements in a row: {error!r}"
                )
        else:
            self._failures = 0

    def _end(self, why: str) -> None:
        self.overgrown = why
        self._emptying = asyncio.create_task(self._empty(), context=Context())
