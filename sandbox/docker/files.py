"""Reads files out of a container: through the engine's archive call, which resolves links inside the container, and
directories on this machine, where the engine shows the container's file system here."""

from __future__ import annotations

import io
import os
import stat as modes
import tarfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import docker.errors

from sandbox.errors import SandboxFileError
from sandbox.files import Tree
from sandbox.nofollow_io import tree_beneath
from sandbox.types import TreeFile

# Go's os.FileMode, which the engine reports: the bits of anything that is not a regular file, and of a link.
_NOT_REGULAR = 0b1000_1111_0010_1000 << 16
_LINK = 1 << 27
_TAR_OVERHEAD = 64 << 10
_MOST_SKIPPED = 4 << 30


def read_archive(api: Any, container: str, path: str, max_bytes: int) -> bytes:
    """The bytes of the file ``path``. Raises ``SandboxFileError`` if absent, not regular or too large."""
    stream, stat = _get(api, container, path, path)
    if stat["mode"] & _LINK:
        # The target comes resolved to its end; were it made a link again meanwhile, it is refused below.
        stream.close()
        stream, stat = _get(api, container, stat["linkTarget"], path)
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


def gather_dir(api: Any, container: str, path: str, tree: Tree, *, skip: Collection[str]) -> None:
    """Gather the files and links below the directory ``path``. Raises ``SandboxFileError``."""
    place = shown_here(api.inspect_container(container), path)
    if place is None:
        read_dir(api, container, path, tree, skip=skip)
    else:
        tree_beneath(place, PurePosixPath(path).parts[1:], tree, skip=skip, path=path)


def shown_here(about: Mapping[str, Any], path: str) -> Path | None:
    """The directory of this machine at which a container's file system is mounted, by what the engine says ``about``
    it.

    None where there is none that this process may read, or where something else is mounted at, above or below ``path``.
    """
    merged = ((about.get("GraphDriver") or {}).get("Data") or {}).get("MergedDir")
    for mount in about.get("Mounts") or ():
        inside, whole = PurePosixPath(mount["Destination"]), PurePosixPath(path)
        if inside.is_relative_to(whole) or whole.is_relative_to(inside):
            return None
    if not merged or not os.access(merged, os.R_OK | os.X_OK) or not os.path.ismount(merged):
        return None
    return Path(merged)


def read_dir(api: Any, container: str, path: str, tree: Tree, *, skip: Collection[str]) -> None:
    """The same by way of the engine, which packs all that lies below the directory."""
    stream, stat = _get(api, container, path, path)
    try:
        if not stat["mode"] >> 31:
            raise SandboxFileError(f"{path}: not a directory")
        reader = io.BufferedReader(_Chunks(stream, path, tree.limits.total_bytes + _MOST_SKIPPED))
        with tarfile.open(fileobj=reader, mode="r|") as tar:
            _gather(tar, tree, skip)
    except tarfile.ReadError:
        raise SandboxFileError(f"{path}: it changed while it was read") from None
    finally:
        stream.close()


def _gather(tar: tarfile.TarFile, tree: Tree, skip: Collection[str]) -> None:
    for member in tar:
        _, _, path = member.name.partition("/")
        if not path or not set(skip).isdisjoint(path.split("/")):
            continue
        tree.see()
        if member.issym():
            tree.add(path, TreeFile(modes.S_IFLNK | member.mode, os.fsencode(member.linkname)))
        elif member.islnk():  # a file's other name; its content came with the first
            first = tree.files.get(member.linkname.partition("/")[2])
            tree.add(path, first or TreeFile(modes.S_IFREG | member.mode, None))
        elif member.isreg():
            content = tar.extractfile(member)
            assert content is not None, "a regular file has a content"
            tree.read(path, modes.S_IFREG | member.mode, member.size, content)


class _Chunks(io.RawIOBase):
    """A stream of chunks as a file, which ends with ``SandboxFileError`` after ``most`` bytes."""

    def __init__(self, chunks: Iterator[bytes], path: str, most: int) -> None:
        self._chunks, self._path, self._left = iter(chunks), path, most
        self._held = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._held = self._held or next(self._chunks, b"")
        part, self._held = self._held[: len(buffer)], self._held[len(buffer) :]
        buffer[: len(part)] = part
        self._left -= len(part)
        if self._left < 0:
            raise SandboxFileError(f"{self._path}: more than can be read")
        return len(part)


def _get(api: Any, container: str, path: str, shown: str) -> tuple[Any, dict[str, Any]]:
    try:
        stream, stat = api.get_archive(container, path)
    except docker.errors.NotFound as error:
        if "o such container" in str(error.explanation):
            raise
        raise SandboxFileError(f"{shown}: no such file") from None
    return stream, stat


def _unpack(stream: Any, path: str, max_bytes: int) -> bytes:
    held = bytearray()
    for chunk in stream:
        held += chunk
        if len(held) > max_bytes + _TAR_OVERHEAD:
            raise SandboxFileError(f"{path}: more than the {max_bytes} bytes allowed")
    try:
        with tarfile.open(fileobj=io.BytesIO(held)) as tar:
            member = tar.next()
            content = tar.extractfile(member) if member is not None and member.isreg() else None
            if content is None:
                raise SandboxFileError(f"{path}: not a regular file")
            return content.read()
    except tarfile.ReadError:
        raise SandboxFileError(f"{path}: it changed while it was read") from None
