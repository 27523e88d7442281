"""A container sandbox: its commands, its files, its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import Protocol, TypeVar

from sandbox.base import BaseSandbox
from sandbox.cgroup import dirs_of, oom_kills, ran_out_of_memory
from sandbox.disk import Usage, usage
from sandbox.docker.disk import Written, layer_size, written
from sandbox.docker.engine import EngineClient, remove_container
from sandbox.docker.exec import KILL_ALL, WRAPPER, ExecLink, ExecOutcome, run_exec
from sandbox.docker.files import gather_dir, read_archive
from sandbox.errors import SandboxDiskFullError, SandboxError, SandboxFileError, SandboxLostError
from sandbox.files import Tree, archive
from sandbox.shielded import shielded
from sandbox.types import OVERGROWN, ExecResult, SandboxSpec, TreeFile, TreeLimits

T = TypeVar("T")

_GRACE = 20.0
_HASTE = 15.0
"""Seconds at the end of the grace in which what is left of a killed command's output is taken without a toll."""
_WRAPPER_KILLED = 137
_GVISOR_PANIC = 2
"""Exit code of a container whose kernel is gVisor's and died: where runc's sandboxes bump into a limit, that may
happen."""
_OOM_LOOKS, _OOM_LOOK_SECONDS = 10, 0.1
_PROGRAMS = ("/bin", "/lib", "/sbin", "/usr", "/etc/ld.so")
_FIRST_PROCESS = {"/usr", "/usr/sbin", "/usr/sbin/docker-init"}  # what the engine itself puts into every sandbox
_NOTHING_RAN = ExecResult(OVERGROWN, b"", b"", 0.0)
_NOTHING = ("/bin/sh", "-c", "exit 0")
_NO_SHELL = b"the sandbox can't run commands any more: its own programs or libraries were changed\n"


class SandboxOwner(Protocol):
    """What a sandbox needs of the backend that started it."""

    async def call(self, work: Callable[[], T], error: type[SandboxError]) -> T: ...

    def check_room(self) -> None: ...

    def forget(self, sandbox: DockerSandbox) -> None: ...


class DockerSandbox(BaseSandbox):
    """One container. Made by :class:`DockerBackend`."""

    def __init__(self, container: str, spec: SandboxSpec, api: EngineClient, backend: SandboxOwner) -> None:
        super().__init__(container[:12], spec)
        self._container, self._api, self._owner = container, api, backend
        # A command's end ends all that runs in the sandbox, so there is one at a time.
        self._turn = asyncio.Lock()
        self._oom_seen = 0
        self._link: ExecLink | None = None
        self._written: Written | None = None

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
        size = "-1" if stdin is None else str(len(stdin))
        whole = ["/bin/sh", "-c", WRAPPER, "sh", f"{timeout:.3f}", directory, size, *argv]
        async with self._turn:
            started = time.perf_counter()
            self.growth.command_begins()
            try:
                result = await self._result(whole, timeout, env or {}, stdin)
            except (SandboxLostError, SandboxDiskFullError) as lost:
                result = await self._died(lost, time.perf_counter() - started)
            finally:
                self.growth.command_ends()
        if self.growth.overgrown:
            return await self._overgrown(result.stdout, time.perf_counter() - started)
        return result

    async def _died(self, lost: SandboxError, seconds: float) -> ExecResult:
        """What a command gives whose container ended by the sandbox's own doing; raises ``lost`` where it did not."""
        if self.growth.overgrown:
            return _NOTHING_RAN
        if self._closed or not isinstance(lost, SandboxLostError):
            raise lost
        for _ in range(_OOM_LOOKS):
            found = await self._owner.call(partial(self._api.inspect_container, self._container), SandboxLostError)
            state = found["State"]
            if not state["Running"]:
                memory = bool(state["OOMKilled"]) or await asyncio.to_thread(ran_out_of_memory, self._container)
                if memory or state["ExitCode"] == _GVISOR_PANIC:
                    break
            # The engine hears of the memory apart from the container's end: later, or never (containerd's oom watcher
            # is silent about a group that is gone).
            await asyncio.sleep(_OOM_LOOK_SECONDS)
        else:
            raise lost
        why = f"sandbox {self.id}: it ended as a whole, as it ran out of memory or processes\n"
        return ExecResult(137, b"", why.encode(), seconds, oom_killed=memory)

    async def _result(
        self, whole: Sequence[str], timeout: float, env: Mapping[str, str], stdin: bytes | None
    ) -> ExecResult:
        """What running ``whole``, the command in its wrapper, came to."""
        self._check_open()
        if self.growth.overgrown:
            return _NOTHING_RAN
        started = time.perf_counter()
        outcome = await self._run(whole, timeout + _GRACE, env, stdin)
        seconds = time.perf_counter() - started
        if not outcome.complete and outcome.exit_code not in (None, _WRAPPER_KILLED):
            if await self._has_no_shell() or await self._owner.call(self._has_other_programs, SandboxLostError):
                return ExecResult(127, b"", _NO_SHELL, seconds)
            self._tell_lost(outcome)
        overdue = outcome.exit_code is None
        if overdue and not self.growth.overgrown:
            # The wrapper itself was killed, or what it waits for can't be: end everything from outside.
            await self._kill_all()
        timed_out = overdue or (outcome.exit_code == 137 and seconds >= timeout)
        if outcome.exit_code:
            await self._check_growth_or_room()
        return ExecResult(
            exit_code=-9 if timed_out or outcome.exit_code is None else outcome.exit_code,
            stdout=bytes(outcome.out.data),
            stderr=bytes(outcome.err.data),
            seconds=seconds,
            timed_out=timed_out,
            truncated=outcome.out.dropped + outcome.err.dropped > 0,
            oom_killed=await self._oom_killed() if outcome.exit_code and not self.growth.overgrown else False,
        )

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """The file's bytes. Links are resolved by the engine, inside the container."""
        self._check_in_use()
        self._check_path(path)
        whole = str(PurePosixPath(self._spec.workdir) / path)
        work = partial(read_archive, self._api, self._container, whole, max_bytes)
        return await self._owner.call(work, SandboxFileError)

    async def read_tree(
        self,
        path: str,
        *,
        skip: Collection[str] = (),
        limits: TreeLimits | None = None,
        known: Mapping[str, str] | None = None,
    ) -> Mapping[str, TreeFile]:
        """The files and links below the directory, read on this machine where they are seen here, else by the
        engine."""
        self._check_in_use()
        self._check_path(path)
        tree = Tree(path, limits or TreeLimits(), known)
        whole = str(PurePosixPath(self._spec.workdir) / path)
        work = partial(gather_dir, self._api, self._container, whole, tree, skip=skip)
        await self._owner.call(work, SandboxFileError)
        return tree.files

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write ``files``, unpacked by the engine inside the container."""
        self._check_in_use()
        for path in files:
            self._check_path(path)
        data = archive({str(PurePosixPath(self._spec.workdir) / path): data for path, data in files.items()})
        await self._owner.call(partial(self._api.unpack, self._container, data), SandboxFileError)

    def remove(self) -> None:
        """Remove the container. Blocking."""
        remove_container(self._api, self._container)

    async def _run(
        self, argv: Sequence[str], deadline: float, env: Mapping[str, str], stdin: bytes | None
    ) -> ExecOutcome:
        self._check_open()
        link = self._link = ExecLink()
        work = partial(
            run_exec,
            self._api,
            self._container,
            argv,
            link,
            env=env,
            stdin=stdin,
            limit=self._spec.output_limit_bytes,
            deadline=deadline,
            toll=self._toll,
            haste=_HASTE,
        )
        running = asyncio.ensure_future(self._owner.call(work, SandboxLostError))
        try:
            outcome = await asyncio.shield(running)
        except asyncio.CancelledError:
            link.cut()
            await shielded(self._abandon(running))
            raise
        self._check_open()
        return outcome

    async def _has_no_shell(self) -> bool:
        """Whether the engine cannot even start a shell, though there is room: the sandbox took it, or its rights."""
        await self._check_growth_or_room()
        probe = await self._run(_NOTHING, _GRACE, {}, None)
        return probe.exit_code in (126, 127)

    def _has_other_programs(self) -> bool:
        """Whether something in the sandbox changed what its shell needs: what fails then is not the engine's."""
        changes = self._api.diff(self._container) or []
        paths = {change["Path"] for change in changes} - _FIRST_PROCESS
        return any(path.startswith(_PROGRAMS) for path in paths)

    def _tell_lost(self, outcome: ExecOutcome) -> None:
        text = (outcome.out.data + outcome.err.data)[-300:].decode(errors="replace").strip()
        raise SandboxLostError(
            f"sandbox {self.id}: the engine lost a command's output, or could not run it; it gave {text!r}"
        )

    async def _abandon(self, running: asyncio.Future[ExecOutcome]) -> None:
        """End a command that nobody waits for any more."""
        await asyncio.wait({running})
        if not self._closed:
            await self._kill_all()

    async def _kill_all(self) -> None:
        work = partial(
            run_exec,
            self._api,
            self._container,
            KILL_ALL,
            ExecLink(),
            env={},
            stdin=None,
            limit=0,
            deadline=_GRACE,
            toll=self._toll,
            haste=_GRACE,
        )
        outcome = await self._owner.call(work, SandboxLostError)
        if outcome.exit_code is None:
            raise SandboxLostError(f"sandbox {self.id}: its processes could not be killed within {_GRACE:.0f} s")

    async def _oom_killed(self) -> bool:
        count = await self._owner.call(self._count_oom_kills, SandboxLostError)
        killed, self._oom_seen = count > self._oom_seen, count
        return killed

    def _count_oom_kills(self) -> int:
        """Read from the container's control group where the engine is this machine's, else what the engine knows."""
        state = self._api.inspect_container(self._container)["State"]
        directories = dirs_of(state["Pid"])
        directory = directories.get("memory", directories.get(""))
        if directory is not None and self._container in str(directory) and directory.is_dir():
            return oom_kills(directory)
        return int(state["OOMKilled"])

    def _runs(self) -> bool:
        return bool(self._api.inspect_container(self._container)["State"]["Running"])

    def _check_room(self) -> None:
        self._owner.check_room()

    async def _used(self) -> Usage | None:
        """The layer and the volumes; None where the container is gone.

        Where it has ended under a command, its link is cut: the engine may leave the connection open for ever.
        """
        try:
            if self._link is not None and not await self._owner.call(self._runs, SandboxLostError):
                self._link.cut()
            if self._written is None:
                self._written = await self._owner.call(partial(written, self._api, self._container), SandboxLostError)
            taken = await usage(*self._written.directories) if self._written.directories else Usage()
            if taken is None or not self._written.by_engine:
                return taken
            return taken + await self._owner.call(partial(layer_size, self._api, self._container), SandboxLostError)
        except SandboxLostError:
            return None

    async def _give_back(self) -> None:
        if self._link is not None:
            self._link.cut()
        with contextlib.suppress(SandboxError):
            await self._owner.call(self.remove, SandboxError)

    async def _end(self) -> None:
        await self.growth.close()
        if self._link is not None:
            self._link.cut()
        await self._owner.call(self.remove, SandboxLostError)
        self._owner.forget(self)
