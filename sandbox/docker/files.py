"""Reads a file out of a container through the engine's archive call, which resolves links inside the container."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import docker.errors

from sandbox.errors import SandboxFileError

# Go's os.FileMode, which the engine reports: the bits of anything that is not a regular file, and of a link.
_NOT_REGULAR = 0b1000_1111_0010_1000 << 16
_LINK = 1 << 27
_TAR_OVERHEAD = 64 << 10


def read_archive(api: Any, container: str, path: str, max_bytes: int) -> bytes:
    """The bytes of the file ``path``. Raises ``SandboxFileError`` if absent, not regular or too large."""
    stream, stat = _get(api, container, path, path)
    if stat["mode"] & _LINK:
        # The target comes resolved to its end; were it made a link again meanwhile, it is refused below.
        stream.close()
        stream, stat = _get(api, container, stat["linkTarget"], path)
    try:
        if stat["mode"] & _NOT_REGULAR:
            raise SandboxFileError(f"{path}: {'a folder, not a file' if stat['mode'] >> 31 else 'not a regular file'}")
        if stat["size"] > max_bytes:
            raise SandboxFileError(f"{path}: {stat['size']} bytes, more than the {max_bytes} allowed")
        return _unpack(stream, path, max_bytes)
    finally:
        stream.close()


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
