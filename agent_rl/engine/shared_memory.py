"""Removes the shared memory of dead SGLang servers.

A stopped or killed server (its processes end each other with SIGKILL) leaves files in ``/dev/shm``: 16 KiB of load
figures and Python semaphores, most without a process id in their names. SGLang's own cleanup runs only in its CI. A
file is stale if no process has it mapped or open. Files are compared by inode, because a semaphore is mapped under a
temporary name before it gets its own.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SHARED_MEMORY = Path("/dev/shm")
_NAMES = ("sglang_loads_*.shm", "sglang_host_pool_*.mmap", "sgl_shm_*", "multi_tokenizer_args_*", "nccl-*", "sem.mp-*")
_CREATOR = re.compile(r"(?:sgl_shm_.*_(\d+)_[^_]*|multi_tokenizer_args_(\d+))")


class FileId(NamedTuple):
    """A file independent of its name: the device's major and minor number, and the inode."""

    major: int
    minor: int
    inode: int

    @classmethod
    def from_stat(cls, status: os.stat_result) -> FileId:
        return cls(os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)


def remove_stale(directory: Path = SHARED_MEMORY) -> int:
    """Remove the files of this user's dead servers in ``directory``; returns the number of files."""
    # List the files before their users: a creator has its file open from the moment the name exists.
    candidates = dict(_files_of_servers(directory))
    if not candidates:
        return 0
    used = {file for process in Path("/proc").glob("[0-9]*") for file in files_used_by(int(process.name))}
    stale = [path for path, file in candidates.items() if file not in used and not _creator_is_alive(path.name)]
    for path in stale:
        path.unlink(missing_ok=True)
    return len(stale)


def _files_of_servers(directory: Path) -> Iterator[tuple[Path, FileId]]:
    for path in (path for pattern in _NAMES for path in directory.glob(pattern)):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            status = path.stat()
            if status.st_uid == os.geteuid():
                yield path, FileId.from_stat(status)


def _creator_is_alive(name: str) -> bool:
    """Whether the process named in ``name`` as the file's creator runs. It may have closed a file that another
    process opens later."""
    match = _CREATOR.fullmatch(name)
    return match is not None and Path(f"/proc/{match[1] or match[2]}").exists()


def files_used_by(process: int) -> Iterator[FileId]:
    """All files that a process has mapped or open, as far as they are readable; none if it has ended."""
    directory = Path("/proc", str(process))
    with contextlib.suppress(OSError):
        yield from _mapped((directory / "maps").read_text())
        for descriptor in (directory / "fd").iterdir():
            with contextlib.suppress(OSError):
                yield FileId.from_stat(descriptor.stat())


def _mapped(maps: str) -> Iterator[FileId]:
    for line in maps.splitlines():
        _, _, _, device, inode, *_ = line.split()
        major, minor = device.split(":")
        yield FileId(int(major, 16), int(minor, 16), int(inode))
