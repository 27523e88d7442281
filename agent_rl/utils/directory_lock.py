"""Exclusive locks on run and evaluation directories."""

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
    """Create ``directory`` if it is missing and lock it for this process until the block ends.

    The kernel releases the lock of a killed process, so locks are never stale. Removes unfinished files of a killed
    owner. Raises UserError if another process owns the lock (the message names it), or if the directory cannot be
    written.
    """
    with _open(directory) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{directory}: in use by {_lock_owner(file)}: wait until it ends, or choose another directory "
                "(name=... or --out)"
            ) from None
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
        _remove_unfinished(directory)
        yield


def is_locked(directory: Path) -> bool:
    """Whether a process on this machine owns the lock. Does not wait, and does not create the lock."""
    try:
        with (directory / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _remove_unfinished(directory: Path) -> None:
    """Remove unfinished files of a killed owner, except in subdirectories with their own lock."""
    for parent, directories, names in os.walk(directory):
        directories[:] = [name for name in directories if not Path(parent, name, LOCK).exists()]
        for name in filter(UNFINISHED.fullmatch, names):
            Path(parent, name).unlink(missing_ok=True)


def _open(directory: Path) -> IO[str]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return (directory / LOCK).open("a+")  # append mode: opening must not truncate the owner's file
    except OSError as error:
        if error.errno not in _BLOCKED:
            raise
        reason = error.strerror if error.errno != errno.EEXIST else "a file of that name exists"
        raise UserError(f"{directory}: cannot be written ({reason}); choose another directory") from None


def _lock_owner(file: IO[str]) -> str:
    """Name of the owning process, from the lock file."""
    file.seek(0)
    try:
        owner = json.loads(file.read())
        return f"process {owner['pid']} on {owner['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"  # it owns the lock but has not written its name yet
