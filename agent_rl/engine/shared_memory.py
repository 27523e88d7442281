"""Removes the shared memory of dead SGLang servers.

A server that is killed, and one that is stopped too (its processes end each other with SIGKILL), leaves its files in
``/dev/shm``: 16 KiB of load figures and Python's semaphores, with no process id in their names. SGLang's own sweep runs
only in its CI. So what counts is whether any process still has a file mapped or open.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_NAMES = ("sglang_loads_*.shm", "sgl_shm_*", "sem.mp-*")
_YOUNG_SECONDS = 60.0


def remove_stale(folder: Path = SHARED_MEMORY) -> int:
    """Remove what dead servers left in ``folder``; returns how many files. Files younger than a minute stay: a process
    may be between making one and mapping it."""
    now = time.time()
    old = [path for pattern in _NAMES for path in folder.glob(pattern) if _age(path, now) > _YOUNG_SECONDS]
    if not old:
        return 0
    used = set(_used(str(folder)))
    stale = [path for path in old if str(path) not in used]
    for path in stale:
        path.unlink(missing_ok=True)
    return len(stale)


def _age(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _used(folder: str) -> Iterator[str]:
    """Every file in ``folder`` that a process has mapped or open."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended while we looked
            for line in (process / "maps").read_text().splitlines():
                if (at := line.find(f"{folder}/")) >= 0:
                    yield line[at:]
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    yield str(descriptor.readlink())
