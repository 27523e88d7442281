"""Atomic file writes: a process that is killed leaves nothing half-written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = re.compile(r"\..+\.\d+\.tmp")
"""The names under which files are written before they get their own."""


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``, whose directory is made if need be. Raises OSError, leaving what was there before."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside ``path`` for the caller to write a file under; afterwards that file is flushed to disk and renamed
    to ``path``. Where the caller raises, ``path`` stays as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
