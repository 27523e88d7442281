"""A local Ray ends with its owner, however that one ends. Imports only the standard library: the guard runs this file.

Most of Ray's processes die with the process that started them; its agents, which Ray can't do without, were seen to
live on for a minute after a SIGKILL. So a small process, the guard, waits for the owner's lock and then ends the rest.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

MARK = "AGENT_RL_RAY_FOLDER"
"""The environment variable that all processes of a local Ray inherit: its directory."""
STOP_SECONDS = 10.0
_DIRECTORY = "agent-rl-ray-"
_LOCK = "owner.lock"


def make_dir() -> Path:
    """A new directory for a local Ray of this process."""
    return Path(tempfile.mkdtemp(prefix=f"{_DIRECTORY}{os.getpid()}-"))


def hold(directory: Path) -> IO[bytes]:
    """Lock ``directory`` for as long as this process lives. (A process id tells less: it may be another's by now.)"""
    lock = (directory / _LOCK).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def start_guard(directory: Path) -> subprocess.Popen[bytes]:
    """Start the process that calls :func:`remove` once the owner's lock on ``directory`` is gone. Ctrl-C does not reach
    it."""
    nowhere = subprocess.DEVNULL
    command = [sys.executable, "-I", "-S", __file__, str(directory)]
    return subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)


def processes(directory: Path) -> set[int]:
    """The processes of the local Ray in ``directory``: all inherited its mark. (Some rename themselves, and some
    outlive their parents, so neither command lines nor parents tell.)"""
    mark = f"{MARK}={directory}".encode()
    marked: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                marked.add(int(entry.name))
        except OSError:
            continue  # it ended while we looked, or is another user's
    return marked - {os.getpid()}


def end(pids: set[int]) -> None:
    """Wait until they have ended, as Ray has told them to; kill what is left when the time is up."""
    deadline = time.monotonic() + STOP_SECONDS
    while left := {pid for pid in pids if Path(f"/proc/{pid}").exists()}:
        if time.monotonic() > deadline:
            _kill(left)
            return
        time.sleep(0.02)


def remove(directory: Path) -> None:
    """Kill what is left of the local Ray in ``directory``, whose owner is dead, and remove the directory."""
    deadline = time.monotonic() + STOP_SECONDS
    while (left := processes(directory)) and time.monotonic() < deadline:  # a dying one may start another
        _kill(left)
        time.sleep(0.05)
    shutil.rmtree(directory, ignore_errors=True)


def remove_stale() -> None:
    """As :func:`remove`, for every local Ray whose owner and guard were both killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_DIRECTORY}*-*"):
        if _is_stale(directory):
            remove(directory)


def _is_stale(directory: Path) -> bool:
    """Whether the owner of ``directory`` is dead."""
    try:
        with (directory / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # held by its living owner, or just being made
    return True


def _kill(pids: set[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _guard(directory: Path) -> None:
    with suppress(FileNotFoundError):  # the owner has ended and removed it
        with (directory / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
        remove(directory)


if __name__ == "__main__":
    _guard(Path(sys.argv[1]))
