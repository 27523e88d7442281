"""Free space on the disk of the sandboxes, the disk usage of one sandbox, and its limit.

A sandbox that exceeds its limit is ended. Its usage is measured on a timer while commands run, and when the disk is
full. A failed measurement is repeated; 5 consecutive failures end the sandbox with ``SandboxLostError``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path

from sandbox.errors import SandboxDiskFullError, SandboxLostError
from sandbox.process import run_process

_log = logging.getLogger(__name__)

_MIN_FREE_BYTES = 16 << 20
_MIN_FREE_INODES = 1000
_BLOCK_BYTES = 512  # the unit of find's %b
_MEASURE_SECONDS = 60.0
_MAX_OUTPUT_BYTES = 64 << 20
_EVERY = 3.0
"""Seconds between two measurements."""
_SHARE = 10.0
"""The pause after a measurement is at least this multiple of its duration."""
_MAX_FAILURES = 5
"""Consecutive failed measurements after which the sandbox is ended, because its limit is not enforced."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Disk usage: allocated ``bytes`` (holes count as 0) and ``inodes`` (files, directories and links)."""

    bytes: int = 0
    inodes: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.bytes + other.bytes, self.inodes + other.inodes)

    def __sub__(self, other: Usage) -> Usage:
        return Usage(self.bytes - other.bytes, self.inodes - other.inodes)

    def __bool__(self) -> bool:
        return bool(self.bytes or self.inodes)

    def within(self, limit: Usage) -> bool:
        return self.bytes <= limit.bytes and self.inodes <= limit.inodes

    def explains(self, lacking: Usage) -> bool:
        """Whether growth by this usage is larger than what the disk lacks."""
        return 0 < lacking.bytes < self.bytes or 0 < lacking.inodes < self.inodes

    def __str__(self) -> str:
        return f"{self.bytes >> 20} MiB in {self.inodes} files"


_NOTHING = Usage()


def shortage(directory: Path) -> Usage:
    """Return what the disk of ``directory`` lacks of 16 MiB and 1,000 inodes that are free; zeros if nothing."""
    disk = os.statvfs(directory)
    inodes = _MIN_FREE_INODES - disk.f_favail if disk.f_files else 0  # f_files is 0 without a fixed number
    return Usage(max(0, _MIN_FREE_BYTES - disk.f_bavail * disk.f_frsize), max(0, inodes))


def check_free_space(directory: Path) -> None:
    """Raise ``SandboxDiskFullError`` if the disk of ``directory`` has less than 16 MiB or 1,000 inodes free."""
    lacking = shortage(directory)
    if lacking.bytes:
        free = (_MIN_FREE_BYTES - lacking.bytes) >> 10
        raise SandboxDiskFullError(
            f"{directory}: {free} KiB free on its disk, sandboxes need {_MIN_FREE_BYTES >> 20} MiB"
        )
    if lacking.inodes:
        free = _MIN_FREE_INODES - lacking.inodes
        raise SandboxDiskFullError(f"{directory}: {free} inodes free on its disk, sandboxes need {_MIN_FREE_INODES}")


def free_bytes(directory: Path | None) -> int | None:
    """Return the free bytes on the directory's disk, or None if the directory is on another machine."""
    return shutil.disk_usage(directory).free if directory is not None and directory.is_dir() else None


async def usage(*directories: Path) -> Usage | None:
    """Return the disk usage of everything below ``directories``, or None if measuring takes more than 60 seconds.

    Hard links count once. It runs ``find``, which follows no link and handles any depth while hostile code writes.
    """
    command = ["find", *map(str, directories), "-xdev", "-printf", "%D:%i %b\\n"]
    try:
        result = await run_process(command, timeout=_MEASURE_SECONDS, limit=_MAX_OUTPUT_BYTES)
    except (OSError, TimeoutError):
        return None
    if result.timed_out:
        return None
    files = {line for line in result.stdout.split(b"\n") if line.count(b" ") == 1}
    return Usage(sum(int(line.split()[1]) for line in files) * _BLOCK_BYTES, len(files))


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
