"""Removes directories that hostile code wrote to, in the background of a run."""

from __future__ import annotations

import itertools
import logging
import subprocess
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

_log = logging.getLogger(__name__)

_BACKLOG = 64
"""Waiting removals after which the start of a sandbox waits for the oldest one."""


class Remover:
    """Moves directories to ``trash``, on the same file system, and removes them one after another in a thread.

    Moving takes microseconds whatever a directory contains. A failed removal is logged; the reaper repeats it.
    """

    def __init__(self, trash: Path) -> None:
        self._trash = trash
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sandbox removal")
        self._pending: deque[Future[None]] = deque()
        self._numbers = itertools.count()

    def discard(self, path: Path) -> Future[None]:
        """Move ``path`` away and remove it in the background. The result never raises."""
        moved = self._trash / f"{path.name}-{next(self._numbers)}"
        try:
            path.rename(moved)
        except OSError:  # it is gone, or the disk is full
            moved = path
        removal = self._thread.submit(_try_remove, moved)
        self._pending.append(removal)
        return removal

    def wait_for_space(self) -> None:
        """Wait until at most 64 removals are pending. Blocking."""
        while len(self._pending) > _BACKLOG:
            self._pending.popleft().result()

    def close(self) -> None:
        """Wait for every removal. Blocking."""
        self._thread.shutdown()


def _try_remove(path: Path) -> None:
    try:
        remove_tree(path)
    except OSError as error:
        _log.warning("%s", error)


def remove_tree(path: Path) -> None:
    """Remove a directory of any depth and with any permissions without following links. Raises ``OSError``.

    It runs ``rm``, which does not recurse, without a time limit: 190,000 nested directories take minutes on some disks.
    """
    remove = ["rm", "-rf", "--", str(path)]
    if subprocess.run(remove, stderr=subprocess.DEVNULL).returncode == 0:
        return
    subprocess.run(["chmod", "-R", "u+rwX", "--", path], stderr=subprocess.DEVNULL)
    second = subprocess.run(remove, capture_output=True)
    if second.returncode != 0:
        raise OSError(f"{path} could not be removed: {second.stderr[-200:].decode(errors='replace').strip()}")
