"""Reads and writes files below a directory that hostile code may write to, without following a symbolic link out of it.

Every step of a path is opened relative to the one before and refused if it is a symbolic link, so that there is no
moment between a check and its use. What would need a link followed raises :class:`SandboxRequired`: only the sandbox
itself, where links mean what they should, can do it.
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
from sandbox.files import Tree
from sandbox.types import TreeFile

_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a named pipe would wait for its other end.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


_MAX_DEPTH = 64


class SandboxRequired(Exception):
    """The path holds a symbolic link: it must be resolved inside the sandbox."""


def read_beneath(root: Path, parts: Sequence[str], *, max_bytes: int, path: str) -> bytes:
    """The bytes of the file ``parts`` below ``root``. ``path`` is its name in errors. Raises ``SandboxFileError``."""
    with _parent(root, parts, path, make=False) as directory, _opened(directory, parts[-1], os.O_RDONLY, path) as file:
        size = os.fstat(file).st_size
        if size > max_bytes:
            raise SandboxFileError(f"{path}: {size} bytes, more than the {max_bytes} allowed")
        with os.fdopen(os.dup(file), "rb") as stream:
            data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise SandboxFileError(f"{path}: more than the {max_bytes} bytes allowed")
    return data


def write_beneath(root: Path, parts: Sequence[str], data: bytes, *, path: str) -> None:
    """Write ``data`` to the file ``parts`` below ``root``, making parent directories. Raises ``SandboxFileError``."""
    flags = os.O_WRONLY | os.O_CREAT
    with _parent(root, parts, path, make=True) as directory, _opened(directory, parts[-1], flags, path) as file:
        os.ftruncate(file, 0)
        with os.fdopen(os.dup(file), "wb") as stream:
            stream.write(data)


def tree_beneath(root: Path, parts: Sequence[str], tree: Tree, *, skip: Collection[str], path: str) -> None:
    """Gather the files and links below the directory ``parts`` below ``root``. Raises ``SandboxFileError``."""
    try:
        with _parent(root, [*parts, ""], path, make=False) as directory:
            _gather(directory, "", tree, skip, _MAX_DEPTH)
    except SandboxRequired:
        raise SandboxFileError(f"{path}: a link, not a directory") from None


def _gather(directory: int, above: str, tree: Tree, skip: Collection[str], depth: int) -> None:
    if depth == 0:
        raise SandboxFileError(f"{above[:200]}: more than {_MAX_DEPTH} directories deep")
    with os.scandir(directory) as entries:
        found = {entry.name: entry.stat(follow_symlinks=False).st_mode for entry in entries if entry.name not in skip}
    for name, mode in sorted(found.items()):
        tree.see()
        if stat.S_ISDIR(mode):
            inner = os.open(name, _DIR, dir_fd=directory)
            try:
                _gather(inner, f"{above}{name}/", tree, skip, depth - 1)
            finally:
                os.close(inner)
        elif stat.S_ISLNK(mode):
            tree.add(above + name, TreeFile(mode, os.fsencode(os.readlink(name, dir_fd=directory))))
        elif stat.S_ISREG(mode):
            file = _open(name, os.O_RDONLY | _FILE, directory, name)
            with open(file, "rb", buffering=0) as stream:
                tree.read(above + name, mode, os.fstat(file).st_size, stream)


@contextmanager
def _parent(root: Path, parts: Sequence[str], path: str, *, make: bool) -> Iterator[int]:
    directory = os.open(root, _DIR)
    try:
        for part in parts[:-1]:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=directory)
            inner = _open(part, _DIR, directory, path)
            os.close(directory)
            directory = inner
        yield directory
    finally:
        os.close(directory)


@contextmanager
def _opened(directory: int, name: str, flags: int, path: str) -> Iterator[int]:
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
