"""Removes the shared memory of dead SGLang servers.

A server that is killed, and one that is stopped too (its processes end each other with SIGKILL), leaves its files in
``/dev/shm``: 16 KiB of load figures and Python's semaphores, most of them with no process id in their names. SGLang's
own sweep runs only in its CI. So what counts is whether any process still has a file mapped or open. Files are compared
by their inodes: a semaphore is mapped under a temporary name before it gets its own.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SHARED_MEMORY = Path("/dev/shm")
_NAMES = (
    "sglang_loads_*.shm",
    "sglang_host_pool_*.mmap",
    "sgl_shm_*",
    "multi_tokenizer_args_*",
    "nccl-*",
    "sem.mp-*",
)
_MAKER = re.compile(r"(?:sgl_shm_.*_(\d+)_[^_]*|multi_tokenizer_args_(\d+))")


class FileId(NamedTuple):
    """A file, whatever its name is: the major and minor number of its device, and its inode."""

    major: int
    minor: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileId:
        return cls(os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)


def remove_stale(directory: Path = SHARED_MEMORY) -> int:
    """Remove what this user's dead servers left in ``directory``; returns how many files."""
    # Listed before it is looked who uses them: a maker has its file open from the moment the name is there.
    found = dict(_files_of_servers(directory))
    if not found:
        return 0
    used = {file for process in Path("/proc").glob("[0-9]*") for file in files_used_by(int(process.name))}
    stale = [path for path, file in found.items() if file not in used and not _maker_lives(path.name)]
    for path in stale:
        path.unlink(missing_ok=True)
    return len(stale)


def _files_of_servers(directory: Path) -> Iterator[tuple[Path, FileId]]:
    for path in (path for pattern in _NAMES for path in directory.glob(pattern)):
        with contextlib.suppress(FileNotFoundError):  # removed while we looked
            status = path.stat()
            if status.st_uid == os.geteuid():
                yield path, FileId.of(status)


def _maker_lives(name: str) -> bool:
    """Whether the process runs that ``name`` names as its file's maker: it may have closed what another reads later."""
    match = _MAKER.fullmatch(name)
    return match is not None and Path(f"/proc/{match[1] or match[2]}").exists()


def files_used_by(process: int) -> Iterator[FileId]:
    """Every file that a process has mapped or open, as far as it lets us look; none where it has ended."""
    directory = Path("/proc", str(process))
    with contextlib.suppress(OSError):
        yield from _mapped((directory / "maps").read_text())
        for descriptor in (directory / "fd").iterdir():
            with contextlib.suppress(OSError):
                yield FileId.of(descriptor.stat())


def _mapped(maps: str) -> Iterator[FileId]:
    for line in maps.splitlines():
        _, _, _, device, inode, *_ = line.split()
        major, minor = device.split(":")
        yield FileId(int(major, 16), int(minor, 16), int(inode))
