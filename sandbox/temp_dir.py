"""A directory for temporary files that is removed also where its owner was killed: by the next that makes one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path


class TempDirectory:
    """A directory, ``path``, among the temporary files, its name beginning with ``prefix``.

    Making one removes those of the same prefix that no living process holds.
    """

    def __init__(self, prefix: str) -> None:
        _remove_stale(prefix)
        hidden = Path(tempfile.mkdtemp(prefix=f".{prefix}"))
        self._lock = os.open(hidden, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # before it gets the name by which stale ones are found
        self.path = hidden.rename(hidden.with_name(hidden.name[1:]))

    def remove(self) -> None:
        """Remove it and what is in it. Once only."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_stale(prefix: str) -> None:
    for directory in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # another user's, or just being removed
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)  # nothing else: opening a pipe waits for its writer
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
            finally:
                os.close(lock)
