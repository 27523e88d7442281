"""Free space on the disk of the sandboxes, and the disk usage of one sandbox."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from sandbox.errors import SandboxDiskFullError
from sandbox.process import run_process

_MIN_FREE_BYTES = 16 << 20
_MIN_FREE_INODES = 1000
_BLOCK_BYTES = 512  # the unit of find's %b
_MEASURE_SECONDS = 60.0
_MAX_OUTPUT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Usage:
    """Disk usage: allocated ``bytes`` (holes count as 0) and ``inodes`` (files, directories and links)."""

    bytes: int = 0
    inodes: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.bytes + other.bytes, self.inodes + other.inodes)

    def __sub__(self, other: Usage) -> Usage:
        return Usage(self.bytes - other.bytes, self.inodes - other.inodes)

    def __bool__(self) -> bool:
        return bool(self.bytes or self.inodes)

    def within(self, limit: Usage) -> bool:
        return self.bytes <= limit.bytes and self.inodes <= limit.inodes

    def explains(self, lacking: Usage) -> bool:
        """Whether growth by this usage is larger than what the disk lacks."""
        return 0 < lacking.bytes < self.bytes or 0 < lacking.inodes < self.inodes

    def __str__(self) -> str:
        return f"{self.bytes >> 20} MiB in {self.inodes} files"


def shortage(directory: Path) -> Usage:
    """Return what the disk of ``directory`` lacks of 16 MiB and 1,000 inodes that are free; zeros if nothing."""
    disk = os.statvfs(directory)
    inodes = _MIN_FREE_INODES - disk.f_favail if disk.f_files else 0  # f_files is 0 without a fixed number
    return Usage(max(0, _MIN_FREE_BYTES - disk.f_bavail * disk.f_frsize), max(0, inodes))


def check_free_space(directory: Path) -> None:
    """Raise ``SandboxDiskFullError`` if the disk of ``directory`` has less than 16 MiB or 1,000 inodes free."""
    lacking = shortage(directory)
    if lacking.bytes:
        free = (_MIN_FREE_BYTES - lacking.bytes) >> 10
        raise SandboxDiskFullError(
            f"{directory}: {free} KiB free on its disk, sandboxes need {_MIN_FREE_BYTES >> 20} MiB"
        )
    if lacking.inodes:
        free = _MIN_FREE_INODES - lacking.inodes
        raise SandboxDiskFullError(f"{directory}: {free} inodes free on its disk, sandboxes need {_MIN_FREE_INODES}")


def free_bytes(directory: Path | None) -> int | None:
    """Return the free bytes on the directory's disk, or None if the directory is on another machine."""
    return shutil.disk_usage(directory).free if directory is not None and directory.is_dir() else None


async def usage(*directories: Path) -> Usage | None:
    """Return the disk usage of everything below ``directories``, or None if measuring takes more than 60 seconds.

    Hard links count once. It runs ``find``, which follows no link and handles any depth while hostile code writes.
    """
    command = ["find", *map(str, directories), "-xdev", "-printf", "%D:%i %b\\n"]
    try:
        result = await run_process(command, timeout=_MEASURE_SECONDS, limit=_MAX_OUTPUT_BYTES)
    except (OSError, TimeoutError):
        return None
    if result.timed_out:
        return None
    files = {line for line in result.stdout.split(b"\n") if line.count(b" ") == 1}
    return Usage(sum(int(line.split()[1]) for line in files) * _BLOCK_BYTES, len(files))
