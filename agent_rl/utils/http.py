"""HTTP to engines and endpoints: how long an answer is waited for, what went wrong as an engine error, and the retry.

Two faces of the same rules: :class:`AsyncHttp` for the loop, :class:`BlockingHttp` for the threads of a trainer's rank.
The loop's is aiohttp: httpx's pool goes through all of its connections at every request, which at 1,024 in flight costs
a loop seven times the ideal time (``benchmarks/bench_http.py``). The threads' is urllib3: a weight update makes seven
calls in a row, and each takes 1 ms less than by httpx.
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
"""Failures of the engine or of the way to it: the same request may succeed when it is sent again."""

_BUSY = (429, 503)
_MOST_PAUSE = 30.0
_JSON_HEADERS = {"content-type": "application/json"}
_IDLE_SECONDS = 3.0
"""How long an idle connection is kept: less than the 5 s after which SGLang's web server closes it."""
_MOST_IDLE = 4
"""Connections to an engine that threads keep."""
_READ_AHEAD = 1 << 20
"""Bytes of an answer that are taken in before the reader is woken."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """What a server answered, whatever its status."""

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
    worth: Callable[[Exception], bool] = lambda error: isinstance(error, INFRASTRUCTURE),
    before_pause: Callable[[Exception], None] = lambda error: None,
) -> T:
    """What ``attempt`` gives, tried once and ``retries`` times more; the last error is raised.

    The pauses between them double from ``first_pause`` seconds up to 30 and are jittered. ``worth`` says of which
    errors another attempt may come out better; ``before_pause`` is called with each of those. (tenacity's objects refer
    to each other, 45 a request: freeing them takes full garbage collections, which stop the loop.)
    """
    for number in range(retries):
        try:
            return await attempt()
        except Exception as error:
            if not worth(error):
                raise
            before_pause(error)
        await asyncio.sleep(min(first_pause * 2**number, _MOST_PAUSE) + random.uniform(0, first_pause))
    return await attempt()


class AsyncHttp:
    """Asynchronous requests. ``seconds`` bounds the wait for each answer.

    ``headers`` go with every request. Proxies of the environment are for the way out (``outside``); engines are on this
    machine or in this cluster. Every method raises the engine error for what went wrong.
    """

    def __init__(self, seconds: float, *, headers: Mapping[str, str] | None = None, outside: bool = False) -> None:
        self._seconds, self._headers, self._outside = seconds, dict(headers or {}), outside
        self._opened: aiohttp.ClientSession | None = None

    @property
    def _session(self) -> aiohttp.ClientSession:
        """Opened at the first request, for it belongs to the loop that runs then."""
        if self._opened is None:
            self._opened = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=_READ_AHEAD,
                trust_env=self._outside,
            )
        return self._opened

    async def __aenter__(self) -> AsyncHttp:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections, also where the caller is cancelled. Idempotent."""
        if self._opened is not None:
            await shielded(self._opened.close())

    async def post(self, url: str, body: Mapping[str, Any], *, seconds: float | None = None) -> bytes:
        """POST ``body`` as JSON; the answer's bytes. ``seconds``: other than those of every request."""
        return check(await self.exchange(url, body, seconds=seconds)).content

    async def get(self, url: str) -> bytes:
        """GET ``url``; the answer's bytes."""
        return check(await self._ask("GET", url, None, self._seconds)).content

    async def get_json(self, url: str) -> dict[str, Any]:
        """GET a JSON object. Raises EngineRejected where the answer is none."""
        return json_object(await self.get(url), url)

    async def exchange(self, url: str, body: Mapping[str, Any], *, seconds: float | None = None) -> HttpResponse:
        """POST ``body`` as JSON; what was answered, whatever its status is."""
        return await self._ask("POST", url, _content(body), seconds or self._seconds)

    async def _ask(self, method: str, url: str, content: bytes | None, seconds: float) -> HttpResponse:
        async with self._request(method, url, content, seconds) as response:
            return await _read(response)

    async def lines(self, url: str, body: Mapping[str, Any]) -> AsyncGenerator[str, None]:
        """POST ``body`` as JSON; the lines of a streamed answer as they come."""
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
    """Blocking requests to engines, from any thread. ``seconds`` bounds the wait for each answer.

    ``headers`` go with every request. Every method raises the engine error for what went wrong.
    """

    def __init__(self, seconds: float, *, headers: Mapping[str, str] | None = None) -> None:
        timeout = urllib3.Timeout(connect=min(seconds, CONNECT_SECONDS), read=seconds)
        self._headers = dict(headers or {})
        self._pools = urllib3.PoolManager(maxsize=_MOST_IDLE, retries=False, timeout=timeout)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._pools.clear()

    def post(self, url: str, body: Mapping[str, Any]) -> bytes:
        """POST ``body`` as JSON; the answer's bytes."""
        return check(self._ask("POST", url, _content(body))).content

    def get_json(self, url: str) -> dict[str, Any]:
        """GET a JSON object. Raises EngineRejected where the answer is none."""
        return json_object(check(self._ask("GET", url, None)).content, url)

    def _ask(self, method: str, url: str, content: bytes | None) -> HttpResponse:
        headers = self._headers | (_JSON_HEADERS if content is not None else {})
        with converted(url):
            response = self._pools.request(method, url, body=content, headers=headers, redirect=False)
        return HttpResponse(method, url, response.status, response.headers, response.data)


@contextmanager
def converted(url: str) -> Iterator[None]:
    """Turn the HTTP libraries' errors into engine errors: the one place where it is done."""
    try:
        yield
    except (LocationValueError, aiohttp.InvalidURL) as error:
        raise EngineRejected(f"{url}: no address of a server ({error})") from error
    except (urllib3.exceptions.HTTPError, aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineUnreachable(f"{url}: no answer ({type(error).__name__}: {error or 'no details'})") from error


def timed_out(error: EngineUnreachable) -> bool:
    """Whether the server has the request, and did not answer it in time."""
    return isinstance(error.__cause__, aiohttp.SocketTimeoutError)


def check(answer: HttpResponse) -> HttpResponse:
    """Return an ``answer`` of status 2xx; raise the engine error that its status means."""
    if 200 <= answer.status < 300:
        return answer
    message = f"{answer.method} {answer.url} answered {answer.status}: {server_message(answer.content)}"
    if answer.status in (401, 403):
        raise EngineKeyRefused(f"{message}: it wants a key, in the variable that engine.api_key_env names, or another")
    if answer.status in _BUSY:
        raise EngineOverloaded(message)
    if 400 <= answer.status < 500:
        raise EngineRejected(message)
    raise EngineUnreachable(message)


async def _read(response: aiohttp.ClientResponse) -> HttpResponse:
    content = await response.read()
    return HttpResponse(response.method, str(response.url), response.status, response.headers, content)


def server_message(body: bytes) -> str:
    """What is wrong in the server's words, in one line, from any of the shapes SGLang answers errors in."""
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
    """The JSON object in ``body``, an answer of ``url``. Raises EngineRejected where it is none."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise EngineRejected(f"{url} answered no JSON but {body[:60]!r}") from None
    if not isinstance(data, dict):
        raise EngineRejected(f"{url} answered a {type(data).__name__}, expected an object")
    return data


def _content(body: Mapping[str, Any]) -> bytes:
    """``body`` as JSON. The HTTP library's own encoder takes several times as long on lists of token ids."""
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
