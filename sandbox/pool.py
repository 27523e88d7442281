"""A pool over any backend: limits concurrent starts and commands, and prewarms sandboxes.

A pool is a :class:`sandbox.types.SandboxBackend` and uses only that protocol of the backend below, which may be on
another node.

Each start prewarms one more sandbox of the same spec, up to ``prewarmed`` idle sandboxes in total; the one that is idle
longest is closed to make space. So after 8 starts of one image, 8 sandboxes are ready for the next batch. A sandbox is
used once: no episode sees the files of another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from contextvars import Context
from dataclasses import fields
from pathlib import Path
from typing import Any

from sandbox.base import ForwardingSandbox
from sandbox.errors import SandboxError, SandboxStartError
from sandbox.shielded import shielded
from sandbox.timeouts import acquire_slot
from sandbox.types import ExecResult, Sandbox, SandboxBackend, SandboxSpec

_log = logging.getLogger(__name__)

_SpecKey = tuple[object, ...]


class SandboxPool:
    """Starts at most ``max_starts`` sandboxes and runs at most ``max_execs`` commands at once; keeps up to
    ``prewarmed`` idle sandboxes."""

    def __init__(
        self, backend: SandboxBackend, *, max_starts: int = 8, max_execs: int = 64, prewarmed: int = 0
    ) -> None:
        self._backend, self._prewarmed = backend, prewarmed
        self._starts, self._execs = asyncio.Semaphore(max_starts), asyncio.Semaphore(max_execs)
        self._idle: list[tuple[_SpecKey, Sandbox]] = []  # longest idle first
        self._prewarming = 0
        self._prewarm_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def name(self) -> str:
        return self._backend.name

    @property
    def backend(self) -> SandboxBackend:
        """The backend below the pool."""
        return self._backend

    @property
    def disk(self) -> Path | None:
        """The directory of the sandboxes, if the backend names one."""
        return getattr(self._backend, "disk", None)

    @property
    def idle(self) -> int:
        """Number of idle sandboxes."""
        return len(self._idle)

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Return an idle sandbox or a new one. Raises the errors of the backend's ``start``."""
        if self._closed:
            raise SandboxStartError("the pool is closed")
        sandbox = self._take_idle(_spec_key(spec))
        self._prewarm(spec)
        if sandbox is None:
            async with acquire_slot(self._starts):
                sandbox = await self._backend.start(spec)
        return PooledSandbox(sandbox, self._execs)

    async def reap(self) -> int:
        """Remove the sandboxes of dead runs; return how many."""
        return await self._backend.reap()

    async def close(self) -> None:
        """Close every sandbox, in use or idle."""
        self._closed = True
        await shielded(self._close())

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._idle.clear()  # the backend closes them
        await self._backend.close()

    def _take_idle(self, key: _SpecKey) -> Sandbox | None:
        for index, (other, sandbox) in enumerate(self._idle):
            if other == key:
                del self._idle[index]
                return sandbox
        return None

    def _prewarm(self, spec: SandboxSpec) -> None:
        """Start one more idle sandbox of ``spec`` in the background.

        At the limit, it first closes the longest idle sandbox of another spec; without one it does nothing.
        """
        if len(self._idle) + self._prewarming >= self._prewarmed:
            oldest = next((index for index, (key, _) in enumerate(self._idle) if key != _spec_key(spec)), None)
            if oldest is None:
                return
            self._run_in_background(self._close_idle(self._idle.pop(oldest)[1]))
        self._prewarming += 1
        self._run_in_background(self._start_idle(spec))

    async def _start_idle(self, spec: SandboxSpec) -> None:
        try:
            # One at a time: the other starts are for callers that wait.
            async with self._prewarm_lock, self._starts:
                sandbox = await self._backend.start(spec)
        except SandboxError as error:
            # Not raised here: the next start of this spec meets the same error, and its caller handles it.
            _log.warning("a sandbox could not be prewarmed: %s", error)
        else:
            self._idle.append((_spec_key(spec), sandbox))
        finally:
            self._prewarming -= 1

    async def _close_idle(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.close()
        except SandboxError as error:
            _log.warning("an idle sandbox could not be closed: %s", error)

    def _run_in_background(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work, context=Context())  # an empty context: the caller's timeouts do not apply
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class PooledSandbox(ForwardingSandbox):
    """A sandbox whose commands wait for one of the pool's slots. Timeouts of commands start after the wait."""

    def __init__(self, sandbox: Sandbox, execs: asyncio.Semaphore) -> None:
        super().__init__(sandbox.id, sandbox.spec)
        self._sandbox, self._execs = sandbox, execs

    async def _forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        async with acquire_slot(self._execs):
            return await getattr(self._sandbox, method)(*args, **kwargs)

    async def exec_without_slot(
        self,
        command: str | Sequence[str],
        *,
        timeout: float,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
    ) -> ExecResult:
        """Run ``command`` like :meth:`exec` without taking a slot.

        For a command that runs as long as its episode and mostly waits; many of these would occupy every slot.
        """
        return await self._sandbox.exec(command, timeout=timeout, env=env, stdin=stdin)

    async def close(self) -> None:
        """Remove the sandbox."""
        await self._sandbox.close()


def _spec_key(spec: SandboxSpec) -> _SpecKey:
    """Return a hashable key that is equal for equal specs."""
    values = (getattr(spec, field.name) for field in fields(spec))
    return tuple(tuple(sorted(value.items())) if isinstance(value, Mapping) else value for value in values)
