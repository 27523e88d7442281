"""Cancellation: clean-up that it can't cut short, and the signal that asks for it."""

from __future__ import annotations

import asyncio
import signal

from sandbox.aio import shielded

__all__ = ["cancel_on_sigterm", "shielded"]


def cancel_on_sigterm() -> None:
    """Let SIGTERM cancel the current task, as Ctrl-C does; the task cleans up after itself. Call it again after Ray was
    started: Ray's own handler, installed then, prints a stack trace and ends the process on the spot."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
