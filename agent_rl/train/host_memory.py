"""How much memory this machine, or the container that this process is in, has left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from sandbox.cgroup import dirs_of

_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of control groups of version 2 and 1: the limit, what is used, and what of it is cache that the kernel gives up."""


def free_memory() -> int:
    """Bytes that can still be used: of the machine, or of the tightest control group that this process is in."""
    groups = [group for directory in dirs_of("self").values() for group in (directory, *directory.parents)]
    return min([_machine(), *(room for group in groups for room in _rooms(group))])


def _machine() -> int:
    return 1024 * _field(Path("/proc/meminfo"), "MemAvailable:")


def _rooms(group: Path) -> Iterator[int]:
    """What a control group's limit leaves; nothing where it has none or can't be read."""
    for limit, used, cache in _FILES:
        with contextlib.suppress(OSError, ValueError):  # version 2 writes "max" where there is no limit
            room = int((group / limit).read_text()) - int((group / used).read_text())
            yield room + _field(group / "memory.stat", cache)


def _field(path: Path, name: str) -> int:
    """The number behind ``name`` in a file that has a name and a number a line; 0 where it is not there."""
    lines = (line.split() for line in path.read_text().splitlines())
    return next((int(fields[1]) for fields in lines if fields[0] == name), 0)
