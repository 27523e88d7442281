"""HTTP to engines and endpoints: timeouts, errors of the HTTP libraries as engine errors, and retries.

:class:`AsyncHttp` serves the event loop, :class:`BlockingHttp` the threads of a trainer's worker. AsyncHttp uses
aiohttp: the pool of httpx visits all of its connections at every request, which takes seven times the ideal time at
1,024 requests in flight (``benchmarks/bench_http.py``). BlockingHttp uses urllib3: a weight update makes seven calls in
a row, and each takes 1 ms less than with httpx.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import orjson
import urllib3
from urllib3.exceptions import LocationValueError

from agent_rl.errors import (
    EngineAborted,
    EngineError,
    EngineKeyRefused,
    EngineOverloaded,
    EngineRejected,
    EngineStale,
    EngineUnreachable,
)
from agent_rl.utils.concurrency import shielded

T = TypeVar("T")

CONNECT_SECONDS = 10.0
INFRASTRUCTURE: tuple[type[EngineError], ...] = (EngineUnreachable, EngineOverloaded, EngineAborted, EngineStale)
"""Failures of the engine or of the network: the same request can succeed when it is sent again."""

_BUSY = (429, 503)
_MOST_PAUSE = 30.0
_JSON_HEADERS = {"content-type": "application/json"}
_IDLE_SECONDS = 3.0
"""Idle connections close after this time, before SGLang's web server closes them (5 s)."""
_MOST_IDLE = 4
"""Open connections per engine that BlockingHttp keeps."""
_OUTSIDE_BYTES = 64 << 20
_READ_AHEAD = 1 << 20
"""Bytes of a response that aiohttp buffers before it wakes the reader."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response of any status."""

    method: str
    url: str
    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


async def call_with_retries(
    attempt: Callable[[], Awaitable[T]],
    retries: int,
    first_pause: float,
    *,
    before_pause: Callable[[Exception], None] = lambda error: None,
) -> T:
    """Call ``attempt`` once and up to ``retries`` times more, and return its first result. Raises the last error.

    The pauses double from ``first_pause`` seconds up to 30, with jitter. Only :data:`INFRASTRUCTURE` errors are
    retried; ``before_pause`` receives each of them. tenacity is not used here: it makes 45 objects per request that
    refer to each other, and only full garbage collections, which stop the loop, free them.
    """
    for number in range(retries):
        try:
            return await attempt()
        except INFRASTRUCTURE as error:
            before_pause(error)
        await asyncio.sleep(min(first_pause * 2**number, _MOST_PAUSE) + random.uniform(0, first_pause))
    return await attempt()


class AsyncHttp:
    """Asynchronous requests. ``seconds``: the timeout of each response.

    Every request has ``headers``. ``outside``: the server belongs to others. Its responses are limited to 64 MiB and
    not decompressed, and the proxies of the environment are used, which engines do not need. Every method raises an
    EngineError.
    """

    def __init__(self, seconds: float, *, headers: Mapping[str, str] | None = None, outside: bool = False) -> None:
        self._seconds, self._headers, self._outside = seconds, dict(headers or {}), outside
        if outside:
            self._headers["accept-encoding"] = "identity"
        self._opened: aiohttp.ClientSession | None = None

    @property
    def _session(self) -> aiohttp.ClientSession:
        """Opened at the first request, because it belongs to the running event loop."""
        if self._opened is None:
            self._opened = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=_READ_AHEAD,
                trust_env=self._outside,
                auto_decompress=not self._outside,
            )
        return self._opened

    async def __aenter__(self) -> AsyncHttp:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections, even if the caller is cancelled. Idempotent."""
        if self._opened is not None:
            await shielded(self._opened.close())

    async def post(self, url: str, body: Mapping[str, Any], *, seconds: float | None = None) -> bytes:
        """POST ``body`` as JSON; returns the response body. ``seconds`` replaces the default timeout."""
        return check(await self.exchange(url, body, seconds=seconds)).content

    async def get(self, url: str) -> bytes:
        """GET ``url``; returns the response body."""
        return check(await self._send("GET", url, None, self._seconds)).content

    async def get_json(self, url: str) -> dict[str, Any]:
        """GET a JSON object. Raises EngineRejected if the response is not one."""
        return json_object(await self.get(url), url)

    async def exchange(self, url: str, body: Mapping[str, Any], *, seconds: float | None = None) -> HttpResponse:
        """POST ``body`` as JSON; returns the response of any status."""
        return await self._send("POST", url, _content(body), seconds or self._seconds)

    async def _send(self, method: str, url: str, content: bytes | None, seconds: float) -> HttpResponse:
        async with self._request(method, url, content, seconds) as response:
            return await _read(response, _OUTSIDE_BYTES if self._outside else None)

    async def lines(self, url: str, body: Mapping[str, Any]) -> AsyncGenerator[str, None]:
        """POST ``body`` as JSON; yields the lines of a streamed response as they arrive."""
        async with self._request("POST", url, _content(body), self._seconds) as response:
            if not response.ok:
                check(await _read(response))
            rest = b""
            async for part in response.content.iter_any():
                *whole, rest = (rest + part).split(b"\n")
                for line in whole:
                    yield line.decode(errors="replace").rstrip("\r")
            if rest:
                yield rest.decode(errors="replace")

    @asynccontextmanager
    async def _request(
        self, method: str, url: str, content: bytes | None, seconds: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(sock_connect=min(seconds, CONNECT_SECONDS), sock_read=seconds)
        headers = _JSON_HEADERS if content is not None else {}
        with converted(url):
            async with self._session.request(
                method, url, data=content, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                yield response


class BlockingHttp:
    """Blocking requests to engines, from any thread. ``seconds``: the timeout of each response.

    Every request has ``headers``. Every method raises an EngineError.
    """

    def __init__(self, seconds: float, *, headers: Mapping[str, str] | None = None) -> None:
        timeout = urllib3.Timeout(connect=min(seconds, CONNECT_SECONDS), read=seconds)
        self._headers = dict(headers or {})
        self._pools = urllib3.PoolManager(maxsize=_MOST_IDLE, retries=False, timeout=timeout)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._pools.clear()

    def post(self, url: str, body: Mapping[str, Any] | bytes) -> bytes:
        """POST ``body``, as JSON unless it is bytes; returns the response body."""
        return check(self._send("POST", url, body if isinstance(body, bytes) else _content(body))).content

    def exchange(self, url: str, body: Mapping[str, Any]) -> HttpResponse:
        """POST ``body`` as JSON; returns the response of any status."""
        return self._send("POST", url, _content(body))

    def get_json(self, url: str) -> dict[str, Any]:
        """GET a JSON object. Raises EngineRejected if the response is not one."""
        return json_object(check(self._send("GET", url, None)).content, url)

    def _send(self, method: str, url: str, content: bytes | None) -> HttpResponse:
        headers = self._headers | (_JSON_HEADERS if content is not None else {})
        with converted(url):
            response = self._pools.request(method, url, body=content, headers=headers, redirect=False)
        return HttpResponse(method, url, response.status, response.headers, response.data)


@contextmanager
def converted(url: str) -> Iterator[None]:
    """Convert the errors of both HTTP libraries to engine errors."""
    try:
        yield
    except (LocationValueError, aiohttp.InvalidURL) as error:
        raise EngineRejected(f"{url}: not the address of a server ({error})") from error
    except (urllib3.exceptions.HTTPError, aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineUnreachable(f"{url}: no response ({type(error).__name__}: {error or 'no details'})") from error


def timed_out(error: EngineUnreachable) -> bool:
    """Whether the server received the request and did not respond in time."""
    return isinstance(error.__cause__, aiohttp.SocketTimeoutError)


def check(response: HttpResponse) -> HttpResponse:
    """Return a ``response`` of status 2xx; raise the engine error of any other status."""
    if 200 <= response.status < 300:
        return response
    message = f"{response.method} {response.url} answered {response.status}: {server_message(response.content)}"
    if response.status in (401, 403):
        raise EngineKeyRefused(f"{message}: put a valid key into the variable that engine.api_key_env names")
    if response.status in _BUSY:
        raise EngineOverloaded(message)
    if 400 <= response.status < 500:
        raise EngineRejected(message)
    raise EngineUnreachable(message)


async def _read(response: aiohttp.ClientResponse, max_bytes: int | None = None) -> HttpResponse:
    """The whole response. Raises EngineRejected for more than ``max_bytes``."""
    if max_bytes is None:
        content = await response.read()
    else:
        parts = bytearray()
        async for part in response.content.iter_any():
            parts += part
            if len(parts) > max_bytes:
                raise EngineRejected(f"{response.url}: a response of more than {max_bytes} bytes")
        content = bytes(parts)
    return HttpResponse(response.method, str(response.url), response.status, response.headers, content)


def server_message(body: bytes) -> str:
    """The error message of the server, in one line, from any of the formats of SGLang's error responses."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return " ".join(body.decode(errors="replace").split())[:500] or "nothing"
    if isinstance(data, Mapping):
        data = data.get("error", data.get("message", data.get("detail", data)))
    if isinstance(data, Mapping):
        data = data.get("message", data)
    return " ".join(str(data).split())[:500]


def json_object(body: bytes, url: str) -> dict[str, Any]:
    """The JSON object in ``body``, a response of ``url``. Raises EngineRejected if it is not one."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise EngineRejected(f"{url} answered {body[:60]!r}, expected JSON") from None
    if not isinstance(data, dict):
        raise EngineRejected(f"{url} answered a {type(data).__name__}, expected an object")
    return data


def _content(body: Mapping[str, Any]) -> bytes:
    """``body`` as JSON. The encoders of the HTTP libraries take several times as long on lists of token ids."""
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
