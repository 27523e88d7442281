"""Free memory of the machine and of a control group."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from agent_rl.train.host_memory import free_memory
from sandbox.cgroup import find_parents, join_command

PRINT = "from agent_rl.train.host_memory import free_memory; print(free_memory())"


def test_free_memory_is_less_than_the_machines_memory() -> None:
    assert 0 < free_memory() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_control_group_limits_free_memory() -> None:
    parents = find_parents()
    if parents is None:
        pytest.skip("no control group can be made here")
    group = parents.make(f"agent-rl-memory-{os.getpid()}", memory_mb=256, pids=64, cpus=1.0)
    try:
        command = join_command(group.procs_files, [sys.executable, "-c", PRINT])
        left = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    finally:
        group.remove()
    assert 200 << 20 < left < 256 << 20
