"""What a command's event loop needs: clean-up that cancellation can't cut short, signals, pulses, files."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import sys
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from sandbox.shielded import shielded

__all__ = ["Pulse", "allow_many_files", "beside", "cancel_on_signals", "collect_rarely", "first_leaf", "shielded"]

STOP_SECONDS = 30.0
FILES = 65536
STOPPED = 130
"""Exit code of a command that was told to stop."""


class Pulse:
    """Wakes all that wait for it, each time that it is given."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def give(self) -> None:
        given, self._next = self._next, asyncio.Event()
        given.set()

    async def wait(self) -> None:
        """Return when it is given next."""
        await self._next.wait()


def allow_many_files() -> None:
    """Let this process open ``FILES`` files, or as many as it may: 1,024, as usual, are too few for a large rollout."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if most == resource.RLIM_INFINITY else min(most, FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, wanted), most))


def collect_rarely() -> None:
    """Full garbage collections stop the event loop, about a second for a million objects: from now on they leave out
    what there is by now, and come a hundred times as rarely (still, for an environment's code may need them). Those of
    new objects come a tenth as often: most of what a turn makes is gone by then, and is not looked at."""
    gc.freeze()
    gc.set_threshold(7_000, 10, 100)


def cancel_on_signals() -> None:
    """Let Ctrl-C and SIGTERM cancel the current task, which cleans up after itself; that it stops is told at once.

    A process that still lives after ``STOP_SECONDS`` is ended, for a thread that waits on a dead host, Ray's above all,
    can't be cancelled; engine and sandboxes go with their owner. Call it again after Ray was started: Ray's own
    handler of SIGTERM, installed then, prints a stack trace and ends the process on the spot.
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


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Let ``work`` run while the block does; it is cancelled at the block's end. What it raises ends the block."""
    try:
        async with asyncio.TaskGroup() as scope:
            task = scope.create_task(work)
            try:
                yield
            finally:
                task.cancel()
    except BaseExceptionGroup as errors:
        error = first_leaf(errors)
        raise error from error.__cause__


def first_leaf(error: BaseException) -> BaseException:
    """The first error of a (nested) group: what a user should read in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
