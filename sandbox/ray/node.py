"""The sandboxes of one node: the Ray actor on the node, and the client that calls it from the controller."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sandbox import socket_proxy
from sandbox.base import ForwardingSandbox
from sandbox.disk import free_bytes
from sandbox.errors import ImageMissingError, SandboxError, SandboxLostError, SandboxNodeLostError
from sandbox.factory import open_backend
from sandbox.shielded import shielded, wait_until_done
from sandbox.types import ImagePolicy, ImageProvider, Sandbox, SandboxBackend, SandboxSpec

_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Response:
    """The value of a call, or its error. (Ray would wrap a raised error in one of its own.)"""

    value: Any = None
    error: SandboxError | None = None


@dataclass(frozen=True, slots=True)
class NodeProbe:
    """Whether a node has the inputs of a sandbox.

    ``image_id`` is None if the image is missing, and ``reason`` is then the error in one line.
    ``missing_directories`` are the paths of ``ro_binds`` that do not exist on the node.
    """

    image_id: str | None
    reason: str
    missing_directories: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeReport:
    """How a node enforces limits, its CPUs, and the free bytes on the disk of its sandboxes (None: unknown)."""

    limits: str
    cpus: int
    free_bytes: int | None


class SandboxNodeActor:
    """The Ray actor with the sandboxes of one node.

    Its process owns the lease of the sandboxes, so they are removed after the death of the actor, its node or its run.
    """

    def __init__(self) -> None:
        self._local: SandboxBackend | None = None
        self._sandboxes: dict[str, Sandbox] = {}
        self._relays: dict[str, asyncio.Server] = {}

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Response:
        """Call ``method`` of this class and return its value or its ``SandboxError``."""
        try:
            return Response(await getattr(self, method)(*args, **kwargs))
        except SandboxError as error:
            return Response(error=type(error)(str(error)))

    async def open(self, backend: str, run_id: str, images: ImagePolicy, runtime: str | None) -> str:
        """Open the local backend and return its name. Raises as :func:`sandbox.factory.open_backend` does."""
        self._local = open_backend(backend, run_id=run_id, images=images, runtime=runtime)
        return self._local.name

    async def close(self) -> None:
        """Close every sandbox of the node."""
        await self._backend.close()
        self._sandboxes.clear()
        for path, relay in self._relays.items():
            relay.close()
            await asyncio.to_thread(shutil.rmtree, os.path.dirname(path), ignore_errors=True)
        self._relays.clear()

    async def reap(self) -> int:
        return await self._backend.reap()

    async def report(self) -> NodeReport:
        """Return the node's resources for ``agent-rl doctor``."""
        limits, disk = (getattr(self._backend, name, None) for name in ("limits", "disk"))
        return NodeReport(limits or "limits of its own", os.cpu_count() or 1, free_bytes(disk))

    async def probe(self, image: str, directories: Sequence[str]) -> NodeProbe:
        """Check for ``image`` and ``directories``; a backend without ``ImageProvider`` counts as having the image."""
        missing = await asyncio.to_thread(_missing_directories, directories)
        if not isinstance(self._backend, ImageProvider):
            return NodeProbe("", "", missing)
        try:
            return NodeProbe(await self._backend.image_id(image), "", missing)
        except ImageMissingError as error:
            return NodeProbe(None, str(error), missing)

    async def fetch(self, image: str) -> None:
        """Pull ``image``. Raises as :meth:`sandbox.types.ImageProvider.fetch` does."""
        if isinstance(self._backend, ImageProvider):
            await self._backend.fetch(image)

    async def relay(self, path: str, proxy: str, host: str, port: int) -> None:
        """Forward the unix socket ``path`` of this node to ``host`` and ``port``, and copy :mod:`sandbox.socket_proxy`
        to ``proxy``, for sandboxes without network. Does nothing on the controller's node, where the socket exists."""
        if await asyncio.to_thread(os.path.exists, path):
            return
        listening = await asyncio.to_thread(_relay_socket, path, proxy)
        self._relays[path] = await asyncio.start_unix_server(partial(_relay, host, port), sock=listening)

    async def start(self, key: str, spec: SandboxSpec) -> str:
        """Start a sandbox, store it as ``key`` and return its id."""
        sandbox = self._sandboxes[key] = await self._backend.start(spec)
        return sandbox.id

    async def end(self, key: str) -> None:
        """Close the sandbox ``key`` if it exists."""
        sandbox = self._sandboxes.pop(key, None)
        if sandbox is not None:
            await sandbox.close()

    async def forward(self, key: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``method`` of the sandbox ``key``. Raises ``SandboxLostError`` if it is closed."""
        sandbox = self._sandboxes.get(key)
        if sandbox is None:
            raise SandboxLostError(f"sandbox {key} is closed")
        return await getattr(sandbox, method)(*args, **kwargs)

    @property
    def _backend(self) -> SandboxBackend:
        assert self._local is not None, "open() comes first"
        return self._local


def _relay_socket(path: str, proxy: str) -> socket.socket:
    """A unix socket at ``path`` in a new directory, with the proxy for sandboxes."""
    directory = Path(path).parent
    directory.mkdir(parents=True)
    directory.chmod(0o755)  # a container's root may map to another user
    shutil.copy(socket_proxy.__file__, proxy)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    Path(path).chmod(0o666)
    return listening


async def _relay(host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Connect a client of a relay to ``host`` and ``port`` until both directions have ended."""
    try:
        upstream_reader, upstream = await asyncio.open_connection(host, port)
    except OSError:
        writer.close()  # the program sees a broken connection and retries
        return
    await asyncio.gather(_copy(reader, upstream), _copy(upstream_reader, writer))
    upstream.close()
    writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


def _missing_directories(directories: Sequence[str]) -> tuple[str, ...]:
    return tuple(directory for directory in directories if not Path(directory).exists())


class RemoteNode:
    """The backend of the sandboxes on the node ``node_name``, through the Ray handle ``actor``.

    ``on_lost`` is called once, after the node or its actor has died; ``on_close`` with the id of each closed sandbox.
    """

    def __init__(self, node_name: str, backend: str, actor: Any) -> None:
        self.node_name, self._backend, self._actor = node_name, backend, actor
        self.on_lost: Callable[[RemoteNode], None] = lambda node: None
        self.on_close: Callable[[str], None] = lambda sandbox: None
        self.lost = ""
        """One line with the reason after the node is lost; empty while it is alive."""
        self._closed = False

    @property
    def name(self) -> str:
        return self._backend

    async def start(self, spec: SandboxSpec) -> RemoteSandbox:
        """Start a sandbox on the node; see :class:`sandbox.types.SandboxBackend`."""
        key = uuid.uuid4().hex
        try:
            id = await self.call("start", key, spec)
        except SandboxNodeLostError:
            raise
        except SandboxError as error:
            raise type(error)(f"{error} (sandbox node {self.node_name})") from None
        except asyncio.CancelledError:
            await shielded(self.end(key))  # the actor may have started it before the cancellation arrived
            raise
        return RemoteSandbox(id, key, spec, self)

    async def end(self, key: str) -> None:
        """Close the sandbox ``key``; on a lost node, its lease expires instead."""
        if not self._closed and not self.lost:
            try:
                await self.call("end", key)
            except SandboxNodeLostError:
                return

    async def reap(self) -> int:
        """Remove the sandboxes of dead runs on the node; return how many."""
        return int(await self.call("reap"))

    async def close(self) -> None:
        """Close every sandbox on the node, then end the actor."""
        if self._closed:
            return
        try:
            await shielded(self._close())
        finally:
            await asyncio.to_thread(self.kill)

    def kill(self) -> None:
        """End the actor at once. Blocking."""
        import ray

        self._closed = True
        ray.kill(self._actor)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the :class:`SandboxNodeActor` and return its value.

        Raises its ``SandboxError``, and ``SandboxNodeLostError``. A cancelled call is also cancelled on the node and
        has ended there when this returns.
        """
        if self._closed:
            raise SandboxLostError(f"the sandbox node {self.node_name} is closed")
        if self.lost:
            raise SandboxNodeLostError(self.lost)
        response = await self._await_response(self._actor.call.remote(method, *args, **kwargs))
        if response.error is not None:
            raise response.error
        return response.value

    async def _await_response(self, call: Any) -> Response:
        import ray
        from ray.exceptions import RayError, RayTaskError

        pending = asyncio.ensure_future(_awaited(call))
        try:
            return await asyncio.shield(pending)
        except asyncio.CancelledError:
            ray.cancel(call)
            await wait_until_done(pending)
            pending.exception()  # retrieved, so that asyncio does not log it
            raise
        except RayTaskError:
            raise  # a bug in the actor, with its traceback
        except RayError as error:
            raise self._mark_lost(" ".join(str(error).split())) from None

    def _mark_lost(self, reason: str) -> SandboxLostError:
        if self._closed:
            return SandboxLostError(f"the sandbox node {self.node_name} was closed during a call")
        if not self.lost:
            self.lost = f"the sandbox node {self.node_name} is lost: {reason[:300]}"
            self.on_lost(self)
        return SandboxNodeLostError(self.lost)

    async def _close(self) -> None:
        if not self.lost:
            await self.call("close")


class RemoteSandbox(ForwardingSandbox):
    """One sandbox on another node, which stores it as ``key``."""

    def __init__(self, id: str, key: str, spec: SandboxSpec, node: RemoteNode) -> None:
        super().__init__(id, spec)
        self._key, self._node = key, node
        self._closing: asyncio.Future[None] | None = None

    async def _forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._closing is not None:
            raise SandboxLostError(f"sandbox {self._id} is closed")
        return await self._node.call("forward", self._key, method, *args, **kwargs)

    async def close(self) -> None:
        """Remove the sandbox."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._end())
        await shielded(self._closing)

    async def _end(self) -> None:
        try:
            await self._node.end(self._key)
        finally:
            self._node.on_close(self._id)


async def _awaited(call: Any) -> Response:
    response: Response = await call
    return response
