"""A temporary directory that is removed even if its owner was killed: the next owner removes it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path


class TempDirectory:
    """A directory ``path`` in the system's temporary directory; its name starts with ``prefix``.

    A lock on the directory shows that its owner is alive. Creating one removes unlocked directories of the same prefix.
    """

    def __init__(self, prefix: str) -> None:
        _remove_stale(prefix)
        hidden = Path(tempfile.mkdtemp(prefix=f".{prefix}"))
        self._lock = os.open(hidden, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # before the rename: stale directories are found by name
        self.path = hidden.rename(hidden.with_name(hidden.name[1:]))

    def remove(self) -> None:
        """Remove the directory with its contents. Call this once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_stale(prefix: str) -> None:
    for directory in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # locked, owned by another user, or being removed
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)  # O_DIRECTORY: opening a pipe would block
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
            finally:
                os.close(lock)
