"""The sandbox of the docker and podman backends: one container."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Protocol, TypeVar

from sandbox.base import ROOT, BaseSandbox
from sandbox.cgroup import cgroup_directories, oom_kills, ran_out_of_memory
from sandbox.disk import Usage, usage
from sandbox.docker.client import (
    EngineClient,
    WritableDirectories,
    find_writable_directories,
    layer_files,
    layer_size,
    remove_container,
)
from sandbox.docker.exec import KILL_ALL, WRAPPER, ExecConnection, ExecOutcome, run_exec
from sandbox.docker.files import gather_directory, read_archive
from sandbox.errors import SandboxDiskFullError, SandboxError, SandboxFileError, SandboxLostError
from sandbox.files import TreeCollector, archive
from sandbox.shielded import shielded
from sandbox.types import EXIT_DISK_LIMIT, Change, ExecResult, SandboxSpec

T = TypeVar("T")

_GRACE = 20.0
_UNTHROTTLED = 15.0
"""Seconds at the end of the grace in which the remaining output of a killed command is read without throttling."""
_SIGNALS = 128
"""A shell that a signal ended has a higher exit code: code in the sandbox killed the wrapper."""
_GVISOR_PANIC = 2
"""Exit code of a container whose gVisor kernel died, which can happen at a resource limit."""
_OOM_CHECKS, _OOM_CHECK_SECONDS = 10, 0.1
_NOBODY = ("nobody", "65534")
_CHANGES: tuple[Change, ...] = ("changed", "added", "removed")
"""Changes by the number that the engine reports."""
_PROGRAMS = ("/bin", "/lib", "/sbin", "/usr", "/etc/ld.so")
_INIT = "/usr/sbin/docker-init"
_ENGINE_FILES = {"/usr", "/usr/sbin", _INIT}  # the engine adds these to every container
_NOT_RUN = ExecResult(EXIT_DISK_LIMIT, b"", b"", 0.0)
_PROBE = ("/bin/sh", "-c", "exit 0")
_NO_SHELL = b"the sandbox can't run commands any more: its own programs or libraries were changed\n"


class ParentBackend(Protocol):
    """The methods of its backend that a sandbox calls."""

    async def call(self, work: Callable[[], T], error: type[SandboxError]) -> T: ...

    def local_disk(self) -> Path | None: ...

    def forget(self, sandbox: DockerSandbox) -> None: ...

    async def discard(self, sandbox: DockerSandbox) -> None: ...


class DockerSandbox(BaseSandbox):
    """One container, created by :class:`DockerBackend`."""

    def __init__(self, container: str, spec: SandboxSpec, api: EngineClient, backend: ParentBackend) -> None:
        super().__init__(container[:12], spec)
        self._container, self._api, self._backend = container, api, backend
        # One command at a time: the end of a command kills all processes of the sandbox.
        self._exec_lock = asyncio.Lock()
        self._oom_kills = 0
        self._connection: ExecConnection | None = None
        self._writable: WritableDirectories | None = None

    async def _exec(
        self, argv: Sequence[str], timeout: float, cwd: str, env: Mapping[str, str], stdin: bytes | None, user: str
    ) -> ExecResult:
        if user.partition(":")[0] in _NOBODY:
            raise SandboxError(f"user {user!r} keeps the sandbox alive, so its commands cannot be killed; use another")
        size = "-1" if stdin is None else str(len(stdin))
        wrapped = ["/bin/sh", "-c", WRAPPER, "sh", f"{timeout:.3f}", cwd, size, *argv]
        async with self._exec_lock:
            started = time.perf_counter()
            self.disk_watch.command_begins()
            try:
                result = await self._run_wrapped(wrapped, timeout, env, stdin, user)
            except (SandboxLostError, SandboxDiskFullError) as error:
                result = await self._result_after_container_death(error, time.perf_counter() - started)
            finally:
                self.disk_watch.command_ends()
        if self.disk_watch.overgrown:
            return await self._disk_limit_result(result.stdout, time.perf_counter() - started)
        return result

    async def _result_after_container_death(self, error: SandboxError, seconds: float) -> ExecResult:
        """Return the result of a command whose container died at a limit; raise ``error`` after any other cause."""
        if self.disk_watch.overgrown:
            return _NOT_RUN
        if self._closed or not isinstance(error, SandboxLostError):
            raise error
        for _ in range(_OOM_CHECKS):
            info = await self._backend.call(partial(self._api.inspect_container, self._container), SandboxLostError)
            state = info["State"]
            if not state["Running"]:
                memory = bool(state["OOMKilled"]) or await asyncio.to_thread(ran_out_of_memory, self._container)
                if memory or state["ExitCode"] == _GVISOR_PANIC:
                    break
            # The engine learns of an out-of-memory kill after the container's end, or never: containerd's watcher does
            # not report a removed group.
            await asyncio.sleep(_OOM_CHECK_SECONDS)
        else:
            raise error
        why = f"sandbox {self.id}: it ended as a whole, as it ran out of memory or processes\n"
        return ExecResult(137, b"", why.encode(), seconds, oom_killed=memory)

    async def _run_wrapped(
        self, wrapped: Sequence[str], timeout: float, env: Mapping[str, str], stdin: bytes | None, user: str
    ) -> ExecResult:
        """Run ``wrapped``, a command in :data:`WRAPPER`, and interpret its outcome."""
        self._check_open()
        if self.disk_watch.overgrown:
            return _NOT_RUN
        started = time.perf_counter()
        outcome = await self._run(wrapped, timeout + _GRACE, env, stdin, user)
        seconds = time.perf_counter() - started
        if not outcome.complete and outcome.exit_code is not None and outcome.exit_code <= _SIGNALS:
            if await self._shell_fails() or await self._backend.call(self._programs_changed, SandboxLostError):
                return ExecResult(127, b"", _NO_SHELL, seconds)
            self._raise_lost(outcome)
        overdue = outcome.exit_code is None
        if overdue and not self.disk_watch.overgrown:
            # The wrapper was killed, or it waits for a process that it cannot kill.
            await self._kill_all(user)
        timed_out = overdue or (outcome.exit_code == 137 and seconds >= timeout)
        if outcome.exit_code:
            await self._check_disk()
        return ExecResult(
            exit_code=-9 if timed_out or outcome.exit_code is None else outcome.exit_code,
            stdout=bytes(outcome.out.data),
            stderr=bytes(outcome.err.data),
            seconds=seconds,
            timed_out=timed_out,
            truncated=outcome.out.dropped + outcome.err.dropped > 0,
            oom_killed=await self._oom_killed() if outcome.exit_code and not self.disk_watch.overgrown else False,
        )

    async def changes(self) -> Mapping[str, Change]:
        """Return the changes of the container's layer; files in volumes of the image are not listed.

        The engine leaves out changed files whose size and time are the image's. They are listed if its directory is on
        this machine.
        """
        self._check_files()
        listed = await self._backend.call(partial(self._api.diff, self._container), SandboxLostError) or []
        files = await self._backend.call(partial(layer_files, self._api, self._container), SandboxLostError)
        kinds: dict[str, Change] = dict.fromkeys(files, "changed")
        kinds |= {each["Path"]: _CHANGES[each["Kind"]] for each in listed}
        parents = {str(parent) for path in kinds for parent in PurePosixPath(path).parents}
        kinds.pop(_INIT, None)
        return {path: kind for path, kind in kinds.items() if kind != "changed" or path not in parents}

    async def _read_file(self, path: str, max_bytes: int) -> bytes:
        """The engine resolves links inside the container."""
        work = partial(read_archive, self._api, self._container, self._absolute(path), max_bytes)
        return await self._backend.call(work, SandboxFileError)

    async def _read_tree(self, path: str, tree: TreeCollector, skip: Collection[str]) -> None:
        """Reads from the host mount if there is one, else from the engine."""
        work = partial(gather_directory, self._api, self._container, self._absolute(path), tree, skip=skip)
        await self._backend.call(work, SandboxFileError)

    async def _write_files(self, files: Mapping[str, bytes]) -> None:
        """The engine unpacks the files inside the container."""
        data = archive({self._absolute(path): data for path, data in files.items()})
        await self._backend.call(partial(self._api.unpack, self._container, data), SandboxFileError)

    def _absolute(self, path: str) -> str:
        return str(PurePosixPath(self._spec.workdir) / path)

    def remove(self) -> None:
        """Remove the container. Blocking."""
        remove_container(self._api, self._container)

    async def _run(
        self, argv: Sequence[str], deadline: float, env: Mapping[str, str], stdin: bytes | None, user: str
    ) -> ExecOutcome:
        self._check_open()
        connection = self._connection = ExecConnection()
        work = partial(
            run_exec,
            self._api,
            self._container,
            argv,
            connection,
            user=user,
            env=env,
            stdin=stdin,
            limit=self._spec.output_limit_bytes,
            deadline=deadline,
            throttle=self._throttle,
            unthrottled_seconds=_UNTHROTTLED,
        )
        running = asyncio.ensure_future(self._backend.call(work, SandboxLostError))
        try:
            outcome = await asyncio.shield(running)
        except asyncio.CancelledError:
            connection.abort()
            await shielded(self._end_abandoned(running, user))
            raise
        self._check_open()
        return outcome

    async def _shell_fails(self) -> bool:
        """Whether the engine cannot start a shell although the disk is not full: the sandbox's code removed it."""
        await self._check_disk()
        probe = await self._run(_PROBE, _GRACE, {}, None, ROOT)
        return probe.exit_code in (126, 127)

    def _programs_changed(self) -> bool:
        """Whether code in the sandbox changed programs or libraries: then a failing shell is not the engine's fault."""
        changes = self._api.diff(self._container) or []
        paths = {change["Path"] for change in changes} - _ENGINE_FILES
        return any(path.startswith(_PROGRAMS) for path in paths)

    def _raise_lost(self, outcome: ExecOutcome) -> None:
        text = (outcome.out.data + outcome.err.data)[-300:].decode(errors="replace").strip()
        raise SandboxLostError(
            f"sandbox {self.id}: the engine lost a command's output, or could not run it; received {text!r}"
        )

    async def _end_abandoned(self, running: asyncio.Future[ExecOutcome], user: str) -> None:
        """Kill the processes of a cancelled command."""
        await asyncio.wait({running})
        if not self._closed:
            await self._kill_all(user)

    async def _kill_all(self, user: str) -> None:
        work = partial(
            run_exec,
            self._api,
            self._container,
            KILL_ALL,
            ExecConnection(),
            user=user,
            env={},
            stdin=None,
            limit=0,
            deadline=_GRACE,
            throttle=self._throttle,
            unthrottled_seconds=_GRACE,
        )
        outcome = await self._backend.call(work, SandboxLostError)
        if outcome.exit_code is None:
            raise SandboxLostError(f"sandbox {self.id}: its processes could not be killed within {_GRACE:.0f} s")

    async def _oom_killed(self) -> bool:
        count = await self._backend.call(self._count_oom_kills, SandboxLostError)
        killed, self._oom_kills = count > self._oom_kills, count
        return killed

    def _count_oom_kills(self) -> int:
        """Return the out-of-memory kills from the container's control group if visible here, else from the engine."""
        state = self._api.inspect_container(self._container)["State"]
        directories = cgroup_directories(state["Pid"])
        directory = directories.get("memory", directories.get(""))
        if directory is not None and self._container in str(directory) and directory.is_dir():
            return oom_kills(directory)
        return int(state["OOMKilled"])

    def _is_running(self) -> bool:
        return bool(self._api.inspect_container(self._container)["State"]["Running"])

    def _disk_directory(self) -> Path | None:
        return self._backend.local_disk()

    async def _measure_disk(self) -> Usage | None:
        """Return the usage of the layer and the volumes, or None if the container is gone.

        If the container has ended, abort the connection of its command: the engine may leave it open forever.
        """
        call = self._backend.call
        try:
            if self._connection is not None and not await call(self._is_running, SandboxLostError):
                self._connection.abort()
            if self._writable is None:
                find = partial(find_writable_directories, self._api, self._container)
                self._writable = await call(find, SandboxLostError)
            used = await usage(*self._writable.directories) if self._writable.directories else Usage()
            if used is None or not self._writable.layer_missing:
                return used
            return used + await call(partial(layer_size, self._api, self._container), SandboxLostError)
        except SandboxLostError:
            return None

    async def _empty_disk(self) -> None:
        if self._connection is not None:
            self._connection.abort()
        with contextlib.suppress(SandboxError):
            await self._backend.call(self.remove, SandboxError)

    async def _destroy(self) -> None:
        await self.disk_watch.close()
        if self._connection is not None:
            self._connection.abort()
        self._backend.forget(self)
        await self._backend.discard(self)
