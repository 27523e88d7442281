"""Reads and writes files below a directory that hostile code may write to, without following symbolic links.

It opens every component of a path relative to its parent and refuses symbolic links, so there is no race between a
check and its use. A path with a link raises :class:`SandboxRequired`; a command inside the sandbox must resolve it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sandbox.errors import SandboxFileError
from sandbox.files import TreeCollector
from sandbox.types import TreeFile

_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a named pipe must not wait for its other end.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_DEPTH = 64


class SandboxRequired(Exception):
    """The path contains a symbolic link and must be resolved inside the sandbox."""


def read_file_nofollow(root: Path, parts: Sequence[str], *, max_bytes: int, path: str) -> bytes:
    """Return the content of the file ``parts`` below ``root``; ``path`` is its name in error messages.

    Raises ``SandboxFileError`` and ``SandboxRequired``.
    """
    with (
        _open_parent(root, parts, path, make=False) as directory,
        _open_regular(directory, parts[-1], os.O_RDONLY, path) as file,
    ):
        size = os.fstat(file).st_size
        if size > max_bytes:
            raise SandboxFileError(f"{path}: {size} bytes, more than the {max_bytes} allowed")
        with os.fdopen(os.dup(file), "rb") as stream:
            data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise SandboxFileError(f"{path}: more than the {max_bytes} bytes allowed")
    return data


def write_file_nofollow(root: Path, parts: Sequence[str], data: bytes, *, path: str) -> None:
    """Write ``data`` to the file ``parts`` below ``root``, creating parent directories.

    Raises ``SandboxFileError`` and ``SandboxRequired``.
    """
    flags = os.O_WRONLY | os.O_CREAT
    with (
        _open_parent(root, parts, path, make=True) as directory,
        _open_regular(directory, parts[-1], flags, path) as file,
    ):
        os.ftruncate(file, 0)
        with os.fdopen(os.dup(file), "wb") as stream:
            stream.write(data)


def gather_tree_nofollow(
    root: Path, parts: Sequence[str], tree: TreeCollector, *, skip: Collection[str], path: str
) -> None:
    """Add the files and links below the directory ``parts`` below ``root`` to ``tree``. Raises ``SandboxFileError``."""
    try:
        with _open_parent(root, [*parts, ""], path, make=False) as directory:
            _gather(directory, "", tree, skip, _MAX_DEPTH)
    except SandboxRequired:
        raise SandboxFileError(f"{path}: a link, not a directory") from None


def _gather(directory: int, prefix: str, tree: TreeCollector, skip: Collection[str], depth: int) -> None:
    if depth == 0:
        raise SandboxFileError(f"{prefix[:200]}: more than {_MAX_DEPTH} directories deep")
    with os.scandir(directory) as entries:
        modes = {entry.name: entry.stat(follow_symlinks=False).st_mode for entry in entries if entry.name not in skip}
    for name, mode in sorted(modes.items()):
        tree.count_entry()
        if stat.S_ISDIR(mode):
            child = os.open(name, _DIR, dir_fd=directory)
            try:
                _gather(child, f"{prefix}{name}/", tree, skip, depth - 1)
            finally:
                os.close(child)
        elif stat.S_ISLNK(mode):
            tree.add(prefix + name, TreeFile(mode, os.fsencode(os.readlink(name, dir_fd=directory))))
        elif stat.S_ISREG(mode):
            file = _open(name, os.O_RDONLY | _FILE, directory, name)
            with open(file, "rb", buffering=0) as stream:
                tree.read(prefix + name, mode, os.fstat(file).st_size, stream)


@contextmanager
def _open_parent(root: Path, parts: Sequence[str], path: str, *, make: bool) -> Iterator[int]:
    directory = os.open(root, _DIR)
    try:
        for part in parts[:-1]:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=directory)
            child = _open(part, _DIR, directory, path)
            os.close(directory)
            directory = child
        yield directory
    finally:
        os.close(directory)


@contextmanager
def _open_regular(directory: int, name: str, flags: int, path: str) -> Iterator[int]:
    file = _open(name, flags | _FILE, directory, path)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise SandboxFileError(f"{path}: not a regular file")
        yield file
    finally:
        os.close(file)


def _open(name: str, flags: int, directory: int, path: str) -> int:
    try:
        return os.open(name, flags, 0o644, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(name, directory):
            raise SandboxRequired(path) from None
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise SandboxFileError(f"{path}: {_REASONS.get(error.errno or 0, error.strerror)}") from None


def _is_link(name: str, directory: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except OSError:
        return False


_REASONS = {
    errno.ENOENT: "no such file",
    errno.EISDIR: "a directory, not a file",
    errno.ENXIO: "not a regular file",
    errno.ENOTDIR: "a part of the path is not a directory",
}
