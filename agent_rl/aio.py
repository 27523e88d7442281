"""What a command's event loop needs: clean-up that cancellation can't cut short, the signals that ask for it, files."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import threading

from sandbox.aio import shielded

__all__ = ["allow_many_files", "cancel_on_signals", "shielded"]

STOP_SECONDS = 30.0
FILES = 65536
STOPPED = 130
"""Exit code of a command that was told to stop."""


def allow_many_files() -> None:
    """Let this process open ``FILES`` files, or as many as it may: 1,024, as usual, are too few for a large rollout."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if most == resource.RLIM_INFINITY else min(most, FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, wanted), most))


def cancel_on_signals() -> None:
    """Let Ctrl-C and SIGTERM cancel the current task, which cleans up after itself; that it stops is told at once.

    A process that still lives after ``STOP_SECONDS`` is ended, for a thread that waits on a dead host, Ray's above all,
    can't be cancelled; engine and boxes go with their owner. Call it again after Ray was started: Ray's own handler of
    SIGTERM, installed then, prints a stack trace and ends the process on the spot.
    """
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, _stop, task)


def _stop(task: asyncio.Task[object]) -> None:
    first = not task.cancelling()
    task.cancel()  # before anything is printed: it takes the panel off the screen
    if first:
        print("stopping: ending what was started (some seconds) ...", file=sys.stderr, flush=True)
        last_resort = threading.Timer(STOP_SECONDS, os._exit, [STOPPED])
        last_resort.daemon = True
        last_resort.start()
