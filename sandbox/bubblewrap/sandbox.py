"""The sandbox of the bubblewrap backend: a host directory and one bwrap process per command."""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeVar

from sandbox.base import ROOT, BaseSandbox
from sandbox.bubblewrap.launch import Launcher
from sandbox.bubblewrap.private import Bind, Cover, covers, mount_arguments
from sandbox.bubblewrap.rootfs import RootFs, copy_regular, path_in_image
from sandbox.cgroup import Cgroup
from sandbox.disk import Usage, usage
from sandbox.errors import (
    SandboxDiskFullError,
    SandboxError,
    SandboxFileError,
    SandboxLostError,
    SandboxStartError,
    SandboxUnavailableError,
)
from sandbox.files import TreeCollector, read_by_command, write_by_command
from sandbox.nofollow_io import SandboxRequired, gather_tree_nofollow, read_file_nofollow, write_file_nofollow
from sandbox.process import ProcessResult
from sandbox.removal import Remover
from sandbox.types import EXIT_DISK_LIMIT, ExecResult, SandboxSpec

T = TypeVar("T")

_log = logging.getLogger(__name__)

_AREAS = ("work", "home", "tmp")
_EMPTY_SECONDS = 20.0
"""How long the end of an overgrown sandbox waits until its files are removed."""
_NOT_RUN = ProcessResult(EXIT_DISK_LIMIT, b"", b"", 0.0, timed_out=False, truncated=False), True

_HIDDEN_IN_PROC = ("kcore", "key-users", "keys", "latency_stats", "sched_debug", "timer_list")
"""Files of /proc that show the state of the whole machine in every namespace."""


class BubblewrapSandbox(BaseSandbox):
    """One sandbox, created by :class:`BubblewrapBackend`."""

    def __init__(
        self,
        id: str,
        spec: SandboxSpec,
        root: RootFs,
        directory: Path,
        launcher: Launcher,
        remover: Remover,
        private: Collection[Path],
        forget: Callable[[BubblewrapSandbox], None],
    ) -> None:
        super().__init__(id, spec)
        self._root, self._directory = root, directory
        self._launcher, self._remover, self._forget = launcher, remover, forget
        self._areas = _areas(spec.workdir, root.home)
        self._mounts = self._all_mounts(private)
        self._running: set[asyncio.Task[tuple[ProcessResult, bool]]] = set()
        self.cgroup: Cgroup | None = None

    async def _exec(
        self, argv: Sequence[str], timeout: float, cwd: str, env: Mapping[str, str], stdin: bytes | None, user: str
    ) -> ExecResult:
        if user not in (ROOT, "0", "root"):
            raise SandboxUnavailableError(f"user {user!r}: bubblewrap has only root; set sandbox.backend=docker")
        kills_before = self.cgroup.oom_kills() if self.cgroup else 0
        mounts = mount_arguments(self._mounts)
        finished, started = await self._run(mounts, argv, timeout, cwd, env, stdin)
        if not started and mounts != (remaining := mount_arguments(self._mounts)):  # a private path vanished meanwhile
            finished, started = await self._run(remaining, argv, timeout, cwd, env, stdin)
        if finished.returncode != 0 and not self.disk_watch.overgrown:
            await self._check_disk()
        if self.disk_watch.overgrown:
            return await self._disk_limit_result(finished.stdout, finished.seconds)
        oom = self.cgroup is not None and self.cgroup.oom_kills() > kills_before
        if not (started or finished.timed_out or oom):
            return self._not_started(finished, cwd)
        return ExecResult(
            exit_code=finished.returncode,
            stdout=finished.stdout,
            stderr=finished.stderr,
            seconds=finished.seconds,
            timed_out=finished.timed_out,
            truncated=finished.truncated,
            oom_killed=oom,
        )

    async def _read_file(self, path: str, max_bytes: int) -> bytes:
        """A path with a symbolic link is read by a command in the sandbox."""
        if location := self._locate(path):
            try:
                return await _in_file_thread(partial(read_file_nofollow, *location, max_bytes=max_bytes, path=path))
            except SandboxRequired:
                pass
        return await read_by_command(self, path, max_bytes)

    async def _read_tree(self, path: str, tree: TreeCollector, skip: Collection[str]) -> None:
        """Reads on the host."""
        location = self._locate(path, include_area=True)
        if location is None:
            raise SandboxFileError(f"{path}: not below a writable directory of the sandbox")
        await _in_file_thread(partial(gather_tree_nofollow, *location, tree, skip=skip, path=path))

    async def _write_files(self, files: Mapping[str, bytes]) -> None:
        """Paths with symbolic links are written by a command in the sandbox."""
        remaining = await _in_file_thread(partial(self._write_direct, dict(files)))
        if remaining:
            await write_by_command(self, remaining)

    def make_dirs(self) -> None:
        """Create the host directories of the writable areas; copy the image's working directory, if it has one."""
        self._directory.mkdir(parents=True)
        for area in _AREAS:
            (self._directory / area).mkdir()
        (self._directory / "tmp").chmod(0o1777)
        work = self._host_path(self._spec.workdir)
        work.mkdir(parents=True, exist_ok=True)
        if self._root.seed is not None:
            source = path_in_image(self._root.seed, self._spec.workdir)
            if source.is_dir():
                shutil.copytree(source, work, symlinks=True, dirs_exist_ok=True, copy_function=copy_regular)

    def _all_mounts(self, private: Collection[Path]) -> list[str | Cover]:
        # /proc is remounted read-only: if this process is root, the sandbox's root could set kernel parameters in
        # /proc/sys even without capabilities.
        mounts: list[str | Cover] = [*self._root.mounts, "--proc", "/proc", *_hidden()]
        mounts += ["--remount-ro", "/proc", "--dev", "/dev"]
        for area, directory in self._areas.items():
            mounts += ["--bind", str(self._directory / directory), area]
        for source, target in self._spec.ro_binds.items():
            if any(PurePosixPath(target).is_relative_to(area) for area in self._areas):
                raise SandboxStartError(
                    f"ro_binds: {target}: below a writable directory ({', '.join(self._areas)}), where a command could "
                    f"replace it by a link; use another path, for example /opt/{PurePosixPath(target).name}"
                )
            if self._root.seed is not None:
                path_in_image(self._root.seed, target)
            mounts += ["--ro-bind", source, target, *covers([Bind(Path(source), Path(target))], private)]
        return [*mounts, "--remount-ro", "/"]

    async def _run(
        self,
        mounts: Sequence[str],
        argv: Sequence[str],
        timeout: float,
        cwd: str,
        env: Mapping[str, str],
        stdin: bytes | None,
    ) -> tuple[ProcessResult, bool]:
        """Run one bwrap in a new task, so that closing the sandbox can cancel it."""
        self._check_open()
        if self.disk_watch.overgrown:
            return _NOT_RUN
        full_env = {"PATH": self._root.path, "HOME": self._root.home, "LANG": "C.UTF-8", **self._spec.env, **env}
        task = asyncio.ensure_future(
            self._launcher.run(
                self._spec,
                self.cgroup,
                mounts,
                argv,
                cwd=cwd,
                env=full_env,
                timeout=timeout,
                stdin=stdin,
                throttle=self._throttle,
            )
        )
        self._running.add(task)
        self.disk_watch.command_begins()
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            if self._closed:
                raise SandboxLostError(f"sandbox {self._id} was closed during a command") from None
            return _NOT_RUN
        except (OSError, TimeoutError) as error:
            raise SandboxLostError(f"sandbox {self._id}: bwrap could not be run: {error}") from None
        finally:
            self._running.discard(task)
            self.disk_watch.command_ends()

    def _not_started(self, finished: ProcessResult, cwd: str) -> ExecResult:
        """Interpret a failure of bwrap: a missing ``cwd`` is a failed command; anything else raises."""
        text = finished.stderr.decode(errors="replace").strip()
        if not text.startswith("bwrap: Can't chdir to "):
            raise SandboxLostError(f"sandbox {self._id}: {text or f'bwrap exited with {finished.returncode}'}")
        why = f"cd: {cwd}: no such directory\n"
        return ExecResult(exit_code=126, stdout=b"", stderr=why.encode(), seconds=finished.seconds)

    def _disk_directory(self) -> Path:
        if not self._directory.is_dir():
            raise SandboxLostError(f"sandbox {self._id}: its directory {self._directory} is gone")
        return self._directory

    async def _measure_disk(self) -> Usage | None:
        return await usage(self._directory)

    async def _empty_disk(self) -> None:
        await self._kill()
        removals = [asyncio.wrap_future(self._remover.discard(self._directory / area)) for area in _AREAS]
        await asyncio.wait(removals, timeout=_EMPTY_SECONDS)

    async def _kill(self) -> None:
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def _locate(self, path: str, *, include_area: bool = False) -> tuple[Path, list[str]] | None:
        """Return the host directory of the writable area around ``path`` and the components below it.

        None if ``path`` is outside of the areas or contains "..", and for an area itself without ``include_area``.
        """
        absolute = PurePosixPath(self._spec.workdir) / path
        if ".." not in absolute.parts:
            for area, directory in self._areas.items():
                if absolute.is_relative_to(area) and (include_area or absolute != PurePosixPath(area)):
                    return self._directory / directory, list(absolute.relative_to(area).parts)
        return None

    def _host_path(self, path: str) -> Path:
        location = self._locate(path)
        return location[0].joinpath(*location[1]) if location else self._directory / self._areas[path]

    def _write_direct(self, files: dict[str, bytes]) -> dict[str, bytes]:
        """Write the files that can be written from the host; return the others."""
        remaining = {}
        for path, data in files.items():
            location = self._locate(path)
            try:
                if location is None:
                    raise SandboxRequired(path)
                write_file_nofollow(*location, data, path=path)
            except SandboxRequired:
                remaining[path] = data
        return remaining

    async def _destroy(self) -> None:
        await self.disk_watch.close()
        await self._kill()
        await asyncio.to_thread(self._discard)
        self._forget(self)

    def _discard(self) -> None:
        if self.cgroup is not None:
            try:
                self.cgroup.remove()
            except OSError as error:
                _log.warning("sandbox %s: its control group could not be removed: %s", self._id, error)
        self._remover.discard(self._directory)


def _hidden() -> list[str]:
    """Return bwrap arguments that cover the files of ``_HIDDEN_IN_PROC`` with /dev/null."""
    files = [file for name in _HIDDEN_IN_PROC if (file := Path("/proc", name)).exists()]
    return [part for file in files for part in ("--ro-bind", "/dev/null", str(file))]


def _areas(workdir: str, home: str) -> dict[str, str]:
    """Map the writable directories of a sandbox to subdirectories of its host directory.

    A working directory inside home or /tmp needs no entry. Raises ``SandboxStartError`` for an invalid ``workdir``.
    """
    work = PurePosixPath(workdir)
    areas = {home: "home", "/tmp": "tmp"}
    if not work.is_absolute() or ".." in work.parts or any(PurePosixPath(a).is_relative_to(work) for a in areas):
        raise SandboxStartError(
            f"workdir {workdir!r}: must be an absolute directory that holds neither /tmp nor {home}"
        )
    if not any(work.is_relative_to(area) for area in areas):
        areas[str(work)] = "work"
    return areas


async def _in_file_thread(work: Callable[[], T]) -> T:
    return await asyncio.to_thread(on_disk, work, "the sandbox", SandboxFileError)


def on_disk(work: Callable[[], T], what: str, error: type[SandboxError]) -> T:
    """Return ``work()``; raise an ``OSError`` as ``error`` or ``SandboxDiskFullError``."""
    try:
        return work()
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SandboxDiskFullError(f"{what}: the host's disk is full ({problem.filename})") from None
        raise error(f"{what}: {problem}") from None
    except subprocess.SubprocessError as problem:
        raise error(f"{what}: {problem}") from None
