"""Base classes of sandboxes: :class:`BaseSandbox` for local backends, :class:`ForwardingSandbox` for wrappers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from sandbox.disk import DiskWatch, Usage, check_free_space, shortage
from sandbox.errors import SandboxDiskFullError, SandboxFileError, SandboxLostError, SandboxUnavailableError
from sandbox.files import TreeCollector
from sandbox.process import OutputThrottle
from sandbox.shielded import shielded
from sandbox.types import EXIT_DISK_LIMIT, Change, ExecResult, SandboxSpec, TreeFile, TreeLimits

T = TypeVar("T")

ROOT = "0:0"
MAX_ARGUMENT_BYTES = 120 << 10
"""Limit of one argument of a command. Linux allows 128 KiB, with what the backends put before it."""
MAX_ARGUMENTS_BYTES = 1 << 20


class BaseSandbox(ABC):
    """The backend-independent part of :class:`sandbox.types.Sandbox`."""

    def __init__(self, id: str, spec: SandboxSpec) -> None:
        self._id, self._spec = id, spec
        self._closed = False
        self._closing: asyncio.Future[None] | None = None
        self._throttle = OutputThrottle(spec.cpus)
        self.disk_watch = DiskWatch(id, Usage(spec.disk_mb << 20, spec.inodes), self._measure_disk, self._empty_disk)

    @property
    def id(self) -> str:
        return self._id

    @property
    def spec(self) -> SandboxSpec:
        return self._spec

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        user: str | None = None,
    ) -> ExecResult:
        """Run ``command``; see :class:`sandbox.types.Sandbox`. Its background processes end with it."""
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        directory = str(PurePosixPath(self._spec.workdir) / (cwd or ""))
        env = env or {}
        if refusal := _refusal((*argv, directory, *env.values(), user or "")):
            return ExecResult(126, b"", refusal, seconds=0.0)
        return await self._exec(argv, timeout, directory, env, stdin, user or ROOT)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """Return the content of the file; see :class:`sandbox.types.Sandbox`."""
        return await self._file_access(partial(self._read_file, path, max_bytes), path)

    async def read_tree(
        self,
        path: str,
        *,
        skip: Collection[str] = (),
        limits: TreeLimits | None = None,
        known: Mapping[str, str] | None = None,
    ) -> Mapping[str, TreeFile]:
        """Return the files and links below the directory; see :class:`sandbox.types.Sandbox`."""
        tree = TreeCollector(path, limits or TreeLimits(), known)
        await self._file_access(partial(self._read_tree, path, tree, skip), path)
        return tree.files

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write ``files``; see :class:`sandbox.types.Sandbox`."""
        await self._file_access(partial(self._write_files, files), *files)

    async def close(self) -> None:
        """Kill all processes and remove the sandbox."""
        if self._closing is None:
            self._closed = True
            self._closing = asyncio.ensure_future(self._destroy())
        await shielded(self._closing)

    async def changes(self) -> Mapping[str, Change]:
        """Refuse; backends of container engines list the changes."""
        raise SandboxUnavailableError("this sandbox backend cannot list changed files: set sandbox.backend=docker")

    @abstractmethod
    async def _exec(
        self, argv: Sequence[str], timeout: float, cwd: str, env: Mapping[str, str], stdin: bytes | None, user: str
    ) -> ExecResult:
        """Run ``argv`` as ``user`` in the absolute directory ``cwd``."""

    @abstractmethod
    async def _read_file(self, path: str, max_bytes: int) -> bytes:
        """Return the content of the file."""

    @abstractmethod
    async def _read_tree(self, path: str, tree: TreeCollector, skip: Collection[str]) -> None:
        """Add the files and links below the directory to ``tree``."""

    @abstractmethod
    async def _write_files(self, files: Mapping[str, bytes]) -> None:
        """Write ``files``."""

    @abstractmethod
    async def _destroy(self) -> None:
        """Kill all processes and remove the sandbox; called once."""

    @abstractmethod
    async def _measure_disk(self) -> Usage | None:
        """Return the sandbox's disk usage, or None if it cannot be measured."""

    @abstractmethod
    async def _empty_disk(self) -> None:
        """Kill all processes and remove the files of a sandbox that exceeded its disk limit.

        Ignores files that cannot be removed; ``_destroy`` raises for those.
        """

    @abstractmethod
    def _disk_directory(self) -> Path | None:
        """Return a directory on the disk of the sandbox, or None if the disk is on another machine."""

    async def _check_disk(self) -> None:
        """If the disk is full, end this sandbox if it grew by more than what the disk lacks: then its code filled
        the disk. Otherwise others did: raise ``SandboxDiskFullError``."""
        self._check_open()
        directory = self._disk_directory()
        if directory is not None and (lacking := shortage(directory)):
            await self.disk_watch.check(lacking)
            if not self.disk_watch.overgrown:
                check_free_space(directory)

    async def _file_access(self, access: Callable[[], Awaitable[T]], *paths: str) -> T:
        """Return ``access()`` to the files ``paths``. A full disk that this sandbox filled is a ``SandboxFileError``,
        and so is a message about one while the disk is not full, because a message may quote the name of a file."""
        self._check_files(*paths)
        await self._check_disk()
        self._check_files()
        try:
            return await access()
        except SandboxDiskFullError as error:
            await self._check_disk()
            if self._disk_directory() is None and not self.disk_watch.overgrown:
                raise
            raise SandboxFileError(self.disk_watch.overgrown or str(error)) from None

    async def _disk_limit_result(self, stdout: bytes, seconds: float) -> ExecResult:
        """Wait until the files are removed, then return the result of every command after the disk limit.

        Raises ``SandboxLostError`` if the sandbox ended because its disk use could not be measured.
        """
        await self.disk_watch.emptied()
        self.disk_watch.raise_if_unmeasurable()
        return ExecResult(EXIT_DISK_LIMIT, stdout, f"{self.disk_watch.overgrown}\n".encode(), seconds=seconds)

    def _check_files(self, *paths: str) -> None:
        """Raise if the sandbox is closed or over its disk limit, or if one of ``paths`` is invalid."""
        self._check_open()
        self.disk_watch.raise_if_unmeasurable()
        if self.disk_watch.overgrown:
            raise SandboxFileError(self.disk_watch.overgrown)
        for path in paths:
            if refusal := _refusal([path]):
                raise SandboxFileError(f"{path[:200]!r}: {refusal.decode().strip()}")

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxLostError(f"sandbox {self._id} is closed")


def _refusal(texts: Sequence[str]) -> bytes:
    """Why no process can get ``texts`` as arguments and environment: one line, empty if one can."""
    try:
        sizes = [len(text.encode(errors="surrogateescape")) for text in texts]
    except UnicodeEncodeError:
        return b"it must be text that UTF-8 can encode\n"
    if any("\0" in text for text in texts):
        return b"it can't hold a null byte\n"
    if max(sizes) > MAX_ARGUMENT_BYTES or sum(sizes) > MAX_ARGUMENTS_BYTES:
        return f"it can't be longer than {MAX_ARGUMENT_BYTES} bytes; write long text to a file\n".encode()
    return b""


class ForwardingSandbox(ABC):
    """A :class:`sandbox.types.Sandbox` whose methods call :meth:`_forward` with their name and arguments."""

    def __init__(self, id: str, spec: SandboxSpec) -> None:
        self._id, self._spec = id, spec

    @abstractmethod
    async def _forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``method`` of the wrapped sandbox."""

    @property
    def id(self) -> str:
        return self._id

    @property
    def spec(self) -> SandboxSpec:
        return self._spec

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        user: str | None = None,
    ) -> ExecResult:
        """Run ``command``; see :class:`sandbox.types.Sandbox`."""
        # A custom backend that predates users is called as before.
        who = {} if user is None else {"user": user}
        result: ExecResult = await self._forward("exec", command, timeout=timeout, cwd=cwd, env=env, stdin=stdin, **who)
        return result

    async def changes(self) -> Mapping[str, Change]:
        """Return the paths that differ from the image's; see :class:`sandbox.types.Sandbox`."""
        changes: Mapping[str, Change] = await self._forward("changes")
        return changes

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """Return the content of the file; see :class:`sandbox.types.Sandbox`."""
        data: bytes = await self._forward("read_file", path, max_bytes=max_bytes)
        return data

    async def read_tree(
        self,
        path: str,
        *,
        skip: Collection[str] = (),
        limits: TreeLimits | None = None,
        known: Mapping[str, str] | None = None,
    ) -> Mapping[str, TreeFile]:
        """Return the files and links below the directory; see :class:`sandbox.types.Sandbox`."""
        files: Mapping[str, TreeFile] = await self._forward("read_tree", path, skip=skip, limits=limits, known=known)
        return files

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write ``files``; see :class:`sandbox.types.Sandbox`."""
        await self._forward("write_files", dict(files))
