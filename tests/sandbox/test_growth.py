"""The disk watch when measurements fail: it goes on after one, and ends the sandbox after several in a row."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from sandbox import SandboxLostError
from sandbox.disk import Usage
from sandbox.disk_watch import GrowthWatch


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox.disk_watch._EVERY", 0.001)


class Disk:
    """Gives one measurement after the other, the last one for ever; an error is raised."""

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

    def watch(self) -> GrowthWatch:
        return GrowthWatch("sandbox-1", Usage(100, 10), self.measure, self.empty)


async def test_a_failed_measurement_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk(*[ValueError("not a number")] * 4, Usage(50, 5), ValueError("again"), Usage(200, 5))
    watch = disk.watch()
    watch.command_begins()
    await asyncio.wait_for(disk.emptied.wait(), 10)
    assert "its files grew to" in watch.overgrown
    watch.check_watched()
    assert "sandbox-1: its files could not be measured: ValueError('not a number')" in caplog.text
    await watch.close()


async def test_a_box_that_cannot_be_measured_ends_as_a_failure_of_the_sandbox() -> None:
    disk = Disk(ValueError("not a number"))
    watch = disk.watch()
    watch.command_begins()
    await asyncio.wait_for(disk.emptied.wait(), 10)
    with pytest.raises(SandboxLostError, match=r"sandbox-1: ended after 5 failed measurements in a row: ValueError"):
        watch.check_watched()
    assert disk.count == 5
    await watch.close()
