"""Floods of output, by which a sandbox would have the host work for it beyond its own CPU limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from support.contexts import used_backend_of

from sandbox import SandboxBackend, SandboxSpec
from sandbox.output_throttle import Toll
from tests.redteam.attack import held

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
        pytest.param("podman"),
    ]
)
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[SandboxBackend]:
    async with used_backend_of(request.param) as backend:
        yield backend


async def test_a_flood_has_to_wait_for_the_host(backend: SandboxBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a toll that next to nothing is left of, the sandbox stands still instead, ends in time and can be
    cancelled."""
    monkeypatch.setattr("sandbox.output_throttle._SHARE", 1e-6)
    monkeypatch.setattr("sandbox.output_throttle._SAVINGS", 0.002)
    sandbox = await backend.start(SandboxSpec(output_limit_bytes=1000))
    flooded = await sandbox.exec(["python3", "-c", FLOOD], timeout=3)
    assert flooded.timed_out
    assert flooded.truncated
    assert flooded.seconds < 15
    taken = int(await sandbox.read_file("n")) << 16
    assert taken < 20 << 20
    flood = asyncio.create_task(sandbox.exec(["python3", "-c", FLOOD], timeout=60))
    await asyncio.sleep(1)
    cancelled = time.monotonic()
    flood.cancel()
    await asyncio.wait({flood})
    assert time.monotonic() - cancelled < 10
    assert (await sandbox.exec("echo alive", timeout=2)).stdout == b"alive\n"
    held(f"flooding the host with output from {backend.name}", f"it waited; {taken >> 10} KiB were taken in 3 s")


def test_what_a_sandbox_may_cost() -> None:
    toll = Toll(cpus=2.0)
    assert [toll.wait_after(0.1) for _ in range(2)] == [0.0, 0.0], "a long log passes without a wait"
    toll.wait_after(0.05)
    assert toll.wait_after(0.08) == pytest.approx(1.0, abs=0.1), "0.08 s of the host's, at a 25th of two cores"
