"""Reads and writes of a run's files that a kill cannot damage, and their errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from agent_rl.errors import AgentRlError, TrainerError, UserError
from r3.atomic_write import replacing, write_atomic

__all__ = [
    "LineFile",
    "disk_error",
    "nearest_existing",
    "read_json",
    "read_lines",
    "replacing",
    "write_atomic",
    "write_json",
]


class LineFile:
    """A file to which each line is appended with one write and synced to the disk. A kill or a full disk may leave a
    part of the last line, which :func:`read_lines` ignores and the next line replaces."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = sum(map(len, read_lines(path)))

    def append(self, line: bytes) -> None:
        """Add ``line``, which ends with a newline."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.truncate(self._size)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._size += len(line)

    def rewrite(self, lines: Iterable[bytes]) -> None:
        """Replace the content atomically."""
        data = b"".join(lines)
        write_atomic(self._path, data)
        self._size = len(data)


def read_lines(path: Path) -> list[bytes]:
    """The complete lines of a :class:`LineFile`, with their newlines; none if it does not exist."""
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY) + b"\n")


def read_json(path: Path) -> Any:
    return orjson.loads(path.read_bytes())


def nearest_existing(path: Path) -> Path:
    """``path``, or the nearest directory above it that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def disk_error(path: Path, error: OSError) -> AgentRlError:
    """The error for a failed write of ``path``: a UserError if the disk is full, else a TrainerError."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"{path}: the disk is full; free space, set runs_dir, or lower train.keep_checkpoints")
    return TrainerError(f"{path}: cannot be written: {error.strerror or error}")
