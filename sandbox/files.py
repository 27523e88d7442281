"""File contents: reads and writes by a command inside the sandbox, git object names, and limits of directory reads."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterable, Mapping
from typing import Protocol

from sandbox.errors import SandboxFileError
from sandbox.types import Sandbox, TreeFile, TreeLimits

_SECONDS = 60.0
_CHUNK = 1 << 20
# The scripts report failures by exit code because the messages of the programs vary.
_READ = """
[ -e "$1" ] || exit 41
[ -f "$1" ] || exit 42
[ "$(stat -L -c %s -- "$1")" -le "$2" ] || exit 43
exec head -c "$(($2 + 1))" -- "$1"  # files of /proc have no size
"""
# The type check comes first: writing to a pipe would wait for its other end.
_WRITE = """
while [ $# -gt 0 ]; do
    mkdir -p -- "$(dirname -- "$1")" || exit 1
    [ ! -e "$1" ] || [ -f "$1" ] || { echo "$1: not a regular file"; exit 1; }
    head -c "$2" > "$1" || exit 1
    shift 2
done
"""
_REASONS = {41: "no such file", 42: "not a regular file", 43: "larger than allowed"}


async def read_by_command(sandbox: Sandbox, path: str, max_bytes: int) -> bytes:
    """Return the content of ``path``, read by a command in ``sandbox``; the sandbox's output limit applies.

    Raises ``SandboxFileError``.
    """
    result = await sandbox.exec(["sh", "-c", _READ, "sh", path, str(max_bytes)], timeout=_SECONDS)
    if result.timed_out:
        raise SandboxFileError(f"{path}: reading took more than {_SECONDS:.0f} s")
    if result.exit_code != 0:
        raise SandboxFileError(f"{path}: {_REASONS.get(result.exit_code) or _tail(result.stderr)}")
    if len(result.stdout) > max_bytes:
        raise SandboxFileError(f"{path}: {_REASONS[43]}")
    if result.truncated:
        raise SandboxFileError(
            f"{path}: larger than the sandbox's output cap of {sandbox.spec.output_limit_bytes} bytes"
        )
    return result.stdout


async def write_by_command(sandbox: Sandbox, files: Mapping[str, bytes]) -> None:
    """Write ``files`` by one command in ``sandbox``.

    Raises ``SandboxFileError``.
    """
    sizes = [part for path, data in files.items() for part in (path, str(len(data)))]
    result = await sandbox.exec(["sh", "-c", _WRITE, "sh", *sizes], timeout=_SECONDS, stdin=b"".join(files.values()))
    if result.timed_out:
        raise SandboxFileError(f"writing files took more than {_SECONDS:.0f} s")
    if result.exit_code != 0:
        raise SandboxFileError(_tail(result.stdout + result.stderr))


def _tail(output: bytes) -> str:
    return output[-1000:].decode(errors="replace").strip()


def blob_name(content: bytes) -> str:
    """Return git's object name of a file's content: the hexadecimal SHA-1 of its size and bytes."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes | None: ...


class TreeCollector:
    """Collects the files of the directory ``name`` up to ``limits``.

    ``known`` maps paths to git object names; a file with that content is stored by its object name only.
    """

    def __init__(self, name: str, limits: TreeLimits, known: Mapping[str, str] | None = None) -> None:
        self.files: dict[str, TreeFile] = {}
        self.limits = limits
        self.known = known or {}
        self._name, self._bytes, self._entries, self._compared = name, 0, 0, 0

    def count_entry(self) -> None:
        """Count a directory entry. Raises ``SandboxFileError`` above ``limits.files``."""
        self._entries += 1
        if self._entries > self.limits.files:
            raise SandboxFileError(f"{self._name}: more than the {self.limits.files} files and directories allowed")

    def read(self, path: str, mode: int, size: int, stream: _Readable) -> None:
        """Add a regular file of ``size`` bytes; reads ``stream`` only if its content is needed."""
        known = self.known.get(path)
        with_data = size <= self.limits.file_bytes
        if known is None and not with_data:
            self.add(path, TreeFile(mode, None))
            return
        digest, chunks, remaining = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False), list[bytes](), size
        while remaining > 0 and (chunk := stream.read(min(_CHUNK, remaining))):
            remaining -= len(chunk)
            self._compared += len(chunk)
            if self._compared > self.limits.compared_bytes:
                raise SandboxFileError(f"{self._name}: more than the {self.limits.compared_bytes} bytes allowed")
            if known is not None:
                digest.update(chunk)
            if with_data:
                chunks.append(chunk)
        if known is not None and digest.hexdigest() == known:
            self.add(path, TreeFile(mode, None, known))
        else:
            self.add(path, TreeFile(mode, b"".join(chunks) if with_data else None))

    def add(self, path: str, file: TreeFile) -> None:
        """Add ``file``. Raises ``SandboxFileError`` above ``limits.total_bytes``."""
        self.files[path] = file
        self._bytes += len(file.data or b"")
        if self._bytes > self.limits.total_bytes:
            raise SandboxFileError(f"{self._name}: more than the {self.limits.total_bytes} bytes allowed")


def archive(files: Mapping[str, bytes], *, directories: Iterable[str] = ()) -> bytes:
    """Pack ``files`` (absolute path -> bytes) and ``directories`` into an uncompressed tar relative to /."""
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
    # Without the padding after the end mark: podman stops reading there and fails on further data.
    return stream.getvalue()[: tar.offset]
