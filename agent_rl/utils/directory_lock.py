"""One process a directory: a second ``agent-rl`` that would write into the same run or evaluation is refused."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from agent_rl.errors import UserError
from r3.atomic_write import UNFINISHED

LOCK = ".lock"
_BLOCKED = (errno.EEXIST, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Make ``directory`` and hold it for this process until the block ends, however it ends: the kernel drops the
    lock of a killed process, so none is ever stale. What a killed holder was writing is removed. Raises UserError where
    another process holds it, naming that process, and where the directory cannot be made.
    """
    with _open(directory) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{directory}: in use by {_holder(file)}: wait until it ends, or choose another directory (name=... "
                "or --out)"
            ) from None
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
        _remove_unfinished(directory)
        yield


def _remove_unfinished(directory: Path) -> None:
    """Remove what a killed holder was writing; a directory inside that has a lock of its own is left to its holder."""
    for where, directories, names in os.walk(directory):
        directories[:] = [name for name in directories if not Path(where, name, LOCK).exists()]
        for name in filter(UNFINISHED.fullmatch, names):
            Path(where, name).unlink(missing_ok=True)


def _open(directory: Path) -> IO[str]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return (directory / LOCK).open("a+")  # append: whoever looks must not empty the holder's file
    except OSError as error:
        if error.errno not in _BLOCKED:
            raise
        reason = error.strerror if error.errno != errno.EEXIST else "a file of that name is there"
        raise UserError(f"{directory}: this directory cannot be written ({reason}): choose another one") from None


def _holder(file: IO[str]) -> str:
    """Who holds the lock, as it wrote itself down."""
    file.seek(0)
    try:
        holder = json.loads(file.read())
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"  # which took the lock a moment ago and has not written its name yet
