"""A real box, counted, for the tools that run in one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence

import pytest

from sandbox import ExecResult, Sandbox, SandboxSpec, SandboxUnavailableError, TreeFile, TreeLimits, open_backend
from tools import ToolCall, ToolResult, ToolSet, swe_tools


class CountedBox:
    """A sandbox that counts its round trips."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box
        self.id, self.spec = box.id, box.spec
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
        return await self._box.exec(command, timeout=timeout, cwd=cwd, env=env, stdin=stdin)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        self.trips += 1
        return await self._box.read_file(path, max_bytes=max_bytes)

    async def read_tree(
        self,
        path: str,
        *,
        skip: Collection[str] = (),
        limits: TreeLimits | None = None,
        known: Mapping[str, str] | None = None,
    ) -> Mapping[str, TreeFile]:
        return await self._box.read_tree(path, skip=skip, limits=limits, known=known)

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        await self._box.write_files(files)

    async def close(self) -> None:
        await self._box.close()


class Agent:
    """Calls tools on a box, and says what each call cost."""

    def __init__(self, box: CountedBox, tools: ToolSet) -> None:
        self.box, self.tools = box, tools
        self.trips = 0

    async def call(self, name: str, **arguments: object) -> ToolResult:
        before = self.box.trips
        result = await self.tools.call(ToolCall(name, arguments))
        self.trips = self.box.trips - before
        return result

    async def edit(self, command: str, path: str, **arguments: object) -> ToolResult:
        return await self.call("file_editor", command=command, path=path, **arguments)

    async def file(self, path: str) -> bytes:
        return await self.box.read_file(f"/testbed/{path}")


@pytest.fixture
async def box() -> AsyncIterator[CountedBox]:
    try:
        backend = open_backend("bubblewrap", run_id="tests-tools")
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    try:
        yield CountedBox(await backend.start(SandboxSpec(workdir="/testbed")))
    finally:
        await backend.close()


@pytest.fixture
def full(box: CountedBox) -> Agent:
    return Agent(box, swe_tools(box))


@pytest.fixture
def concise(box: CountedBox) -> Agent:
    return Agent(box, swe_tools(box, style="concise"))
