"""SIGTERM means what Ctrl-C means: cancel the work, which cleans up after itself."""

from __future__ import annotations

import asyncio
import signal


def cancel_on_sigterm() -> None:
    """Let SIGTERM cancel the current task. Call it again after Ray was started: its own handler, installed then, prints
    a stack trace and ends the process on the spot."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
