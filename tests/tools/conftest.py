"""A real sandbox, counted, for the tools that run in one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence

import pytest

from sandbox import ExecResult, Sandbox, SandboxSpec, SandboxUnavailableError, TreeFile, TreeLimits, open_backend
from tools import ToolCall, ToolResult, ToolSet, swe_tools


class CountedSandbox:
    """A sandbox that counts its round trips."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.id, self.spec = sandbox.id, sandbox.spec
        self.trips = 0

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
    ) -> ExecResult:
        self.trips += 1
        return await self._sandbox.exec(command, timeout=timeout, cwd=cwd, env=env, stdin=stdin)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        self.trips += 1
        return await self._sandbox.read_file(path, max_bytes=max_bytes)

    async def read_tree(
        self,
        path: str,
        *,
        skip: Collection[str] = (),
        limits: TreeLimits | None = None,
        known: Mapping[str, str] | None = None,
    ) -> Mapping[str, TreeFile]:
        return await self._sandbox.read_tree(path, skip=skip, limits=limits, known=known)

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        await self._sandbox.write_files(files)

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
