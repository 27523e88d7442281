"""The sandboxes of one other machine as a backend, and how a :class:`SandboxHost` is called through Ray."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from sandbox.errors import SandboxError, SandboxHostLostError, SandboxLostError
from sandbox.ray.host import Answer
from sandbox.shielded import outlast, shielded
from sandbox.types import ExecResult, SandboxSpec, TreeFile, TreeLimits


class RemoteHost:
    """One machine's sandboxes, called ``name`` in messages. ``actor`` is the handle of its :class:`SandboxHost`.

    ``on_lost`` is called once, when the machine or its actor turns out to be gone; ``on_end`` with the id of each
    sandbox that is closed.
    """

    def __init__(self, name: str, kind: str, actor: Any) -> None:
        self.host_name, self._kind, self._actor = name, kind, actor
        self.on_lost: Callable[[RemoteHost], None] = lambda host: None
        self.on_end: Callable[[str], None] = lambda sandbox: None
        self.lost = ""
        """Why nothing of this machine answers any more, in a line; empty as long as it does."""
        self._closed = False

    @property
    def name(self) -> str:
        return self._kind

    async def start(self, spec: SandboxSpec) -> RemoteSandbox:
        """Start a sandbox there; see :class:`sandbox.types.SandboxBackend`."""
        key = uuid.uuid4().hex
        try:
            id = await self.ask("start", key, spec)
        except SandboxHostLostError:
            raise
        except SandboxError as error:
            raise type(error)(f"{error} (sandbox host {self.host_name})") from None
        except asyncio.CancelledError:
            await shielded(self.end(key))  # it may have been started before it was told
            raise
        return RemoteSandbox(id, key, spec, self)

    async def end(self, key: str) -> None:
        """Close a sandbox. Those of a machine that is gone are left to the lease."""
        if not self._closed and not self.lost:
            try:
                await self.ask("end", key)
            except SandboxHostLostError:
                return

    async def reap(self) -> int:
        """Remove the sandboxes of dead runs there; return how many."""
        return int(await self.ask("reap"))

    async def close(self) -> None:
        """Close every sandbox there, and end the actor."""
        if self._closed:
            return
        try:
            await shielded(self._close())
        finally:
            await asyncio.to_thread(self.kill)

    def kill(self) -> None:
        """End the actor as it is. Blocking."""
        import ray

        self._closed = True
        ray.kill(self._actor)

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the :class:`SandboxHost`. Raises what it raises, and ``SandboxHostLostError``; a
        cancelled call is cancelled there too, and has ended there before this returns."""
        if self._closed:
            raise SandboxLostError(f"the sandbox host {self.host_name} is closed")
        if self.lost:
            raise SandboxHostLostError(self.lost)
        answer = await self._answer(self._actor.ask.remote(method, *args, **kwargs))
        if answer.error is not None:
            raise answer.error
        return answer.value

    async def _answer(self, call: Any) -> Answer:
        import ray
        from ray.exceptions import RayError, RayTaskError

        answering = asyncio.ensure_future(_awaited(call))
        try:
            return await asyncio.shield(answering)
        except asyncio.CancelledError:
            ray.cancel(call)
            await outlast(answering)
            answering.exception()  # that it was cancelled is known
            raise
        except RayTaskError:
            raise  # a mistake in this program, whose traceback it has
        except RayError as error:
            raise self._lose(" ".join(str(error).split())) from None

    def _lose(self, reason: str) -> SandboxLostError:
        if self._closed:
            return SandboxLostError(f"the sandbox host {self.host_name} was closed under a call")
        if not self.lost:
            self.lost = f"the sandbox host {self.host_name} is lost: {reason[:300]}"
            self.on_lost(self)
        return SandboxHostLostError(self.lost)

    async def _close(self) -> None:
        if not self.lost:
            await self.ask("close")


class RemoteSandbox:
    """One sandbox of another machine, which knows it as ``key``."""

    def __init__(self, id: str, key: str, spec: SandboxSpec, host: RemoteHost) -> None:
        self._id, self._key, self._spec, self._host = id, key, spec, host
        self._closing: asyncio.Future[None] | None = None

    @property
    def id(self) -> str:
        return self._id

    @property
    def spec(self) -> SandboxSpec:
        return self._spec

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
        found: ExecResult = await self._ask("exec", command, timeout=timeout, cwd=cwd, env=env, stdin=stdin)
        return found

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """The file's bytes."""
        data: bytes = await self._ask("read_file", path, max_bytes)
        return data

    async def read_tree(
        self,
        path: str,
        *,
        skip: Collection[str] = (),
        limits: TreeLimits | None = None,
        known: Mapping[str, str] | None = None,
    ) -> Mapping[str, TreeFile]:
        """The files and links below the directory."""
        files: Mapping[str, TreeFile] = await self._ask("read_tree", path, skip=skip, limits=limits, known=known)
        return files

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write ``files``."""
        await self._ask("write_files", dict(files))

    async def close(self) -> None:
        """Remove the sandbox."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._end())
        await shielded(self._closing)

    async def _end(self) -> None:
        try:
            await self._host.end(self._key)
        finally:
            self._host.on_end(self._id)

    async def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._closing is not None:
            raise SandboxLostError(f"sandbox {self._id} is closed")
        return await self._host.ask(method, self._key, *args, **kwargs)


async def _awaited(call: Any) -> Answer:
    answer: Answer = await call
    return answer
