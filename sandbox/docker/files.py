"""Reads files of a container.

Files come from the engine's archive call, which resolves links inside the container. Directories come from the host
mount of the container's file system if there is one, else from the archive call.
"""

from __future__ import annotations

import io
import os
import stat as modes
import tarfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import docker.errors

from sandbox.docker.client import is_missing_container
from sandbox.errors import SandboxFileError
from sandbox.files import TreeCollector
from sandbox.nofollow_io import gather_tree_nofollow
from sandbox.types import TreeFile

# Bits of Go's os.FileMode, which the engine reports.
_NOT_REGULAR = 0b1000_1111_0010_1000 << 16
_LINK = 1 << 27
_TAR_OVERHEAD = 64 << 10
_MAX_SKIPPED_BYTES = 4 << 30


def read_archive(api: Any, container: str, path: str, max_bytes: int) -> bytes:
    """Return the content of the file ``path``. Raises ``SandboxFileError`` if missing, not regular or too large."""
    stream, stat = _get_archive(api, container, path, path)
    if stat["mode"] & _LINK:
        # linkTarget is fully resolved; if code in the sandbox makes it a link again, it is refused below.
        stream.close()
        stream, stat = _get_archive(api, container, stat["linkTarget"], path)
    try:
        if stat["mode"] & _NOT_REGULAR:
            raise SandboxFileError(
                f"{path}: {'a directory, not a file' if stat['mode'] >> 31 else 'not a regular file'}"
            )
        if stat["size"] > max_bytes:
            raise SandboxFileError(f"{path}: {stat['size']} bytes, more than the {max_bytes} allowed")
        return _unpack(stream, path, max_bytes)
    finally:
        stream.close()


def gather_directory(api: Any, container: str, path: str, tree: TreeCollector, *, skip: Collection[str]) -> None:
    """Add the files and links below the directory ``path`` to ``tree``. Raises ``SandboxFileError``."""
    root = host_mount_path(api.inspect_container(container), path)
    if root is None:
        gather_from_archive(api, container, path, tree, skip=skip)
    else:
        gather_tree_nofollow(root, PurePosixPath(path).parts[1:], tree, skip=skip, path=path)


def host_mount_path(container_info: Mapping[str, Any], path: str) -> Path | None:
    """Return the host directory where a container's file system is mounted.

    None if this process may not read it, or if another mount in the container overlaps ``path``.
    """
    merged = ((container_info.get("GraphDriver") or {}).get("Data") or {}).get("MergedDir")
    for mount in container_info.get("Mounts") or ():
        mounted, directory = PurePosixPath(mount["Destination"]), PurePosixPath(path)
        if mounted.is_relative_to(directory) or directory.is_relative_to(mounted):
            return None
    if not merged or not os.access(merged, os.R_OK | os.X_OK) or not os.path.ismount(merged):
        return None
    return Path(merged)


def gather_from_archive(api: Any, container: str, path: str, tree: TreeCollector, *, skip: Collection[str]) -> None:
    """Like :func:`gather_directory`, from the engine's archive of the whole directory."""
    stream, stat = _get_archive(api, container, path, path)
    try:
        if not stat["mode"] >> 31:
            raise SandboxFileError(f"{path}: not a directory")
        reader = io.BufferedReader(_ChunkReader(stream, path, tree.limits.total_bytes + _MAX_SKIPPED_BYTES))
        with tarfile.open(fileobj=reader, mode="r|") as tar:
            _gather(tar, tree, skip)
    except tarfile.ReadError:
        raise SandboxFileError(f"{path}: it changed while it was read") from None
    finally:
        stream.close()


def _gather(tar: tarfile.TarFile, tree: TreeCollector, skip: Collection[str]) -> None:
    for member in tar:
        _, _, path = member.name.partition("/")
        if not path or not set(skip).isdisjoint(path.split("/")):
            continue
        tree.count_entry()
        if member.issym():
            tree.add(path, TreeFile(modes.S_IFLNK | member.mode, os.fsencode(member.linkname)))
        elif member.islnk():  # a hard link: its content came with the first name
            first = tree.files.get(member.linkname.partition("/")[2])
            tree.add(path, first or TreeFile(modes.S_IFREG | member.mode, None))
        elif member.isreg():
            content = tar.extractfile(member)
            assert content is not None, "a regular file has a content"
            tree.read(path, modes.S_IFREG | member.mode, member.size, content)


class _ChunkReader(io.RawIOBase):
    """A file object over chunks of bytes; raises ``SandboxFileError`` after ``limit`` bytes."""

    def __init__(self, chunks: Iterator[bytes], path: str, limit: int) -> None:
        self._chunks, self._path, self._remaining = iter(chunks), path, limit
        self._pending = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._pending = self._pending or next(self._chunks, b"")
        chunk, self._pending = self._pending[: len(buffer)], self._pending[len(buffer) :]
        buffer[: len(chunk)] = chunk
        self._remaining -= len(chunk)
        if self._remaining < 0:
            raise SandboxFileError(f"{self._path}: more than can be read")
        return len(chunk)


def _get_archive(api: Any, container: str, path: str, shown: str) -> tuple[Any, dict[str, Any]]:
    try:
        stream, stat = api.get_archive(container, path)
    except docker.errors.NotFound as error:
        if is_missing_container(error):
            raise
        raise SandboxFileError(f"{shown}: no such file") from None
    return stream, stat


def _unpack(stream: Any, path: str, max_bytes: int) -> bytes:
    data = bytearray()
    for chunk in stream:
        data += chunk
        if len(data) > max_bytes + _TAR_OVERHEAD:
            raise SandboxFileError(f"{path}: more than the {max_bytes} bytes allowed")
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            member = tar.next()
            content = tar.extractfile(member) if member is not None and member.isreg() else None
            if content is None:
                raise SandboxFileError(f"{path}: not a regular file")
            return content.read()
    except tarfile.ReadError:
        raise SandboxFileError(f"{path}: it changed while it was read") from None
