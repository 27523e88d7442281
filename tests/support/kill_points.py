"""Kills a function at each of its changes of files, by SIGKILL and without a clock.

The function runs in a forked process. An audit hook counts the calls that change files or directories there, and kills
the process before the call of a given number. Of torch it may use only operations that start no threads.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CALLS = frozenset({"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"})
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def ends_before(number: int, function: Callable[..., Any], *arguments: Any) -> bool:
    """Run ``function`` and kill it before its change ``number``, from 1. Returns True if it ends before."""
    child = os.fork()
    if not child:
        try:
            sys.addaudithook(_killer(number))
            function(*arguments)
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    return code == 0


def contents(directory: Path) -> dict[str, bytes]:
    """The files below ``directory``, except locks."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def _killer(left: int) -> Callable[[str, tuple[Any, ...]], None]:
    def hook(event: str, details: tuple[Any, ...]) -> None:
        nonlocal left
        if event in _CALLS or (event == "open" and isinstance(details[2], int) and details[2] & _WRITING):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook
