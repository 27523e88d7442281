"""What the sandboxes of every backend share: a name, the form of a command, and an end that comes once."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import PurePosixPath

from sandbox.disk import Usage
from sandbox.disk_watch import GrowthWatch
from sandbox.errors import SandboxDiskFullError, SandboxFileError, SandboxLostError
from sandbox.output_throttle import Toll
from sandbox.shielded import shielded
from sandbox.types import OVERGROWN, ExecResult, SandboxSpec


class BaseSandbox(ABC):
    """The part of :class:`sandbox.types.Sandbox` that does not depend on what a sandbox is made of."""

    def __init__(self, id: str, spec: SandboxSpec) -> None:
        self._id, self._spec = id, spec
        self._closed = False
        self._closing: asyncio.Future[None] | None = None
        self._toll = Toll(spec.cpus)
        self.growth = GrowthWatch(id, Usage(spec.disk_mb << 20, spec.inodes), self._used, self._give_back)

    @property
    def id(self) -> str:
        return self._id

    @property
    def spec(self) -> SandboxSpec:
        return self._spec

    async def close(self) -> None:
        """Kill what runs and remove the sandbox."""
        if self._closing is None:
            self._closed = True
            self._closing = asyncio.ensure_future(self._end())
        await shielded(self._closing)

    @abstractmethod
    async def _end(self) -> None:
        """Kill what runs and remove the sandbox; called once."""

    @abstractmethod
    async def _used(self) -> Usage | None:
        """What the sandbox takes of the disk; None where that can't be found out."""

    @abstractmethod
    async def _give_back(self) -> None:
        """Kill what runs and remove the files of a sandbox that has grown too much. What can't be removed is left to
        ``_end``, which raises."""

    @abstractmethod
    def _check_room(self) -> None:
        """Raise ``SandboxDiskFullError`` where the disk that the sandbox is on is full."""

    async def _check_growth_or_room(self) -> None:
        """After what failed: a full disk is the sandbox's own doing where it grew beyond its limit, else it is a
        ``SandboxDiskFullError``."""
        self._check_open()
        try:
            self._check_room()
        except SandboxDiskFullError:
            await self.growth.check()
            if not self.growth.overgrown:
                raise

    async def _overgrown(self, stdout: bytes, seconds: float) -> ExecResult:
        """What every command of a sandbox that has grown too much gives, once its files are gone. Raises
        ``SandboxLostError`` where the sandbox was ended because it could not be measured."""
        await self.growth.emptied()
        self.growth.check_watched()
        return ExecResult(OVERGROWN, stdout, f"{self.growth.overgrown}\n".encode(), seconds=seconds)

    def _check_in_use(self) -> None:
        """Raise where the sandbox is closed, or ended as it has grown too much."""
        self._check_open()
        if self.growth.overgrown:
            self.growth.check_watched()
            raise SandboxFileError(self.growth.overgrown)

    def _invocation(self, command: str | Sequence[str], cwd: str | None) -> tuple[list[str], str]:
        """The argument list of ``command`` and the directory that it runs in."""
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        return argv, str(PurePosixPath(self._spec.workdir) / (cwd or ""))

    def _unspeakable(self, *texts: str) -> ExecResult | None:
        """The answer to a command whose texts no program can be given; None where they can be."""
        if any("\0" in text for text in texts):
            return ExecResult(126, b"", b"a command can't hold a null byte\n", seconds=0.0)
        return None

    def _check_path(self, path: str) -> None:
        if "\0" in path:
            raise SandboxFileError(f"{path!r}: a path can't hold a null byte")

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxLostError(f"sandbox {self._id} is closed")
