"""Argument types and process control shared by the commands."""

from __future__ import annotations

import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from agent_rl.config import RunConfig

ConfigPath = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="A YAML file or a name from `agent-rl config list`.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[section.key=value]...", help="Config overrides; values are YAML.")
]

T = TypeVar("T")

RESUMABLE = "start again to resume"
NOT_RESUMABLE = "results are not kept; the next start begins anew"


class CommandStopped(Exception):
    """Signal ``number`` stopped the command and its clean-up is done. The message says what the next start does."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.number = number


def load(config: Path, overrides: list[str] | None) -> RunConfig:
    """The config of a command's arguments. Raises ConfigError."""
    from agent_rl.config.loader import load_config

    return load_config(config, overrides or ())


def run_async(work: Coroutine[Any, Any, T], stop_message: str = NOT_RESUMABLE) -> T:
    """Run a coroutine and return its result. Ctrl-C and SIGTERM cancel it; then CommandStopped is raised."""
    import asyncio

    from agent_rl.utils.concurrency import cancel_on_signals, raise_open_file_limit

    raise_open_file_limit()
    received: list[int] = []

    async def supervised() -> T:
        cancel_on_signals(received)
        return await work

    try:
        return asyncio.run(supervised())
    except (asyncio.CancelledError, KeyboardInterrupt):
        # Not KeyboardInterrupt: typer catches that one and exits without a message.
        raise CommandStopped(stop_message, *received[:1]) from None


def print_error(text: str) -> int:
    """Print a one-line error to stderr, without control characters, because it may quote a foreign file. Returns the
    exit code for user errors, 2."""
    from sandbox import printable

    print(f"error: {printable(text)}", file=sys.stderr)
    return 2
