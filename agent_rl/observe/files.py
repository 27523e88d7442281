"""Atomic file writes: a killed run leaves nothing half-written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` beside ``path``, flush it to disk, and rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY) + b"\n")


def read_json(path: Path) -> Any:
    return orjson.loads(path.read_bytes())
