"""Floods of output that would cost the host more CPU time than the sandbox's own limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from support.contexts import used_backend_of

from sandbox import SandboxBackend, SandboxSpec
from sandbox.process import OutputThrottle
from tests.redteam.attack import report_stopped

pytestmark = [pytest.mark.redteam]

FLOOD = """
import os
count = os.open("n", os.O_RDWR | os.O_CREAT)
for n in range(1 << 20):
    os.write(1, bytes(1 << 16))
    os.pwrite(count, b"%9d" % n, 0)
"""


@pytest.fixture(
    params=[
        pytest.param("bubblewrap", marks=pytest.mark.bubblewrap),
        pytest.param("docker", marks=pytest.mark.docker),
        pytest.param("podman", marks=[pytest.mark.podman, pytest.mark.exhaustive]),
    ]
)
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[SandboxBackend]:
    async with used_backend_of(request.param) as backend:
        yield backend


@pytest.mark.slow
async def test_a_flood_is_throttled_times_out_and_can_be_cancelled(
    backend: SandboxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a budget of almost zero, the sandbox waits, times out and can be cancelled."""
    monkeypatch.setattr("sandbox.process._THROTTLE_SHARE", 1e-6)
    monkeypatch.setattr("sandbox.process._THROTTLE_BURST", 0.002)
    monkeypatch.setattr("sandbox.docker.sandbox._UNTHROTTLED", 19.0)  # of 20 s: the rest is read after 1 s
    sandbox = await backend.start(SandboxSpec(output_limit_bytes=1000))
    flooded = await sandbox.exec(["python3", "-c", FLOOD], timeout=1)
    assert flooded.timed_out
    assert flooded.truncated
    assert flooded.seconds < 15
    taken = int(await sandbox.read_file("n")) << 16
    assert taken < 20 << 20
    flood = asyncio.create_task(sandbox.exec(["python3", "-c", FLOOD], timeout=60))
    await asyncio.sleep(0.5)
    cancelled = time.monotonic()
    flood.cancel()
    await asyncio.wait({flood})
    assert time.monotonic() - cancelled < 10
    assert (await sandbox.exec("echo alive", timeout=2)).stdout == b"alive\n"
    report_stopped(
        f"flooding the host with output from {backend.name}", f"it waited; {taken >> 10} KiB were taken in 1 s"
    )


def test_throttle_allows_a_burst_and_then_a_share_of_the_cpu_limit() -> None:
    throttle = OutputThrottle(cpus=2.0)
    assert [throttle.wait_after(0.1) for _ in range(2)] == [0.0, 0.0], "a long log needs no wait"
    throttle.wait_after(0.05)
    assert throttle.wait_after(0.08) == pytest.approx(1.0, abs=0.1), "0.08 s of the host's, at a 25th of two cores"
