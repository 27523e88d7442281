"""Generated tasks in sandboxes of which one in twenty breaks: an environment for tests (``faulty_mini:FaultyMini``)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from envs import EnvContext
from envs.mini import MiniEnvironment
from sandbox import Sandbox, SandboxBackend, SandboxLostError, SandboxSpec

OPERATIONS = ("exec", "read_file", "read_tree", "write_files")
ONE_IN = 20
SURE_OPERATIONS = 2
"""The number of commands and transfers that every sandbox of an episode has."""


class BreakingSandbox:
    """A real sandbox that is lost at its ``life``-th command or transfer."""

    def __init__(self, sandbox: Sandbox, life: int) -> None:
        self._sandbox, self._life = sandbox, life

    def __getattr__(self, name: str) -> Any:
        """Attributes of the sandbox; its commands and transfers count."""
        own = getattr(self._sandbox, name)
        return partial(self._unless_lost, own) if name in OPERATIONS else own

    async def _unless_lost(self, operation: Callable[..., Awaitable[Any]], *arguments: Any, **options: Any) -> Any:
        self._life -= 1
        if self._life <= 0:
            raise SandboxLostError("the sandbox is gone (injected)")
        return await operation(*arguments, **options)


class BreakingBackend:
    """Returns the sandboxes of a backend. Every 20th, from the 5th on, fails at its start or at its first or second
    command."""

    def __init__(self, backend: SandboxBackend) -> None:
        self._backend = backend
        self._numbers, self._random = itertools.count(ONE_IN - 4), random.Random(7)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def start(self, spec: SandboxSpec) -> Sandbox:
        doomed = next(self._numbers) % ONE_IN == 0
        life = self._random.randint(0, SURE_OPERATIONS)
        if doomed and life == 0:
            raise SandboxLostError("the sandbox did not come up (injected)")
        sandbox = await self._backend.start(spec)
        return BreakingSandbox(sandbox, life) if doomed else sandbox


class FaultyMini(MiniEnvironment):
    """``mini`` in such sandboxes."""

    def __init__(self, context: EnvContext, **options: Any) -> None:
        super().__init__(replace(context, backend=BreakingBackend(context.backend)), **options)
        self._sound = MiniEnvironment(context, **options)

    async def prepare(self, *splits: str) -> None:
        """Prepare tasks in sandboxes that do not break: only those of episodes do."""
        await self._sound.prepare(*splits)
        await super().prepare(*splits)
