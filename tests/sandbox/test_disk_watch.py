"""The disk watch with failing measurements: it continues after one and ends the sandbox after five in a row."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from sandbox import SandboxLostError
from sandbox.disk import DiskWatch, Usage


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox.disk._EVERY", 0.001)


class Disk:
    """Returns the given measurements in order, then repeats the last; raises those that are errors."""

    def __init__(self, *measured: Usage | Exception) -> None:
        self.measured: Sequence[Usage | Exception] = measured
        self.count, self.emptied = 0, asyncio.Event()

    async def measure(self) -> Usage:
        now = self.measured[min(self.count, len(self.measured) - 1)]
        self.count += 1
        if isinstance(now, Exception):
            raise now
        return now

    async def empty(self) -> None:
        self.emptied.set()

    def watch(self) -> DiskWatch:
        return DiskWatch("sandbox-1", Usage(100, 10), self.measure, self.empty)


async def test_measuring_continues_after_failures(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk(*[ValueError("not a number")] * 4, Usage(50, 5), ValueError("again"), Usage(200, 5))
    watch = disk.watch()
    watch.command_begins()
    await asyncio.wait_for(disk.emptied.wait(), 10)
    assert "its files grew to" in watch.overgrown
    watch.raise_if_unmeasurable()
    assert "sandbox-1: its files could not be measured: ValueError('not a number')" in caplog.text
    await watch.close()


async def test_five_failed_measurements_end_the_sandbox() -> None:
    disk = Disk(ValueError("not a number"))
    watch = disk.watch()
    watch.command_begins()
    await asyncio.wait_for(disk.emptied.wait(), 10)
    with pytest.raises(SandboxLostError, match=r"sandbox-1: ended after 5 failed measurements in a row: ValueError"):
        watch.raise_if_unmeasurable()
    assert disk.count == 5
    await watch.close()
