"""An HTTP proxy in front of a real server that changes what passes, one fault at a time."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import orjson
from numpy.typing import NDArray

Rows = NDArray[np.int32]
Request, Meta = dict[str, Any], dict[str, Any]


class Fault:
    """Passes everything on as it is. ``layers`` and ``top_k`` are the model's, which give the rows their shape."""

    layers, top_k = 4, 2

    def request(self, request: Request) -> Request:
        """The request to ``/generate`` that the server gets."""
        return request

    def answer(self, request: Request, answer: dict[str, Any]) -> None:
        """Change an answer that holds routes, in place."""
        meta = answer["meta_info"]
        rows = self.rows(request, answer, _decode(meta["routed_experts"], self.layers, self.top_k))
        meta["routed_experts"] = base64.b64encode(np.ascontiguousarray(rows).tobytes()).decode()

    def rows(self, request: Request, answer: Mapping[str, Any], rows: Rows) -> Rows:
        """The rows ``[T, layers, top_k]`` that the client gets."""
        return rows

    def control(self, path: str, body: bytes) -> bytes | None:
        """The body that the server gets for another endpoint; None refuses the request."""
        return body

    def changed_line(self, path: str, line: str) -> str:
        """A line of the response of another endpoint than ``/generate``."""
        return line


def _decode(payload: str, layers: int, top_k: int) -> Rows:
    return np.frombuffer(base64.b64decode(payload), "<i4").reshape(-1, layers, top_k).copy()


class StripsEvery(Fault):
    """A router that drops the key from every ``nth`` response."""

    def __init__(self, nth: int = 1) -> None:
        self.nth, self.seen = nth, 0

    def answer(self, request: Request, answer: dict[str, Any]) -> None:
        self.seen += 1
        if self.seen % self.nth == 0:
            del answer["meta_info"]["routed_experts"]


class Changes(Fault):
    """Changes the rows by a function of ``(rows, finish, answer)``."""

    def __init__(self, change: Callable[[Rows, str, Mapping[str, Any]], Rows]) -> None:
        self._change = change

    def rows(self, request: Request, answer: Mapping[str, Any], rows: Rows) -> Rows:
        return self._change(rows, answer["meta_info"]["finish_reason"]["type"], answer)


class IgnoresStart(Fault):
    """An engine that does not know ``routed_experts_start_len``."""

    def request(self, request: Request) -> Request:
        return request | {"routed_experts_start_len": 0}


class Lags(Fault):
    """Row i is that of token i - 1, also from a start on: consistent in itself, and wrong."""

    def request(self, request: Request) -> Request:
        return request | {"routed_experts_start_len": max(0, request["routed_experts_start_len"] - 1)}

    def rows(self, request: Request, answer: Mapping[str, Any], rows: Rows) -> Rows:
        return np.concatenate([rows[:1], rows[:-1]]) if request["routed_experts_start_len"] == 0 else rows[:-1]


class MixesSiblings(Fault):
    """Gives a prompt's second completion the rows of its first."""

    def __init__(self) -> None:
        self._first: dict[bytes, Rows] = {}

    def rows(self, request: Request, answer: Mapping[str, Any], rows: Rows) -> Rows:
        first = self._first.setdefault(bytes(orjson.dumps(request["input_ids"])), rows)
        return first if request["sampling_params"]["temperature"] and len(first) == len(rows) else rows


class DropsMeta(Fault):
    """Leaves keys out of ``meta_info``."""

    def __init__(self, *keys: str) -> None:
        self._keys = keys

    def answer(self, request: Request, answer: dict[str, Any]) -> None:
        for key in self._keys:
            del answer["meta_info"][key]


@asynccontextmanager
async def proxy(target: str, fault: Fault) -> AsyncIterator[str]:
    """Serve ``target`` with ``fault`` on a free port; every connection carries one request."""
    client = httpx.AsyncClient(timeout=60, trust_env=False)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path, _ = head.split("\r\n")[0].split()
            path = path.partition("?")[0]  # so that the server sends routes in JSON, which faults change
            lengths = [line.split(":")[1] for line in head.split("\r\n") if line.lower().startswith("content-length")]
            body = await reader.readexactly(int(lengths[0])) if lengths else b""
            request = orjson.loads(body) if path == "/generate" else {}
            if request:
                body = orjson.dumps(fault.request(request))
            elif (changed := fault.control(path, body)) is not None:
                body = changed
            else:
                writer.write(b"HTTP/1.1 400 x\r\nconnection: close\r\n\r\n" + b'{"message": "not today"}')
                return
            async with client.stream(method, target + path, content=body, headers=_JSON) as response:
                writer.write(b"HTTP/1.1 %d x\r\nconnection: close\r\n\r\n" % response.status_code)
                async for line in response.aiter_lines():
                    changed = _changed(line, request, fault) if request else fault.changed_line(path, line)
                    writer.write(changed.encode() + b"\n")
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client hung up
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=1 << 24)
    async with client, server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


_JSON = {"content-type": "application/json"}


def _changed(line: str, request: Request, fault: Fault) -> str:
    """A line of an answer: a whole body, or one event of a stream; only those with routes are changed."""
    if '"routed_experts"' not in line:
        return line
    prefix = "data: " if line.startswith("data: ") else ""
    answer = orjson.loads(line.removeprefix(prefix))
    fault.answer(request, answer)
    return prefix + orjson.dumps(answer).decode()
