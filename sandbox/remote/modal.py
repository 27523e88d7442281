"""Remote sandboxes at Modal. Written from the client's source (modal 1.6.4); **never run against the service**."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

from sandbox.errors import ImageMissingError, SandboxError, SandboxStartError, SandboxUnavailableError
from sandbox.remote.backend import RemoteBackend
from sandbox.remote.connection import SocketStream, Stream
from sandbox.types import ImagePolicy, SandboxSpec

_APP = "agent-rl"
_PORT = 8000
_LIFETIME_SECONDS = 24 * 3600  # the longest that the service allows; the agent ends an abandoned sandbox before
_CONNECT_SECONDS = 60.0


def open_modal(*, run_id: str, images: ImagePolicy | None = None) -> RemoteBackend:
    """Open the backend with the user's Modal credentials. Images come from their registries, whatever ``images`` says.

    Raises ``SandboxUnavailableError`` without the package ``modal``.
    """
    try:
        import modal
    except ImportError:
        raise SandboxUnavailableError("sandbox.backend=modal: install it with: pip install 'agent-rl[modal]'") from None
    return RemoteBackend(ModalProvider(modal, run_id), address=str(_PORT))


class ModalInstance:
    """A running Modal sandbox and the connection to its agent."""

    def __init__(self, sandbox: Any, stream: Stream) -> None:
        self.id, self.stream = str(sandbox.object_id), stream
        self._sandbox = sandbox

    async def end(self) -> None:
        """Terminate the sandbox."""
        await _terminate(self._sandbox)


class ModalProvider:
    """The :class:`sandbox.remote.backend.Provider` of Modal. ``modal`` is the client's module."""

    name = "modal"

    def __init__(self, modal: Any, run_id: str) -> None:
        self._modal, self._run_id = modal, run_id

    async def start(self, spec: SandboxSpec, command: Sequence[str]) -> ModalInstance:
        """Start a sandbox without outbound network and connect to its agent through an encrypted tunnel."""
        if spec.image == "host":
            raise ImageMissingError("sandbox.image: a sandbox at Modal needs an image of a registry; set one")
        token = secrets.token_hex(32)
        try:
            sandbox = await self._create(spec, command, token)
        except self._modal.exception.Error as error:
            raise SandboxStartError(f"modal: {error}") from None
        try:
            return ModalInstance(sandbox, await self._connect(sandbox, token))
        except BaseException as error:
            await _terminate(sandbox)
            if isinstance(error, (OSError, TimeoutError, self._modal.exception.Error)):
                raise SandboxStartError(f"modal: no connection to the agent: {error!r}") from None
            raise

    async def reap(self) -> int:
        """Return 0: instances end with their connection."""
        return 0

    async def close(self) -> None:
        """Do nothing."""

    async def _create(self, spec: SandboxSpec, command: Sequence[str], token: str) -> Any:
        app = await self._modal.App.lookup.aio(_APP, create_if_missing=True)
        return await self._modal.Sandbox.create.aio(
            *command,
            app=app,
            image=self._modal.Image.from_registry(spec.image),
            tags={**spec.labels, "run": self._run_id},
            env={"AGENT_RL_TOKEN": token},
            timeout=_LIFETIME_SECONDS,
            cpu=(spec.cpus, spec.cpus),
            memory=(spec.memory_mb, spec.memory_mb),
            outbound_cidr_allowlist=[],
            encrypted_ports=[_PORT],
        )

    async def _connect(self, sandbox: Any, token: str) -> Stream:
        host, port = (await sandbox.tunnels.aio())[_PORT].tls_socket
        async with asyncio.timeout(_CONNECT_SECONDS):
            while True:
                try:
                    reader, writer = await asyncio.open_connection(host, port, ssl=True)
                    break
                except ConnectionError:
                    await asyncio.sleep(0.2)  # the agent does not listen yet
        writer.write(token.encode())
        return SocketStream(reader, writer)


async def _terminate(sandbox: Any) -> None:
    try:
        await sandbox.terminate.aio()
    except Exception as error:
        raise SandboxError(f"modal: {error}") from None
