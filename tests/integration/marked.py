"""Processes of a run, known by a mark in their environment, which all of its descendants have."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def processes(mark: str) -> dict[int, str]:
    """Those that live: the beginning of the command line, by process id."""
    entry, found = f"TEST_MARK={mark}".encode(), {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if entry in (directory / "environ").read_bytes().split(b"\0"):
                found[int(directory.name)] = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended while we looked, or is a zombie
    return {pid: command for pid, command in found.items() if command}


def kill_rank(mark: str, number: int = 0) -> None:
    """Kill one of the trainer's ranks, which are counted in the order of their process ids."""
    ranks = sorted(pid for pid, command in processes(mark).items() if "WorkerActor" in command)
    os.kill(ranks[number], signal.SIGKILL)
