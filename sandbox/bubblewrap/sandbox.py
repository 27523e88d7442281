"""A bubblewrap sandbox: its commands, its files, its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeVar

from sandbox.base import BaseSandbox
from sandbox.bubblewrap.launch import Launcher
from sandbox.bubblewrap.rootfs import RootFs, copy_regular, image_place
from sandbox.bubblewrap.run_dir import remove_tree
from sandbox.cgroup import Cgroup
from sandbox.disk import Usage, check_room, usage
from sandbox.errors import (
    SandboxDiskFullError,
    SandboxError,
    SandboxFileError,
    SandboxLostError,
    SandboxStartError,
)
from sandbox.files import Tree, read_through, write_through
from sandbox.nofollow_io import SandboxRequired, read_beneath, tree_beneath, write_beneath
from sandbox.process import Finished
from sandbox.types import OVERGROWN, ExecResult, SandboxSpec, TreeFile, TreeLimits

T = TypeVar("T")

_AREAS = ("work", "home", "tmp")
_NOTHING_RAN = Finished(OVERGROWN, b"", b"", 0.0, timed_out=False, truncated=False), True

_HIDDEN_IN_PROC = ("kcore", "key-users", "keys", "latency_stats", "sched_debug", "timer_list")
"""Files of /proc that show the whole machine's state whatever namespace they are read in."""


class BubblewrapSandbox(BaseSandbox):
    """One sandbox: a host directory and, while a command runs, a bwrap. Made by :class:`BubblewrapBackend`."""

    def __init__(
        self,
        id: str,
        spec: SandboxSpec,
        root: RootFs,
        directory: Path,
        launcher: Launcher,
        forget: Callable[[BubblewrapSandbox], None],
    ) -> None:
        super().__init__(id, spec)
        self._root, self._directory = root, directory
        self._launcher, self._forget = launcher, forget
        self._areas = _areas(spec.workdir, root.home)
        self._mounts = self._all_mounts()
        self._running: set[asyncio.Task[tuple[Finished, bool]]] = set()
        self.cgroup: Cgroup | None = None

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
    ) -> ExecResult:
        """Run ``command``; see :class:`sandbox.types.Sandbox`. What it leaves running ends with it."""
        argv, directory = self._invocation(command, cwd)
        if (refused := self._unspeakable(*argv, directory, *(env or {}).values())) is not None:
            return refused
        kills_before = self.cgroup.oom_kills() if self.cgroup else 0
        finished, started = await self._run(argv, timeout, directory, env or {}, stdin)
        if finished.returncode != 0 and not self.growth.overgrown:
            await self._check_growth_or_room()
        if self.growth.overgrown:
            return await self._overgrown(finished.stdout, finished.seconds)
        oom = self.cgroup is not None and self.cgroup.oom_kills() > kills_before
        if not (started or finished.timed_out or oom):
            return self._not_started(finished, directory)
        return ExecResult(
            exit_code=finished.returncode,
            stdout=finished.stdout,
            stderr=finished.stderr,
            seconds=finished.seconds,
            timed_out=finished.timed_out,
            truncated=finished.truncated,
            oom_killed=oom,
        )

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """The file's bytes. A path through a symbolic link is read from inside the sandbox."""
        self._check_alive()
        self._check_path(path)
        if place := self._on_host(path):
            try:
                return await _file_thread(partial(read_beneath, *place, max_bytes=max_bytes, path=path))
            except SandboxRequired:
                pass
        return await read_through(self, path, max_bytes)

    async def read_tree(
        self,
        path: str,
        *,
        skip: Collection[str] = (),
        limits: TreeLimits | None = None,
        known: Mapping[str, str] | None = None,
    ) -> Mapping[str, TreeFile]:
        """The files and links below the directory, read on the host."""
        self._check_alive()
        self._check_path(path)
        place = self._on_host(path, itself=True)
        if place is None:
            raise SandboxFileError(f"{path}: not below a writable directory of the sandbox")
        tree = Tree(path, limits or TreeLimits(), known)
        await _file_thread(partial(tree_beneath, *place, tree, skip=skip, path=path))
        return tree.files

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write ``files``. Paths through symbolic links are written from inside the sandbox."""
        self._check_alive()
        for path in files:
            self._check_path(path)
        left = await _file_thread(partial(self._write_direct, dict(files)))
        if left:
            await write_through(self, left)

    def make_dirs(self) -> None:
        """Make the host directories of the writable areas; the working directory starts as the image's, if it has
        one."""
        self._directory.mkdir(parents=True)
        for area in _AREAS:
            (self._directory / area).mkdir()
        (self._directory / "tmp").chmod(0o1777)
        work = self._host_path(self._spec.workdir)
        work.mkdir(parents=True, exist_ok=True)
        if self._root.seed is not None:
            source = image_place(self._root.seed, self._spec.workdir)
            if source.is_dir():
                shutil.copytree(source, work, symlinks=True, dirs_exist_ok=True, copy_function=copy_regular)

    def _all_mounts(self) -> list[str]:
        # Where this process is the machine's root, so is the sandbox's to the files of /proc: written to, those of
        # /proc/sys would set the kernel's parameters, capabilities or not.
        mounts = [*self._root.arguments, "--proc", "/proc", *_hidden(), "--remount-ro", "/proc", "--dev", "/dev"]
        for inside, directory in self._areas.items():
            mounts += ["--bind", str(self._directory / directory), inside]
        for source, target in self._spec.ro_binds.items():
            if any(PurePosixPath(target).is_relative_to(inside) for inside in self._areas):
                raise SandboxStartError(
                    f"ro_binds: {target}: below a writable directory ({', '.join(self._areas)}), where a command could "
                    f"put a link in its place; bind it elsewhere, /opt/{PurePosixPath(target).name} say"
                )
            if self._root.seed is not None:
                image_place(self._root.seed, target)
            mounts += ["--ro-bind", source, target]
        return [*mounts, "--remount-ro", "/"]

    async def _run(
        self, argv: Sequence[str], timeout: float, cwd: str, env: Mapping[str, str], stdin: bytes | None
    ) -> tuple[Finished, bool]:
        """Run one bwrap, in a task of its own so that closing the sandbox can end it."""
        self._check_open()
        if self.growth.overgrown:
            return _NOTHING_RAN
        whole = {"PATH": self._root.path, "HOME": self._root.home, "LANG": "C.UTF-8", **self._spec.env, **env}
        task = asyncio.ensure_future(
            self._launcher.run(
                self._spec,
                self.cgroup,
                self._mounts,
                argv,
                cwd=cwd,
                env=whole,
                timeout=timeout,
                stdin=stdin,
                toll=self._toll,
            )
        )
        self._running.add(task)
        self.growth.command_begins()
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            if self._closed:
                raise SandboxLostError(f"sandbox {self._id} was closed under a command") from None
            return _NOTHING_RAN
        except (OSError, TimeoutError) as error:
            raise SandboxLostError(f"sandbox {self._id}: bwrap could not be run: {error}") from None
        finally:
            self._running.discard(task)
            self.growth.command_ends()

    def _not_started(self, finished: Finished, cwd: str) -> ExecResult:
        """bwrap stopped before the command ran: a wrong directory is the command's failure, all else the sandbox's."""
        text = finished.stderr.decode(errors="replace").strip()
        if not text.startswith("bwrap: Can't chdir to "):
            raise SandboxLostError(f"sandbox {self._id}: {text or f'bwrap exited with {finished.returncode}'}")
        why = f"cd: {cwd}: no such directory\n"
        return ExecResult(exit_code=126, stdout=b"", stderr=why.encode(), seconds=finished.seconds)

    def _check_alive(self) -> None:
        self._check_in_use()
        self._check_room()

    def _check_room(self) -> None:
        if not self._directory.is_dir():
            raise SandboxLostError(f"sandbox {self._id}: its directory {self._directory} is gone")
        check_room(self._directory)

    async def _used(self) -> Usage | None:
        return await usage(self._directory)

    async def _give_back(self) -> None:
        await self._kill()
        with contextlib.suppress(SandboxError):
            for area in _AREAS:
                await asyncio.to_thread(
                    on_disk, partial(remove_tree, self._directory / area), "the sandbox", SandboxError
                )

    async def _kill(self) -> None:
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def _on_host(self, path: str, *, itself: bool = False) -> tuple[Path, list[str]] | None:
        """The writable area that ``path`` lies in (or is, with ``itself``) and the steps from there; None where only
        the sandbox can tell."""
        whole = PurePosixPath(self._spec.workdir) / path
        if ".." not in whole.parts:
            for inside, directory in self._areas.items():
                if whole.is_relative_to(inside) and (itself or whole != PurePosixPath(inside)):
                    return self._directory / directory, list(whole.relative_to(inside).parts)
        return None

    def _host_path(self, path: str) -> Path:
        place = self._on_host(path)
        return place[0].joinpath(*place[1]) if place else self._directory / self._areas[path]

    def _write_direct(self, files: dict[str, bytes]) -> dict[str, bytes]:
        """Write what can be written from the host; return the rest."""
        left = {}
        for path, data in files.items():
            place = self._on_host(path)
            try:
                if place is None:
                    raise SandboxRequired(path)
                write_beneath(*place, data, path=path)
            except SandboxRequired:
                left[path] = data
        return left

    async def _end(self) -> None:
        await self.growth.close()
        await self._kill()
        await asyncio.to_thread(on_disk, self._remove, f"sandbox {self._id}", SandboxLostError)
        self._forget(self)

    def _remove(self) -> None:
        if self.cgroup is not None:
            self.cgroup.remove()
        remove_tree(self._directory)


def _hidden() -> list[str]:
    """bwrap arguments that put a file which can't be opened over those of /proc that name what is the host's."""
    files = [file for name in _HIDDEN_IN_PROC if (file := Path("/proc", name)).exists()]
    return [part for file in files for part in ("--ro-bind", "/dev/null", str(file))]


def _areas(workdir: str, home: str) -> dict[str, str]:
    """Writable places in a sandbox and the sandbox's subdirectories behind each; a working directory inside another is
    part of it."""
    work = PurePosixPath(workdir)
    areas = {home: "home", "/tmp": "tmp"}
    if not work.is_absolute() or ".." in work.parts or any(PurePosixPath(a).is_relative_to(work) for a in areas):
        raise SandboxStartError(
            f"workdir {workdir!r}: must be an absolute directory that holds neither /tmp nor {home}"
        )
    if not any(work.is_relative_to(area) for area in areas):
        areas[str(work)] = "work"
    return areas


async def _file_thread(work: Callable[[], T]) -> T:
    return await asyncio.to_thread(on_disk, work, "the sandbox", SandboxFileError)


def on_disk(work: Callable[[], T], what: str, error: type[SandboxError]) -> T:
    """Run ``work``; an operating system error becomes an ``error``, or ``SandboxDiskFullError``."""
    try:
        return work()
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SandboxDiskFullError(f"{what}: no room left on the host's disk ({problem.filename})") from None
        raise error(f"{what}: {problem}") from None
    except subprocess.SubprocessError as problem:
        raise error(f"{what}: {problem}") from None
