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
"""The environment variable that all processes of a local Ray inherit: its folder."""
STOP_SECONDS = 10.0
_FOLDER = "agent-rl-ray-"
_LOCK = "owner.lock"


def make_folder() -> Path:
    """A new folder for a local Ray of this process."""
    return Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))


def hold(folder: Path) -> IO[bytes]:
    """Lock ``folder`` for as long as this process lives. (A process id tells less: it may be another's by now.)"""
    lock = (folder / _LOCK).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def start_guard(folder: Path) -> subprocess.Popen[bytes]:
    """Start the process that calls :func:`remove` once the owner's lock on ``folder`` is gone. Ctrl-C does not reach
    it."""
    nowhere = subprocess.DEVNULL
    command = [sys.executable, "-I", "-S", __file__, str(folder)]
    return subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)


def processes(folder: Path) -> set[int]:
    """The processes of the local Ray in ``folder``: all inherited its mark. (Some rename themselves, and some outlive
    their parents, so neither command lines nor parents tell.)"""
    mark = f"{MARK}={folder}".encode()
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


def remove(folder: Path) -> None:
    """Kill what is left of the local Ray in ``folder``, whose owner is dead, and remove the folder."""
    deadline = time.monotonic() + STOP_SECONDS
    while (left := processes(folder)) and time.monotonic() < deadline:  # a dying one may start another
        _kill(left)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def remove_stale() -> None:
    """As :func:`remove`, for every local Ray whose owner and guard were both killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        if _is_stale(folder):
            remove(folder)


def _is_stale(folder: Path) -> bool:
    """Whether the owner of ``folder`` is dead."""
    try:
        with (folder / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # held by its living owner, or just being made
    return True


def _kill(pids: set[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _guard(folder: Path) -> None:
    with suppress(FileNotFoundError):  # the owner has ended and removed it
        with (folder / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
        remove(folder)


if __name__ == "__main__":
    _guard(Path(sys.argv[1]))
