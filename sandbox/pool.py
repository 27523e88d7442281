"""A pool over any backend: bounded starts, bounded commands, and sandboxes started ahead of need.

A pool is itself a :class:`sandbox.types.SandboxBackend`, and asks nothing of the one below but that protocol, which may
as well start sandboxes on another machine.

Each sandbox that is asked for orders one more like it, up to ``prewarmed`` idle ones in all; the one that has stood
idle longest makes room. So what stands ready follows what is being asked for: after a burst of eight sandboxes of
one image, eight stand ready for the next. A sandbox is handed out once and never comes back: no episode sees what
another one left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Mapping, Sequence
from contextvars import Context
from dataclasses import fields

from sandbox.errors import SandboxError, SandboxStartError
from sandbox.shielded import shielded
from sandbox.timeouts import turn
from sandbox.types import ExecResult, Sandbox, SandboxBackend, SandboxSpec, TreeFile, TreeLimits

_log = logging.getLogger(__name__)

_Kind = tuple[object, ...]


class SandboxPool:
    """At most ``max_starts`` sandboxes being started and ``max_execs`` commands running at once; ``prewarmed`` idle
    sandboxes."""

    def __init__(
        self, backend: SandboxBackend, *, max_starts: int = 8, max_execs: int = 64, prewarmed: int = 0
    ) -> None:
        self._backend, self._prewarmed = backend, prewarmed
        self._starts, self._execs = asyncio.Semaphore(max_starts), asyncio.Semaphore(max_execs)
        self._idle: list[tuple[_Kind, Sandbox]] = []  # idle longest first
        self._ordered = 0
        self._order_turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def name(self) -> str:
        return self._backend.name

    @property
    def idle(self) -> int:
        """Sandboxes that stand ready."""
        return len(self._idle)

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox that stands ready, or a new one. Raises what the backend's ``start`` raises."""
        if self._closed:
            raise SandboxStartError("the pool is closed")
        sandbox = self._take(_kind(spec))
        self._order(spec)
        if sandbox is None:
            async with turn(self._starts):
                sandbox = await self._backend.start(spec)
        return PooledSandbox(sandbox, self._execs)

    async def reap(self) -> int:
        """Remove the sandboxes of dead runs; return how many."""
        return await self._backend.reap()

    async def close(self) -> None:
        """Close every sandbox, handed out or idle."""
        self._closed = True
        await shielded(self._close())

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._idle.clear()  # the backend started them, and closes them
        await self._backend.close()

    def _take(self, kind: _Kind) -> Sandbox | None:
        for place, (other, sandbox) in enumerate(self._idle):
            if other == kind:
                del self._idle[place]
                return sandbox
        return None

    def _order(self, spec: SandboxSpec) -> None:
        """Have one more sandbox like ``spec`` made ready, if there is room for it or another kind's can make some."""
        if len(self._idle) + self._ordered >= self._prewarmed:
            unlike = next((place for place, (kind, _) in enumerate(self._idle) if kind != _kind(spec)), None)
            if unlike is None:
                return
            self._own(self._drop(self._idle.pop(unlike)[1]))
        self._ordered += 1
        self._own(self._fill(spec))

    async def _fill(self, spec: SandboxSpec) -> None:
        try:
            # One at a time, so that sandboxes which somebody waits for have all other starts.
            async with self._order_turn, self._starts:
                sandbox = await self._backend.start(spec)
        except SandboxError as error:
            # Whoever asks for such a sandbox next meets the same error, and can do something about it.
            _log.warning("a sandbox could not be started ahead of need: %s", error)
        else:
            self._idle.append((_kind(spec), sandbox))
        finally:
            self._ordered -= 1

    async def _drop(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.close()
        except SandboxError as error:
            _log.warning("an idle sandbox could not be closed: %s", error)

    def _own(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work, context=Context())  # not on the clock of whoever asked for a sandbox
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class PooledSandbox:
    """A sandbox whose commands wait for their turn among all of the pool's. Waiting takes nothing of a command's
    time."""

    def __init__(self, sandbox: Sandbox, execs: asyncio.Semaphore) -> None:
        self._sandbox, self._execs = sandbox, execs

    @property
    def id(self) -> str:
        return self._sandbox.id

    @property
    def spec(self) -> SandboxSpec:
        return self._sandbox.spec

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
    ) -> ExecResult:
        """Run ``command``; see :class:`sandbox.types.Sandbox`."""
        async with turn(self._execs):
            return await self._sandbox.exec(command, timeout=timeout, cwd=cwd, env=env, stdin=stdin)

    async def exec_beside(
        self,
        command: str | Sequence[str],
        *,
        timeout: float,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
    ) -> ExecResult:
        """As :meth:`exec` outside the pool's turns: for a command that mostly waits and runs as long as an episode,
        many of which would keep all others from running."""
        return await self._sandbox.exec(command, timeout=timeout, env=env, stdin=stdin)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """The file's bytes."""
        async with turn(self._execs):
            return await self._sandbox.read_file(path, max_bytes=max_bytes)

    async def read_tree(
        self,
        path: str,
        *,
        skip: Collection[str] = (),
        limits: TreeLimits | None = None,
        known: Mapping[str, str] | None = None,
    ) -> Mapping[str, TreeFile]:
        """The files and links below the directory."""
        async with turn(self._execs):
            return await self._sandbox.read_tree(path, skip=skip, limits=limits, known=known)

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write ``files``."""
        async with turn(self._execs):
            await self._sandbox.write_files(files)

    async def close(self) -> None:
        """Remove the sandbox."""
        await self._sandbox.close()


def _kind(spec: SandboxSpec) -> _Kind:
    """What two specs share whose sandboxes can stand in for each other: everything."""
    values = (getattr(spec, field.name) for field in fields(spec))
    return tuple(tuple(sorted(value.items())) if isinstance(value, Mapping) else value for value in values)
