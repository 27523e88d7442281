"""How much memory is left: of the machine, and of the group of processes that this one is in."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from agent_rl.train.host_memory import free_memory
from sandbox.cgroup import find_parents, join_command

PRINT = "from agent_rl.train.host_memory import free_memory; print(free_memory())"


def test_a_machine_has_less_left_than_it_has() -> None:
    assert 0 < free_memory() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_control_group_leaves_what_its_limit_does() -> None:
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
