"""Atomic file writes: a killed process leaves no partial file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = re.compile(r"\..+\.\d+\.tmp")
"""Names of temporary files before they are renamed."""


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` and create its directory. On OSError, an existing file is unchanged."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A context that yields a temporary path beside ``path``; on success the file is flushed to disk and renamed to
    ``path``. If the block raises, ``path`` is unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
