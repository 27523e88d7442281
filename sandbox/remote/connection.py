"""The connection to the agent of a remote sandbox: requests with their responses, in any order."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import struct
from typing import Any, Protocol

from sandbox.errors import SandboxDiskFullError, SandboxError, SandboxFileError, SandboxLostError

_SIZES = struct.Struct(">II")
_MAX_MESSAGE = 1 << 30
SILENCE_SECONDS = 300.0
"""An agent ends its sandbox after this time without a request."""
_PING_SECONDS = 15.0

Message = tuple[dict[str, Any], bytes]
"""Header and body."""


class Stream(Protocol):
    """The bytes from and to an agent. ``asyncio`` streams are adapted by :class:`SocketStream`."""

    async def read(self, size: int) -> bytes:
        """Return exactly ``size`` bytes. Raises ``OSError`` or ``EOFError`` if the stream ends before."""
        ...

    async def write(self, data: bytes) -> None:
        """Write ``data``. Raises ``OSError``."""
        ...

    async def close(self) -> None:
        """Close both directions."""
        ...


class SocketStream:
    """The :class:`Stream` of a pair of asyncio streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self, size: int) -> bytes:
        return await self._reader.readexactly(size)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class AgentConnection:
    """Sends requests to the agent of the sandbox ``name`` and keeps the sandbox alive with pings."""

    def __init__(self, name: str, stream: Stream) -> None:
        self._name, self._stream = name, stream
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Message]] = {0: asyncio.get_running_loop().create_future()}
        self._writing = asyncio.Lock()
        self._lost = ""
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._ping())]

    async def ready(self, timeout: float) -> None:
        """Wait for the agent's first message. Raises ``SandboxLostError``."""
        await self._result(0, timeout)

    async def request(self, operation: str, body: bytes = b"", *, timeout: float, **header: Any) -> Message:
        """Send a request and return the response, after at most ``timeout`` seconds.

        A cancelled command is cancelled in the sandbox too. Raises ``SandboxFileError`` or ``SandboxDiskFullError`` if
        the agent refuses, and ``SandboxLostError`` without a response.
        """
        number = next(self._numbers)
        self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send({"op": operation, "id": number, **header}, body)
            return await self._result(number, timeout)
        except asyncio.CancelledError:
            if operation == "exec":
                await self._cancel(number)
            raise
        finally:
            self._pending.pop(number, None)

    async def close(self) -> None:
        """Close the connection, which ends the sandbox. Requests in flight raise ``SandboxLostError``."""
        self._fail(f"sandbox {self._name} is closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self._stream.close()

    async def _result(self, number: int, timeout: float) -> Message:
        try:
            header, body = await asyncio.wait_for(asyncio.shield(self._pending[number]), timeout)
        except TimeoutError:
            raise SandboxLostError(f"sandbox {self._name}: no response within {timeout:.0f} s") from None
        if "error" in header:
            text = f"{header['error']}"
            if header.get("failed"):
                raise SandboxError(f"sandbox {self._name}: its agent failed: {text}")
            raise SandboxDiskFullError(text) if header["full"] else SandboxFileError(text)
        return header, body

    async def _send(self, header: dict[str, Any], body: bytes = b"") -> None:
        if self._lost:
            raise SandboxLostError(self._lost)
        data = json.dumps(header).encode()
        try:
            async with self._writing:
                await self._stream.write(_SIZES.pack(len(data), len(body)) + data + body)
        except OSError as error:
            self._fail(f"sandbox {self._name}: its connection broke: {error}")
            raise SandboxLostError(self._lost) from None

    async def _cancel(self, number: int) -> None:
        """Cancel a command and wait, for at most 20 s, until its processes have ended."""
        with contextlib.suppress(SandboxError):
            await self._send({"op": "cancel", "id": next(self._numbers), "command": number})
            await asyncio.wait({self._pending[number]}, timeout=20.0)

    async def _receive(self) -> None:
        try:
            while True:
                header_size, body_size = _SIZES.unpack(await self._stream.read(_SIZES.size))
                if header_size + body_size > _MAX_MESSAGE:
                    raise OSError(f"a message of {header_size + body_size} bytes")
                header = json.loads(await self._stream.read(header_size))
                body = await self._stream.read(body_size)
                future = self._pending.get(header["id"])
                if future is not None and not future.done():
                    future.set_result((header, body))
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            self._fail(f"sandbox {self._name}: its connection ended: {error!r}")

    def _fail(self, why: str) -> None:
        self._lost = self._lost or why
        for future in self._pending.values():
            if not future.done():
                future.set_exception(SandboxLostError(self._lost))
                future.exception()  # retrieved: nobody may wait for it

    async def _ping(self) -> None:
        with contextlib.suppress(SandboxLostError):
            while True:
                await asyncio.sleep(_PING_SECONDS)
                await self._send({"op": "ping", "id": next(self._numbers)})
