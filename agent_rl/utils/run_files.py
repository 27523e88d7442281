"""Atomic reads and writes of a run's files, and their errors."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import orjson

from agent_rl.errors import AgentRlError, TrainerError, UserError
from r3.atomic_write import replacing, write_atomic

__all__ = ["disk_error", "nearest_existing", "read_json", "replacing", "write_atomic", "write_json"]


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
