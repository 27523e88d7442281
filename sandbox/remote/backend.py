"""The backend of remote sandboxes: a provider starts machines, and an agent in each serves one sandbox."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from importlib import resources
from typing import Protocol

from sandbox.errors import SandboxError, SandboxStartError
from sandbox.remote.connection import SILENCE_SECONDS, AgentConnection, Stream
from sandbox.remote.sandbox import RemoteSandbox
from sandbox.shielded import shielded
from sandbox.types import SandboxSpec

_log = logging.getLogger(__name__)
_READY_SECONDS = 60.0
_END_SECONDS = 60.0


class Instance(Protocol):
    """A machine or container of a provider, whose main program is the agent."""

    @property
    def id(self) -> str: ...

    @property
    def stream(self) -> Stream:
        """The connection to the agent."""
        ...

    async def end(self) -> None:
        """Remove the instance. Idempotent. Raises ``SandboxError``."""
        ...


class Provider(Protocol):
    """Starts instances from images. They have no network but the connection, and the limits of the spec.

    ``name`` is the name of the backend.
    """

    @property
    def name(self) -> str: ...

    async def start(self, spec: SandboxSpec, command: Sequence[str]) -> Instance:
        """Start an instance of ``spec.image`` whose main program is ``command``, as root, and connect to it.

        The program kills all other processes of the instance at the end of a command. It needs the capabilities
        ``DAC_OVERRIDE``, ``FOWNER``, ``KILL``, ``SETGID``, ``SETUID`` and ``SETPCAP``, and the image Python 3.7 or
        newer. Raises ``SandboxStartError`` or ``ImageMissingError``.
        """
        ...

    async def reap(self) -> int:
        """Remove the instances of dead runs; return how many. 0 if instances end by themselves."""
        ...

    async def close(self) -> None:
        """Release what the provider holds on this machine."""
        ...


def agent_command(address: str = "-") -> list[str]:
    """Return the command of an agent that listens at ``address``: a TCP port, the path of a unix socket, or "-"."""
    source = resources.files("sandbox.remote").joinpath("agent.py").read_text()
    return ["python3", "-I", "-c", source, address, str(SILENCE_SECONDS)]


class RemoteBackend:
    """Sandboxes of ``provider``. An instance ends with the connection of its run, so dead runs leave none."""

    def __init__(self, provider: Provider, *, address: str = "-") -> None:
        self._provider, self._address = provider, address
        self._sandboxes: dict[str, tuple[RemoteSandbox, Instance]] = {}
        self._closed = False

    @property
    def name(self) -> str:
        return self._provider.name

    async def start(self, spec: SandboxSpec) -> RemoteSandbox:
        """Start a sandbox. Raises ``SandboxStartError`` or ``ImageMissingError``."""
        if self._closed:
            raise SandboxStartError("the backend is closed")
        if spec.ro_binds:
            raise SandboxStartError(
                f"ro_binds: a sandbox of {self.name} cannot see {', '.join(spec.ro_binds)} of this machine; put the "
                "files into the image, or set sandbox.backend=docker"
            )
        starting = asyncio.ensure_future(self._provider.start(spec, agent_command(self._address)))
        try:
            instance = await asyncio.shield(starting)
        except asyncio.CancelledError:
            await shielded(self._end_started(starting))
            raise
        return await self._connect(spec, instance)

    async def reap(self) -> int:
        """Remove the instances of dead runs; return how many."""
        return await self._provider.reap()

    async def close(self) -> None:
        """Close every sandbox."""
        self._closed = True
        await shielded(self._close())

    async def _connect(self, spec: SandboxSpec, instance: Instance) -> RemoteSandbox:
        connection = AgentConnection(instance.id, instance.stream)
        sandbox = RemoteSandbox(instance.id, spec, connection, self._end)
        self._sandboxes[instance.id] = sandbox, instance
        try:
            await connection.ready(_READY_SECONDS)
            await connection.request("mkdir", path=spec.workdir, timeout=_READY_SECONDS)
            await sandbox.disk_watch.set_baseline()
        except BaseException as error:
            await sandbox.close()
            if isinstance(error, SandboxError):
                raise SandboxStartError(f"the agent did not start: {error}") from None
            raise
        return sandbox

    async def _end(self, sandbox: RemoteSandbox) -> None:
        _, instance = self._sandboxes.pop(sandbox.id)
        await self._end_instance(instance)

    async def _end_instance(self, instance: Instance) -> None:
        """Remove an instance. If the provider fails, the instance ends by itself, as its connection is closed."""
        try:
            async with asyncio.timeout(_END_SECONDS):
                await instance.end()
        except (SandboxError, TimeoutError) as error:
            _log.warning(
                "sandbox %s could not be removed: %r; it ends after %.0f s", instance.id, error, SILENCE_SECONDS
            )

    async def _end_started(self, starting: asyncio.Future[Instance]) -> None:
        await asyncio.wait({starting})
        if starting.exception() is None:
            await starting.result().stream.close()
            await self._end_instance(starting.result())

    async def _close(self) -> None:
        async with asyncio.TaskGroup() as group:
            for sandbox, _ in list(self._sandboxes.values()):
                group.create_task(sandbox.close())
        await self._provider.close()
