"""Room on the disk that sandboxes are on, and what one sandbox takes of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sandbox.errors import SandboxDiskFullError
from sandbox.process import run_process

_LEAST_BYTES = 16 << 20
_LEAST_INODES = 1000
_BLOCK = 512  # bytes of find's %b
_MEASURE_SECONDS = 60.0
_MOST_OUTPUT = 64 << 20


@dataclass(frozen=True, slots=True)
class Usage:
    """What files take: ``bytes`` of the disk (holes take none), and ``inodes`` (files, directories, links)."""

    bytes: int = 0
    inodes: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.bytes + other.bytes, self.inodes + other.inodes)

    def within(self, most: Usage) -> bool:
        return self.bytes <= most.bytes and self.inodes <= most.inodes

    def __str__(self) -> str:
        return f"{self.bytes >> 20} MiB in {self.inodes} files"


def check_room(directory: Path) -> None:
    """Raise ``SandboxDiskFullError`` where the disk of ``directory`` has next to no bytes or inodes left."""
    disk = os.statvfs(directory)
    free = disk.f_bavail * disk.f_frsize
    if free < _LEAST_BYTES:
        raise SandboxDiskFullError(
            f"{directory}: {free >> 10} KiB free on its disk, sandboxes need {_LEAST_BYTES >> 20} MiB"
        )
    if disk.f_files and disk.f_favail < _LEAST_INODES:  # some file systems have no fixed number, and tell none
        raise SandboxDiskFullError(
            f"{directory}: {disk.f_favail} inodes free on its disk, sandboxes need {_LEAST_INODES}"
        )


async def usage(*directories: Path) -> Usage | None:
    """What all below ``directories`` takes, a file with several names once; None where that takes more than a minute.

    Asked of ``find``, which follows no link and goes to any depth, whatever hostile code does there meanwhile.
    """
    command = ["find", *map(str, directories), "-xdev", "-printf", "%D:%i %b\\n"]
    try:
        found = await run_process(command, timeout=_MEASURE_SECONDS, limit=_MOST_OUTPUT)
    except (OSError, TimeoutError):
        return None
    if found.timed_out:
        return None
    files = {line for line in found.stdout.split(b"\n") if line.count(b" ") == 1}
    return Usage(sum(int(line.split()[1]) for line in files) * _BLOCK, len(files))
