"""Helpers for a command's event loop: signals, shielded clean-up, notifications, process limits and the
loop's delay."""

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

import numpy as np

from sandbox.shielded import shielded as shielded

STOP_SECONDS = 30.0
MAX_OPEN_FILES = 65536


class Notifier:
    """Wakes all waiting tasks at each call of :meth:`notify`."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        current, self._next = self._next, asyncio.Event()
        current.set()

    async def wait(self) -> None:
        """Return at the next call of :meth:`notify`."""
        await self._next.wait()


def raise_open_file_limit() -> None:
    """Raise this process's limit of open files to ``MAX_OPEN_FILES`` or the hard limit.

    The usual 1,024 are too few for a large rollout.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, target), hard))


def reduce_gc_pauses() -> None:
    """Shorten the pauses of the event loop that garbage collection causes.

    A full collection takes about a second per million objects. This call excludes all existing objects, makes full
    collections 100 times rarer, and collections of new objects 10 times rarer, so that most objects of a turn are freed
    before a collection. Collection stays enabled, because an environment's code may need it.
    """
    gc.freeze()
    gc.set_threshold(7_000, 10, 100)


def exit_code(number: int) -> int:
    """The exit code of a command that signal ``number`` stopped: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + number


def cancel_on_signals(received: list[int]) -> None:
    """Make Ctrl-C and SIGTERM cancel the current task and print a line at once. ``received`` gets their numbers.

    The process exits after ``STOP_SECONDS`` in any case, because neither a thread that waits for a dead node (in Ray,
    for example) nor a loop of an environment can be cancelled; engines and sandboxes end with their owner.
    """
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, _stop, task, number, received)
        signal.signal(number, _exit_later)  # in place of asyncio's, which does nothing
        signal.siginterrupt(number, False)


def restore_sigterm() -> None:
    """Give SIGTERM back to Python's handler. Ray replaces it, in C++, with one that prints a stack trace and aborts."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        signal.siginterrupt(signal.SIGTERM, False)


def _stop(task: asyncio.Task[object], number: int, received: list[int]) -> None:
    first = not task.cancelling()
    received.append(number)
    task.cancel()  # before the print, because it removes the panel from the screen
    if first:
        print("stopping: cleaning up (some seconds) ...", file=sys.stderr, flush=True)


def _exit_later(number: int, frame: object) -> None:
    """Python calls it also while the event loop is busy."""
    last_resort = threading.Timer(STOP_SECONDS, os._exit, [exit_code(number)])
    last_resort.daemon = True
    last_resort.start()


@asynccontextmanager
async def run_alongside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run ``work`` concurrently with the block and cancel it at the end. An error of ``work`` ends the block."""
    try:
        async with asyncio.TaskGroup() as scope:
            task = scope.create_task(work)
            try:
                yield
            finally:
                task.cancel()
    except BaseExceptionGroup as errors:
        error = first_error(errors)
        raise error from error.__cause__


def first_error(error: BaseException) -> BaseException:
    """The first error of a nested exception group, for a one-line message."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


INTERVAL = 0.05
"""Seconds between two measurements."""


class LoopLag:
    """``delays``: measured delays in seconds since the last call of :meth:`metrics`."""

    def __init__(self, interval: float = INTERVAL) -> None:
        self._interval = interval
        self.delays: list[float] = []

    async def watch(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._interval
            await asyncio.sleep(self._interval)
            self.delays.append(loop.time() - due)

    def metrics(self) -> dict[str, float]:
        """``loop/*`` since the last call; empty if there is no measurement."""
        delays, self.delays = self.delays, []
        return {"loop/lag_p99_ms": 1e3 * float(np.quantile(delays, 0.99))} if delays else {}
