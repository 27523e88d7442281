"""One machine's part of an engine: a Ray actor beside which the server runs.

The server dies with the actor's process (:mod:`agent_rl.engine.launch`), and that with its node and with the run.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from agent_rl.config import EngineConfig
from agent_rl.engine.launch import EngineServer, Seat, free_port, sglang_version
from agent_rl.errors import AgentRlError, EngineStartError, UserError
from sandbox.temp_dir import TempDirectory

_LOOK_SECONDS = 0.2
_LOG_BYTES = 4 << 20
_DIRECTORY = "agent-rl-engine-"


@dataclass(frozen=True, slots=True)
class Arrival:
    """Where an actor has come to: the Ray node's name, its address, and a port that is free there."""

    node: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """What is to be started: the server of ``config`` (whose ``device`` is decided) on the checkpoint ``model``.

    ``number``, ``capture_routes``, ``seat``: as :class:`agent_rl.engine.launch.EngineServer` takes them. ``log``: where
    its log comes to in the end, for messages.
    """

    config: EngineConfig
    model: Path
    number: int
    capture_routes: bool
    seat: Seat
    log: Path


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a call: ``text``, or the ``fault`` in a line. (Ray would raise an error as one of its own.)"""

    text: str = ""
    fault: str = ""


class LogDirectory:
    """A directory for a server's log on this machine. Those whose owners were killed are removed as one is made."""

    def __init__(self) -> None:
        self._directory = TempDirectory(_DIRECTORY)
        self.log = self._directory.path / "engine.log"

    def take(self) -> bytes:
        """Remove the directory; the end of its log."""
        end = b""
        if self.log.exists():
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - _LOG_BYTES))
                end = file.read()
        self._directory.remove()
        return end


class EngineHost:
    """The actor; wrap with ``ray.remote``."""

    def __init__(self) -> None:
        self._directory: LogDirectory | None = None
        self._server: EngineServer | None = None

    async def arrive(self) -> Arrival:
        import ray

        address, own = str(ray.util.get_node_ip_address()), ray.get_runtime_context().get_node_id()
        name = next(node["NodeName"] for node in ray.nodes() if node["NodeID"] == own)
        return Arrival(name, address, free_port(address))

    async def look(self, config: EngineConfig, model: Path) -> Answer:
        """Whether this machine has what a server takes: its release of SGLang."""
        try:
            await asyncio.to_thread(_refuse_absent, model)
            return Answer(await asyncio.to_thread(sglang_version, config.python))
        except AgentRlError as error:
            return Answer(fault=str(error))

    async def start(self, order: ServerRequest) -> Answer:
        """Start the server and wait until it is healthy; its address."""
        self._directory = directory = await asyncio.to_thread(LogDirectory)
        self._server = EngineServer(
            order.config,
            order.model,
            directory.log,
            number=order.number,
            capture_routes=order.capture_routes,
            seat=order.seat,
        )
        try:
            await asyncio.to_thread(_refuse_absent, order.model)
            return Answer(await self._server.start())
        except (EngineStartError, UserError) as error:
            return Answer(fault=str(error).replace(str(directory.log), str(order.log)))

    async def ended(self, log: Path) -> str:
        """Wait until the server is dead; why, in one line. ``log``: as of :class:`ServerRequest`."""
        server, directory = self._server, self._directory
        assert server is not None, "start() comes first"
        assert directory is not None, "stop() comes last"
        while (reason := server.death()) is None:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)
        return reason.replace(str(directory.log), str(log))

    async def stop(self) -> bytes:
        """End all processes of the server and remove its log; the end of that."""
        directory, self._directory = self._directory, None
        if self._server is None or directory is None:
            return b""
        await self._server.stop()
        return await asyncio.to_thread(directory.take)


def _refuse_absent(model: Path) -> None:
    """Raises UserError where this machine does not have the checkpoint in directory ``model``."""
    if not (model / "config.json").is_file():
        raise UserError(
            f"model: {model}: no Hugging Face checkpoint there (no config.json); put it at the same path on every "
            "machine that engines may run on, or on a shared file system"
        )
