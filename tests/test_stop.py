"""Ctrl-C and SIGTERM: an immediate message, clean-up, and an exit even if a thread cannot be cancelled."""

from __future__ import annotations

import asyncio
import io
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from agent_rl.monitoring.console import Display

WAITS = """
import asyncio, sys, threading
import agent_rl.utils.concurrency
from agent_rl.cli import common, root
agent_rl.utils.concurrency.STOP_SECONDS = 0.5

async def work():
    print("begun", flush=True)
    try:
        {wait}
    finally:
        print("cleaned up", flush=True)

sys.argv = ["agent-rl"]
root.app = lambda: common.run_async(work(), common.RESUMABLE)
root.main()
"""
PATIENT = "await asyncio.sleep(600)"
STUCK = "await agent_rl.utils.concurrency.shielded(asyncio.to_thread(threading.Event().wait))"
BUSY = "while True: pass"
RAY_SESSION = """from agent_rl.train.ray_session import ray_session
async with ray_session(None, cpus=1):
    print("ray started", flush=True)
    await asyncio.sleep(600)"""
RAY_WORKERS = """from contextlib import ExitStack
from agent_rl.config import TrainConfig
from agent_rl.train.worker_group import WorkerGroup
with ExitStack() as ray:
    await WorkerGroup(ray).launch(TrainConfig(device="cpu"), None)
    print("ray started", flush=True)
    await asyncio.sleep(600)"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("wait", [PATIENT, STUCK, BUSY])
def test_stopped_command_prints_a_message_and_exits(number: signal.Signals, wait: str) -> None:
    """``STUCK`` waits for a thread that never ends, as a connection to a dead Ray cluster does. ``BUSY`` computes in
    the event loop, as ``tasks()`` of an environment may, so that no message is printed."""
    command = [sys.executable, "-c", WAITS.format(wait=wait)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    out, error = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert error.startswith("stopping: cleaning up") or wait == BUSY
    if wait == PATIENT:
        assert out == "cleaned up\n"
        assert error.splitlines()[-1] == "stopped; start again to resume"


@pytest.mark.long
@pytest.mark.megatron
@pytest.mark.parametrize("source", [RAY_SESSION, RAY_WORKERS], ids=["session", "workers"])
def test_sigterm_after_ray_started_is_as_clean_as_ctrl_c(source: str) -> None:
    """Ray's own handler prints ten lines and aborts."""
    program = WAITS.format(wait="\n        ".join(source.splitlines())).replace("SECONDS = 0.5", "SECONDS = 60")
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert [process.stdout.readline() for _ in range(2)] == ["begun\n", "ray started\n"]
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (143, "cleaned up\n")
    lines = [line for line in error.splitlines() if "Failed to register actor" not in line]  # one that was starting
    assert lines == ["stopping: cleaning up (some seconds) ...", "stopped; start again to resume"]


async def test_panel_is_removed_when_the_command_is_stopped() -> None:
    out = io.StringIO()
    begun = asyncio.Event()

    async def work() -> None:
        with Display("demo", Console(file=out, force_terminal=True, width=80)) as display:
            display.stage("rollout", total=4)
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                out.truncate(0)
                display.stage("cleaning up")

    task = asyncio.create_task(work())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "╭" not in out.getvalue()
