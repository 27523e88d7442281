"""The Ray actor that runs an engine's server on one node.

The server is killed with the actor's process (:mod:`agent_rl.engine.launch`), which ends with its node and with the
run.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from agent_rl.config import EngineConfig
from agent_rl.engine.launch import EngineServer, ServerNode, free_port, sglang_version
from agent_rl.errors import AgentRlError, EngineStartError, UserError
from sandbox.temp_dir import TempDirectory

_POLL_SECONDS = 0.2
_LOG_BYTES = 4 << 20
_DIRECTORY = "agent-rl-engine-"


@dataclass(frozen=True, slots=True)
class ActorLocation:
    """Where an actor runs: the Ray node's name, its address, and a free port there."""

    node: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """The server to start: ``config`` (with ``device`` resolved) and the checkpoint ``model``.

    ``number``, ``capture_routes``, ``node``, ``key``: see :class:`agent_rl.engine.launch.EngineServer`. ``log``: the
    final path of its log, for messages.
    """

    config: EngineConfig
    model: Path
    number: int
    capture_routes: bool
    node: ServerNode
    log: Path
    key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call: ``text``, or a one-line ``error``. (Ray would raise an exception as one of its own
    types.)"""

    text: str = ""
    error: str = ""


class LogDirectory:
    """A directory for a server's log on this machine. Creating one removes those of killed owners."""

    def __init__(self) -> None:
        self._directory = TempDirectory(_DIRECTORY)
        self.log = self._directory.path / "engine.log"

    def take(self) -> bytes:
        """Remove the directory; returns the end of its log."""
        tail = b""
        if self.log.exists():
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - _LOG_BYTES))
                tail = file.read()
        self._directory.remove()
        return tail


class EngineActor:
    """The actor class; wrap it with ``ray.remote``."""

    def __init__(self) -> None:
        self._directory: LogDirectory | None = None
        self._server: EngineServer | None = None

    async def locate(self) -> ActorLocation:
        import ray

        address, node_id = str(ray.util.get_node_ip_address()), ray.get_runtime_context().get_node_id()
        name = next(node["NodeName"] for node in ray.nodes() if node["NodeID"] == node_id)
        return ActorLocation(name, address, free_port(address))

    async def check(self, config: EngineConfig, model: Path) -> CallResult:
        """Check that this machine has the checkpoint and SGLang; the result's text is its release."""
        try:
            await asyncio.to_thread(_require_checkpoint, model)
            return CallResult(await asyncio.to_thread(sglang_version, config.python))
        except AgentRlError as error:
            return CallResult(error=str(error))

    async def start(self, request: ServerRequest) -> CallResult:
        """Start the server and wait until it is healthy; the result's text is its address."""
        self._directory = directory = await asyncio.to_thread(LogDirectory)
        self._server = EngineServer(
            request.config,
            request.model,
            directory.log,
            number=request.number,
            capture_routes=request.capture_routes,
            node=request.node,
            key=request.key,
        )
        try:
            await asyncio.to_thread(_require_checkpoint, request.model)
            return CallResult(await self._server.start())
        except (EngineStartError, UserError) as error:
            return CallResult(error=str(error).replace(str(directory.log), str(request.log)))

    async def wait_dead(self, log: Path) -> str:
        """Wait until the server is dead; returns the reason in one line. ``log``: see :class:`ServerRequest`."""
        server, directory = self._server, self._directory
        assert server is not None, "start() comes first"
        assert directory is not None, "stop() comes last"
        while (reason := server.death()) is None:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)
        return reason.replace(str(directory.log), str(log))

    async def stop(self) -> bytes:
        """Stop the server and remove its log directory; returns the end of the log."""
        directory, self._directory = self._directory, None
        if self._server is None or directory is None:
            return b""
        await self._server.stop()
        return await asyncio.to_thread(directory.take)


def _require_checkpoint(model: Path) -> None:
    """Raises UserError if this machine does not have the checkpoint ``model``."""
    if not (model / "config.json").is_file():
        raise UserError(
            f"model: {model}: not a Hugging Face checkpoint (no config.json); store it at the same path on every "
            "node that runs engines, or on a shared file system"
        )
