"""End the processes of a local Ray when its owner ends. Imports only the standard library: a guard process runs this
file.

Most of Ray's processes die with the process that started them, but its agents can outlive a SIGKILL by a minute. The
guard, a small process, waits for the owner's lock and then kills the rest.
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

MARK = "AGENT_RL_RAY_DIR"
"""The environment variable, inherited by all processes of a local Ray, that holds its directory."""
STOP_SECONDS = 10.0
_DIRECTORY = "agent-rl-ray-"
_LOCK = "owner.lock"


def make_dir() -> Path:
    """A new directory for a local Ray of this process, open to this user only. (Its name is short: Ray adds 70
    characters for a socket, whose path may have 107.)"""
    return Path(tempfile.mkdtemp(prefix=_DIRECTORY))


def lock_dir(directory: Path) -> IO[bytes]:
    """Lock ``directory`` for the life of this process. (A process id could be reused.)"""
    lock = (directory / _LOCK).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def start_guard(directory: Path) -> subprocess.Popen[bytes]:
    """Start the process that calls :func:`remove` when the owner's lock on ``directory`` is gone. It ignores Ctrl-C."""
    devnull = subprocess.DEVNULL
    command = [sys.executable, "-I", "-S", __file__, str(directory)]
    return subprocess.Popen(command, stdin=devnull, stdout=devnull, stderr=devnull, start_new_session=True)


def processes(directory: Path) -> set[int]:
    """The processes of the local Ray in ``directory``, by the variable that all of them inherit. (Some rename
    themselves or outlive their parents, so command lines and parents do not identify them.)"""
    mark = f"{MARK}={directory}".encode()
    marked: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                marked.add(int(entry.name))
        except OSError:
            continue  # the process has ended, or belongs to another user
    return marked - {os.getpid()}


def end(pids: set[int]) -> None:
    """Wait until the processes have ended; kill those left after :data:`STOP_SECONDS`."""
    deadline = time.monotonic() + STOP_SECONDS
    while remaining := {pid for pid in pids if Path(f"/proc/{pid}").exists()}:
        if time.monotonic() > deadline:
            _kill(remaining)
            return
        time.sleep(0.02)


def remove(directory: Path) -> None:
    """Kill the processes of the local Ray in ``directory``, whose owner is dead, and remove the directory."""
    deadline = time.monotonic() + STOP_SECONDS
    while (remaining := processes(directory)) and time.monotonic() < deadline:  # a dying process may start another
        _kill(remaining)
        time.sleep(0.05)
    shutil.rmtree(directory, ignore_errors=True)


def remove_stale() -> None:
    """Call :func:`remove` for every local Ray whose owner and guard were both killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_DIRECTORY}*"):
        if is_stale(directory):
            remove(directory)


def is_stale(directory: Path) -> bool:
    """Whether the owner of ``directory`` is dead."""
    try:
        with (directory / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # its owner lives, or is just creating it
    return True


def _kill(pids: set[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _guard(directory: Path) -> None:
    with suppress(FileNotFoundError):  # the owner has removed it
        with (directory / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
        remove(directory)


if __name__ == "__main__":
    _guard(Path(sys.argv[1]))
