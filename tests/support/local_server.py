"""An HTTP server on this machine that answers as a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson

Handler = Callable[[str, dict[str, Any]], Awaitable[tuple[int, bytes]]]
"""``(path without query, JSON body) -> (status, body)``; status 0 hangs up."""


@asynccontextmanager
async def serving(handler: Handler, port: int = 0, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Serve until the block is left, on ``port`` or a free one; the server's address."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                lengths = [line.split(":")[1] for line in lines if line.lower().startswith("content-length")]
                body = await reader.readexactly(int(lengths[0])) if lengths else b"{}"
                status, said = await handler(lines[0].split()[1].partition("?")[0], orjson.loads(body))
                if not status:
                    return
                writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%b" % (status, len(said), said))
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass  # the client hung up
        finally:
            writer.close()

    server = await asyncio.start_server(connected, host, port)
    async with server:
        yield f"http://{host}:{server.sockets[0].getsockname()[1]}"
