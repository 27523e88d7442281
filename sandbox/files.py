"""Reads and writes files by a command inside the sandbox, where links mean what they should."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterable, Mapping
from typing import Protocol

from sandbox.errors import SandboxDiskFullError, SandboxFileError, SandboxLostError
from sandbox.types import Sandbox, TreeFile, TreeLimits

_SECONDS = 60.0
_CHUNK = 1 << 20
# Exit codes of the script below: told apart because the words of the programs vary.
_READ = """
[ -e "$1" ] || exit 41
[ -f "$1" ] || exit 42
[ "$(stat -L -c %s -- "$1")" -le "$2" ] || exit 43
exec cat -- "$1"
"""
# Writing to a pipe would wait for its other end.
_WRITE = """
while [ $# -gt 0 ]; do
    mkdir -p -- "$(dirname -- "$1")" || exit 1
    [ ! -e "$1" ] || [ -f "$1" ] || { echo "$1: not a regular file"; exit 1; }
    head -c "$2" > "$1" || exit 1
    shift 2
done
"""
_REASONS = {41: "no such file", 42: "not a regular file", 43: "larger than allowed"}


async def read_through(sandbox: Sandbox, path: str, max_bytes: int) -> bytes:
    """The file's bytes, read by a command in ``sandbox``, in pieces that its output cap allows."""
    result = await sandbox.exec(["sh", "-c", _READ, "sh", path, str(max_bytes)], timeout=_SECONDS)
    if result.timed_out:
        raise SandboxLostError(f"sandbox {sandbox.id}: reading {path} took more than {_SECONDS:.0f} s")
    if result.exit_code != 0:
        raise SandboxFileError(f"{path}: {_REASONS.get(result.exit_code, result.text.strip())}")
    if result.truncated:
        raise SandboxFileError(
            f"{path}: larger than the sandbox's output cap of {sandbox.spec.output_limit_bytes} bytes"
        )
    return result.stdout


async def write_through(sandbox: Sandbox, files: Mapping[str, bytes]) -> None:
    """Write ``files`` by a command in ``sandbox``: one round trip."""
    sizes = [part for path, data in files.items() for part in (path, str(len(data)))]
    result = await sandbox.exec(["sh", "-c", _WRITE, "sh", *sizes], timeout=_SECONDS, stdin=b"".join(files.values()))
    if result.timed_out:
        raise SandboxLostError(f"sandbox {sandbox.id}: writing files took more than {_SECONDS:.0f} s")
    if result.exit_code != 0:
        text = result.text.strip()
        if "No space left on device" in text:
            raise SandboxDiskFullError(f"sandbox {sandbox.id}: {text}")
        raise SandboxFileError(text)


def blob_name(content: bytes) -> str:
    """Git's name of a file's content: the SHA-1 of its size and its bytes, in hexadecimal."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


class _Reads(Protocol):
    def read(self, size: int, /) -> bytes | None: ...


class Tree:
    """Gathers the files of a directory, named ``name`` in errors, up to a limit.

    ``known`` gives git's names of contents by path; a file whose content has its name is kept without it.
    """

    def __init__(self, name: str, limits: TreeLimits, known: Mapping[str, str] | None = None) -> None:
        self.files: dict[str, TreeFile] = {}
        self.limits = limits
        self._known = known or {}
        self._name, self._bytes, self._seen = name, 0, 0

    def see(self) -> None:
        """Count one more thing, kept or not. Raises ``SandboxFileError`` if they are more than the limits allow."""
        self._seen += 1
        if self._seen > self.limits.files:
            raise SandboxFileError(f"{self._name}: more than the {self.limits.files} files and directories allowed")

    def read(self, path: str, mode: int, size: int, stream: _Reads) -> None:
        """Take in a regular file of ``size`` bytes from ``stream``, which is read only where its content is wanted."""
        known = self._known.get(path)
        is_kept = size <= self.limits.file_bytes
        if known is None and not is_kept:
            self.add(path, TreeFile(mode, None))
            return
        digest, chunks, left = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False), list[bytes](), size
        while left > 0 and (chunk := stream.read(min(_CHUNK, left))):
            left -= len(chunk)
            if known is not None:
                digest.update(chunk)
            if is_kept:
                chunks.append(chunk)
        if known is not None and digest.hexdigest() == known:
            self.add(path, TreeFile(mode, None, known))
        else:
            self.add(path, TreeFile(mode, b"".join(chunks) if is_kept else None))

    def add(self, path: str, file: TreeFile) -> None:
        """Take a file in. Raises ``SandboxFileError`` if its bytes are more than the limits allow."""
        self.files[path] = file
        self._bytes += len(file.data or b"")
        if self._bytes > self.limits.total_bytes:
            raise SandboxFileError(f"{self._name}: more than the {self.limits.total_bytes} bytes allowed")


def archive(files: Mapping[str, bytes], *, directories: Iterable[str] = ()) -> bytes:
    """``files`` (absolute path -> bytes) and ``directories`` as an uncompressed tar whose members are relative to /."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for path in directories:
            member = tarfile.TarInfo(path.lstrip("/"))
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(member)
        for path, data in files.items():
            member = tarfile.TarInfo(path.lstrip("/"))
            member.size, member.mode = len(data), 0o644
            tar.addfile(member, io.BytesIO(data))
    # Without the padding after the end mark: podman stops reading there, and fails on what is still being sent.
    return stream.getvalue()[: tar.offset]
