"""An agent program on the host: what it is given, how it ends, and that nothing of it outlives its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent_rl.endpoint.episode import run_on_host

ENV = {"PATH": os.environ["PATH"], "GIVEN": "yes"}
OWNER = """
import asyncio, sys
from agent_rl.endpoint.episode import run_on_host
asyncio.run(run_on_host(sys.argv[1], {"PATH": "/usr/bin:/bin"}, b""))
"""


async def test_a_program_gets_its_input_and_environment() -> None:
    done = await run_on_host('read -r line; echo "$line $GIVEN"; exit 3', ENV, b"a task\n")
    assert (done.exit_code, done.stdout) == (3, b"a task yes\n")


async def test_a_programs_background_processes_end_with_it(tmp_path: Path) -> None:
    await run_on_host(f"sleep 600 > /dev/null 2>&1 & echo $! > {tmp_path}/pid", ENV, b"")
    assert ended(pid_in(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_ends_with_its_killed_controller(tmp_path: Path, number: signal.Signals) -> None:
    command = f"echo $$ > {tmp_path}/begun; mv {tmp_path}/begun {tmp_path}/pid; sleep 600"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, command])
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "pid").exists():
            assert time.monotonic() < deadline, "the program did not start"
            time.sleep(0.01)
    finally:
        owner.send_signal(number)
        owner.wait(30)
    assert ended(pid_in(tmp_path))


def pid_in(directory: Path) -> int:
    return int((directory / "pid").read_text())


def ended(pid: int) -> bool:
    """Whether a process ends within ten seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.01)
    return False
