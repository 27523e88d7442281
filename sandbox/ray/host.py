"""One machine's part: its local backend, asked from another machine."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.errors import ImageMissingError, SandboxError, SandboxLostError
from sandbox.factory import open_backend
from sandbox.pipes import local_pipes
from sandbox.types import ExecResult, ImageKeeper, ImagePolicy, Sandbox, SandboxBackend, SandboxSpec, TreeFile


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call came to: its value, or the error that ended it. (Ray would raise an error as one of its own.)"""

    value: Any = None
    error: SandboxError | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """What a machine has of what a sandbox starts from. ``image_id`` is None where it lacks the image, and ``why`` then
    says so in a line; ``lacking`` are the directories that it lacks."""

    image_id: str | None
    why: str
    lacking: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HostReport:
    """What a machine says of its sandboxes: what holds their limits, its CPUs, bytes free on the disk they are on."""

    limits: str
    cpus: int
    free_bytes: int | None


class SandboxHost:
    """The sandboxes of one machine. Ray makes an actor of it; its process is the owner of the sandboxes' lease, so
    that they are removed when it, its machine or the run that started it has died."""

    def __init__(self) -> None:
        self._local: SandboxBackend | None = None
        self._sandboxes: dict[str, Sandbox] = {}
        self._pipes: dict[str, ExitStack] = {}

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Answer:
        """Call a method of this class by its name."""
        try:
            return Answer(await getattr(self, method)(*args, **kwargs))
        except SandboxError as error:
            return Answer(error=type(error)(str(error)))

    async def open(self, backend: str, run_id: str, images: ImagePolicy, runtime: str | None) -> str:
        """Open the local backend; its name. Raises as :func:`sandbox.factory.open_backend`."""
        self._local = open_backend(backend, run_id=run_id, images=images, runtime=runtime)
        return self._local.name

    async def close(self) -> None:
        """Close every sandbox and remove what was made for them."""
        for directory in list(self._pipes):
            await self.remove_pipes(directory)
        await self._backend.close()
        self._sandboxes.clear()

    async def reap(self) -> int:
        return await self._backend.reap()

    async def report(self) -> HostReport:
        """What the doctor tells of this machine."""
        limits, disk = (getattr(self._backend, name, None) for name in ("limits", "disk"))
        return HostReport(limits or "limits of its own", os.cpu_count() or 1, _free_bytes(disk))

    async def look(self, image: str, directories: Sequence[str]) -> Look:
        """Whether ``image`` and ``directories`` are here. A backend that can't tell of images is taken to have all."""
        lacking = await asyncio.to_thread(_lacking, directories)
        if not isinstance(self._backend, ImageKeeper):
            return Look("", "", lacking)
        try:
            return Look(await self._backend.image_id(image), "", lacking)
        except ImageMissingError as error:
            return Look(None, str(error), lacking)

    async def fetch(self, image: str) -> None:
        """Have ``image`` fetched. Raises as :meth:`sandbox.types.ImageKeeper.fetch`."""
        if isinstance(self._backend, ImageKeeper):
            await self._backend.fetch(image)

    async def start(self, key: str, spec: SandboxSpec) -> str:
        """Start a sandbox that is called ``key`` from now on; its id."""
        sandbox = self._sandboxes[key] = await self._backend.start(spec)
        return sandbox.id

    async def end(self, key: str) -> None:
        """Close the sandbox ``key``, if there is one."""
        sandbox = self._sandboxes.pop(key, None)
        if sandbox is not None:
            await sandbox.close()

    async def exec(self, key: str, command: str | Sequence[str], **options: Any) -> ExecResult:
        return await self._sandbox(key).exec(command, **options)

    async def read_file(self, key: str, path: str, max_bytes: int) -> bytes:
        return await self._sandbox(key).read_file(path, max_bytes=max_bytes)

    async def read_tree(self, key: str, path: str, **options: Any) -> Mapping[str, TreeFile]:
        return await self._sandbox(key).read_tree(path, **options)

    async def write_files(self, key: str, files: Mapping[str, bytes]) -> None:
        await self._sandbox(key).write_files(files)

    async def make_pipes(self, names: Sequence[str]) -> str:
        """A directory with named pipes; its path."""
        stack = ExitStack()
        directory = stack.enter_context(local_pipes(names))
        self._pipes[directory] = stack
        return directory

    async def remove_pipes(self, directory: str) -> None:
        self._pipes.pop(directory).close()

    @property
    def _backend(self) -> SandboxBackend:
        assert self._local is not None, "open() comes first"
        return self._local

    def _sandbox(self, key: str) -> Sandbox:
        sandbox = self._sandboxes.get(key)
        if sandbox is None:
            raise SandboxLostError(f"sandbox {key} is closed")
        return sandbox


def _lacking(directories: Sequence[str]) -> tuple[str, ...]:
    return tuple(directory for directory in directories if not Path(directory).exists())


def _free_bytes(directory: Path | None) -> int | None:
    """What is free on the directory's disk; None where it is on another machine, as some engines' is."""
    return shutil.disk_usage(directory).free if directory is not None and directory.is_dir() else None
