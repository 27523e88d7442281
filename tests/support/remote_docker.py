"""A provider of remote sandboxes for tests: containers of the local docker engine, reached over TCP.

The agent listens at a unix socket in a directory of the host, because the containers have no network. A server of this
process forwards a TCP port of the loopback device to it, as the tunnel of a cloud provider does.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from docker.types import LogConfig

from sandbox import ImageMissingError, ImagePolicy, SandboxSpec, SandboxStartError
from sandbox.docker.backend import DEFAULT_IMAGE, reap_containers
from sandbox.docker.client import connect, remove_container
from sandbox.docker.lease import OWNER_LABEL, RUN_LABEL
from sandbox.lease import Owner
from sandbox.remote.backend import RemoteBackend
from sandbox.remote.connection import SocketStream, Stream

CAPABILITIES = ["DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID", "SETPCAP"]
SOCKET = "/run/agent/socket"


def open_remote(*, run_id: str, images: ImagePolicy | None = None) -> RemoteBackend:
    """A backend of remote sandboxes in the local docker engine."""
    return RemoteBackend(DockerProvider(run_id), address=SOCKET)


class DockerInstance:
    def __init__(self, container: str, directory: Path, provider: DockerProvider) -> None:
        self.id = container[:12]
        self._container, self._directory, self._provider = container, directory, provider
        self._forwarder: asyncio.Server | None = None
        self.stream: Stream

    async def connect(self, token: str) -> None:
        socket = self._directory / "socket"
        async with asyncio.timeout(30):
            while not socket.exists():
                if not await asyncio.to_thread(self._running):
                    raise SandboxStartError("the agent ended at once")
                await asyncio.sleep(0.05)
        self._forwarder = await asyncio.start_server(partial(forward, socket), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*self._forwarder.sockets[0].getsockname())
        writer.write(token.encode())
        self.stream = SocketStream(reader, writer)

    def _running(self) -> bool:
        return bool(self._provider.api.inspect_container(self._container)["State"]["Running"])

    async def end(self) -> None:
        if self._forwarder is not None:
            self._forwarder.close()
        await asyncio.to_thread(remove_container, self._provider.api, self._container)
        shutil.rmtree(self._directory, ignore_errors=True)


class DockerProvider:
    name = "remote docker"

    def __init__(self, run_id: str) -> None:
        self.api = connect()
        self._owner = Owner.current(run_id)

    async def start(self, spec: SandboxSpec, command: Sequence[str], *, guess: str = "") -> DockerInstance:
        """Start a container and connect with its token, or with the ``guess`` of somebody else."""
        token, directory = secrets.token_hex(16), Path(tempfile.mkdtemp(prefix="agent-rl-remote-"))
        starting = asyncio.ensure_future(asyncio.to_thread(self._start, spec, command, token, directory))
        try:
            instance = DockerInstance(await asyncio.shield(starting), directory, self)
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxStartError):
                await DockerInstance(await starting, directory, self).end()
            raise
        try:
            await instance.connect(guess or token)
        except BaseException:
            await instance.end()
            raise
        return instance

    async def reap(self) -> int:
        return await asyncio.to_thread(reap_containers, self.api, "docker")

    async def close(self) -> None:
        self.api.close()

    def _start(self, spec: SandboxSpec, command: Sequence[str], token: str, directory: Path) -> str:
        image = DEFAULT_IMAGE if spec.image == "host" else spec.image
        if not self.api.images(image):
            raise ImageMissingError(f"image {image!r} is not on this machine")
        memory = spec.memory_mb << 20
        container: str = self.api.create_container(
            image,
            list(command),
            user="0:0",
            hostname="sandbox",
            entrypoint=[],
            network_disabled=True,
            environment={"AGENT_RL_TOKEN": token},
            use_config_proxy=False,
            labels={RUN_LABEL: self._owner.run_id, OWNER_LABEL: self._owner.to_json()},
            host_config=self.api.create_host_config(
                network_mode="none",
                mem_limit=memory,
                memswap_limit=memory,
                pids_limit=spec.pids + 12,
                nano_cpus=int(spec.cpus * 1e9),
                cap_drop=["ALL"],
                cap_add=CAPABILITIES,
                security_opt=["no-new-privileges"],
                log_config=LogConfig(type=LogConfig.types.NONE),
                binds=[f"{directory}:{Path(SOCKET).parent}"],
            ),
        )["Id"]
        try:
            self.api.start(container)
        except BaseException:
            remove_container(self.api, container)
            raise
        return container


async def forward(socket: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes between a TCP connection and the agent's socket until one of them ends."""
    with contextlib.suppress(OSError, asyncio.CancelledError):
        upstream_reader, upstream_writer = await asyncio.open_unix_connection(str(socket))
        copies = [
            asyncio.create_task(copy(reader, upstream_writer)),
            asyncio.create_task(copy(upstream_reader, writer)),
        ]
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in copies:
                each.cancel()
            upstream_writer.close()
    writer.close()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
