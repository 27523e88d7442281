"""Cancellation: clean-up that it can't cut short, and the signals that ask for it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading

from sandbox.aio import shielded

__all__ = ["cancel_on_signals", "shielded"]

STOP_SECONDS = 30.0
STOPPED = 130
"""Exit code of a command that was told to stop."""


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
