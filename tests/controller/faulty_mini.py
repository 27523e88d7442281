"""Generated tasks in sandboxes of which one in twenty breaks: an environment for tests (``faulty_mini:FaultyMini``)."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from envs import EnvContext, Episode, Grade, Task
from envs.mini import MiniEnvironment
from sandbox import ExecResult, Sandbox, SandboxBackend, SandboxLostError, SandboxSpec, TreeFile

T = TypeVar("T")
ONE_IN = 20
SURE_OPERATIONS = 2
"""As many commands and transfers as any sandbox of an episode sees."""


class BreakingSandbox:
    """A real sandbox that is lost when it is asked for the ``life``-th thing."""

    def __init__(self, sandbox: Sandbox, life: int) -> None:
        self._sandbox, self._life = sandbox, life

    @property
    def id(self) -> str:
        return self._sandbox.id

    @property
    def spec(self) -> SandboxSpec:
        return self._sandbox.spec

    async def exec(self, command: str | Sequence[str], **options: Any) -> ExecResult:
        return await self._unless_lost(lambda: self._sandbox.exec(command, **options))

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        return await self._unless_lost(lambda: self._sandbox.read_file(path, max_bytes=max_bytes))

    async def read_tree(self, path: str, **options: Any) -> Mapping[str, TreeFile]:
        return await self._unless_lost(lambda: self._sandbox.read_tree(path, **options))

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        await self._unless_lost(lambda: self._sandbox.write_files(files))

    async def _unless_lost(self, work: Callable[[], Awaitable[T]]) -> T:
        self._life -= 1
        if self._life <= 0:
            raise SandboxLostError("the sandbox is gone (injected)")
        return await work()

    async def close(self) -> None:
        await self._sandbox.close()


class BreakingBackend:
    """Returns the sandboxes of a backend. Every 20th, from the 5th on, fails at its start or at its first or second
    command."""

    def __init__(self, backend: SandboxBackend) -> None:
        self._backend = backend
        self._numbers, self._random = itertools.count(ONE_IN - 4), random.Random(7)

    @property
    def name(self) -> str:
        return self._backend.name

    async def start(self, spec: SandboxSpec) -> Sandbox:
        doomed = next(self._numbers) % ONE_IN == 0
        life = self._random.randint(0, SURE_OPERATIONS)
        if doomed and life == 0:
            raise SandboxLostError("the sandbox did not come up (injected)")
        sandbox = await self._backend.start(spec)
        return BreakingSandbox(sandbox, life) if doomed else sandbox

    async def reap(self) -> int:
        return await self._backend.reap()

    async def close(self) -> None:
        await self._backend.close()


class FaultyMini(MiniEnvironment):
    """``mini`` in such sandboxes."""

    def __init__(self, context: EnvContext, **options: Any) -> None:
        super().__init__(replace(context, backend=BreakingBackend(context.backend)), **options)
        self._sound = MiniEnvironment(context, **options)

    async def prepare(self, *splits: str) -> None:
        """Make what is not cached in sandboxes that don't break: only episodes are to meet those."""
        await self._sound.prepare(*splits)
        await super().prepare(*splits)


class KeyErrorEpisode:
    """An episode whose grading meets a bug."""

    def __init__(self, episode: Episode) -> None:
        self.messages, self.tools = episode.messages, episode.tools

    async def grade(self) -> Grade:
        raise KeyError("status")


class KeyErrorMini(MiniEnvironment):
    """``mini`` with such episodes."""

    @asynccontextmanager
    async def start(self, task: Task) -> AsyncIterator[KeyErrorEpisode]:
        async with super().start(task) as episode:
            yield KeyErrorEpisode(episode)
