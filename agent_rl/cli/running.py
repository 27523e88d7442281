"""Coroutines run for a command, until the user stops it."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

RESUMES = "start again to resume"
BEGINS_ANEW = "what it did is not kept; started again it begins anew"


class Stopped(Exception):
    """The user stopped the command; everything it had started is cleaned up. The message says what starting it again
    does."""


def run_async(work: Coroutine[Any, Any, T], stopped: str = BEGINS_ANEW) -> T:
    """Run a coroutine and return what it does; Ctrl-C and SIGTERM cancel it, and it cleans up after itself."""
    import asyncio

    from agent_rl.utils.concurrency import allow_many_files, cancel_on_signals

    allow_many_files()

    async def supervised() -> T:
        cancel_on_signals()
        return await work

    try:
        return asyncio.run(supervised())
    except (asyncio.CancelledError, KeyboardInterrupt):
        # Not KeyboardInterrupt: typer would answer that one itself, without a word.
        raise Stopped(stopped) from None


def complain(text: str) -> int:
    """Print the one line of an error that the user can mend; its exit code."""
    print(f"error: {text}", file=sys.stderr)
    return 2
