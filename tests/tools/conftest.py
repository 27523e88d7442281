"""A real sandbox, counted, for the tools that run in one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from sandbox import Sandbox, SandboxSpec, SandboxUnavailableError, open_backend
from sandbox.base import ForwardingSandbox
from tools import ToolCall, ToolResult, ToolSet, swe_tools


class CountedSandbox(ForwardingSandbox):
    """A sandbox that counts its commands and file reads in ``trips``."""

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__(sandbox.id, sandbox.spec)
        self._sandbox, self.trips = sandbox, 0

    async def _forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.trips += method in ("exec", "read_file")
        return await getattr(self._sandbox, method)(*args, **kwargs)

    async def close(self) -> None:
        await self._sandbox.close()


class Agent:
    """Calls tools on a sandbox, and says what each call cost."""

    def __init__(self, sandbox: CountedSandbox, tools: ToolSet) -> None:
        self.sandbox, self.tools = sandbox, tools
        self.trips = 0

    async def call(self, name: str, **arguments: object) -> ToolResult:
        before = self.sandbox.trips
        result = await self.tools.call(ToolCall(name, arguments))
        self.trips = self.sandbox.trips - before
        return result

    async def edit(self, command: str, path: str, **arguments: object) -> ToolResult:
        return await self.call("file_editor", command=command, path=path, **arguments)

    async def file(self, path: str) -> bytes:
        return await self.sandbox.read_file(f"/testbed/{path}")


@pytest.fixture
async def sandbox() -> AsyncIterator[CountedSandbox]:
    try:
        backend = open_backend("bubblewrap", run_id="tests-tools")
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    try:
        yield CountedSandbox(await backend.start(SandboxSpec(workdir="/testbed")))
    finally:
        await backend.close()


@pytest.fixture
def full(sandbox: CountedSandbox) -> Agent:
    return Agent(sandbox, swe_tools(sandbox))


@pytest.fixture
def concise(sandbox: CountedSandbox) -> Agent:
    return Agent(sandbox, swe_tools(sandbox, style="concise"))
