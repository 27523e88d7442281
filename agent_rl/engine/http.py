"""HTTP to engines and endpoints: how long an answer is waited for, what went wrong as an engine error, and the retry.

Two faces of the same rules: :class:`AsyncHttp` for the loop, :class:`BlockingHttp` for the threads of a trainer's rank.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import httpx
import orjson
import tenacity

from agent_rl.aio import shielded
from agent_rl.errors import EngineAborted, EngineError, EngineOverloaded, EngineRejected, EngineUnreachable

CONNECT_SECONDS = 10.0
INFRASTRUCTURE: tuple[type[EngineError], ...] = (EngineUnreachable, EngineOverloaded, EngineAborted)
"""Failures of the engine or of the way to it: the same request may succeed when it is sent again."""

_BUSY = (429, 503)
_MOST_PAUSE = 30.0
_JSON_HEADERS = {"content-type": "application/json"}
_IDLE_CONNECTIONS = 16
"""Idle connections kept. For each of them httpcore 1.0 goes through all connections at every request: with 64 requests
in flight a thousand cost 8 ms of processor time a request, 16 cost 1.4 ms (tests/bench/bench_http.py)."""


def retrying(
    retries: int,
    first_pause: float,
    *,
    worth: Callable[[BaseException], bool] = lambda error: isinstance(error, INFRASTRUCTURE),
    before_pause: Callable[[BaseException], None] = lambda error: None,
) -> tenacity.AsyncRetrying:
    """Attempts at a request: one and ``retries`` more, the last one's error raised.

    The pauses between them double from ``first_pause`` seconds up to 30 and are jittered. ``worth`` says of which
    errors another attempt may come out better; ``before_pause`` is called with each of those.
    """

    def note(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if error is not None:
            before_pause(error)

    return tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(worth),
        stop=tenacity.stop_after_attempt(retries + 1),
        wait=tenacity.wait_exponential(multiplier=first_pause, max=_MOST_PAUSE) + tenacity.wait_random(0, first_pause),
        before_sleep=note,
        reraise=True,
    )


class AsyncHttp:
    """Asynchronous requests. ``seconds`` bounds the wait for each answer.

    ``headers`` go with every request. Proxies of the environment are for the way out (``outside``); engines are on this
    machine or in this cluster. Every method raises the engine error for what went wrong.
    """

    def __init__(self, seconds: float, *, headers: Mapping[str, str] | None = None, outside: bool = False) -> None:
        self._seconds = seconds
        self._client = httpx.AsyncClient(
            timeout=_timeout(seconds),
            headers=headers,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=_IDLE_CONNECTIONS),
            trust_env=outside,
        )

    async def __aenter__(self) -> AsyncHttp:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections, also where the caller is cancelled. Idempotent."""
        await shielded(self._client.aclose())

    async def post(self, url: str, body: Mapping[str, Any], *, seconds: float | None = None) -> bytes:
        """POST ``body`` as JSON; the answer's bytes. ``seconds``: other than those of every request."""
        return check(await self.exchange(url, body, seconds=seconds)).content

    async def get(self, url: str) -> bytes:
        """GET ``url``; the answer's bytes."""
        with converted(url):
            return check(await self._client.get(url)).content

    async def get_json(self, url: str) -> dict[str, Any]:
        """GET a JSON object. Raises EngineRejected where the answer is none."""
        return json_object(await self.get(url), url)

    async def exchange(self, url: str, body: Mapping[str, Any], *, seconds: float | None = None) -> httpx.Response:
        """POST ``body`` as JSON; the response, whatever its status is."""
        with converted(url):
            return await self._client.post(
                url, content=_content(body), headers=_JSON_HEADERS, timeout=_timeout(seconds or self._seconds)
            )

    async def lines(self, url: str, body: Mapping[str, Any]) -> AsyncGenerator[str, None]:
        """POST ``body`` as JSON; the lines of a streamed answer as they come."""
        with converted(url):
            async with self._client.stream("POST", url, content=_content(body), headers=_JSON_HEADERS) as response:
                if not response.is_success:
                    await response.aread()
                async for line in check(response).aiter_lines():
                    yield line


class BlockingHttp:
    """Blocking requests to engines, from any thread. ``seconds`` bounds the wait for each answer.

    Every method raises the engine error for what went wrong.
    """

    def __init__(self, seconds: float) -> None:
        self._client = httpx.Client(timeout=_timeout(seconds), trust_env=False)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._client.close()

    def post(self, url: str, body: Mapping[str, Any]) -> bytes:
        """POST ``body`` as JSON; the answer's bytes."""
        with converted(url):
            return check(self._client.post(url, content=_content(body), headers=_JSON_HEADERS)).content

    def get_json(self, url: str) -> dict[str, Any]:
        """GET a JSON object. Raises EngineRejected where the answer is none."""
        with converted(url):
            response = check(self._client.get(url))
        return json_object(response.content, url)


@contextmanager
def converted(url: str) -> Iterator[None]:
    """Turn the HTTP library's errors into engine errors: the one place where it is done."""
    try:
        yield
    except httpx.InvalidURL as error:
        raise EngineRejected(f"{url}: no address of a server ({error})") from error
    except httpx.HTTPError as error:
        raise EngineUnreachable(f"{url}: no answer ({type(error).__name__}: {error or 'no details'})") from error


def timed_out(error: EngineUnreachable) -> bool:
    """Whether the server has the request, and did not answer it in time."""
    return isinstance(error.__cause__, httpx.ReadTimeout)


def check(response: httpx.Response) -> httpx.Response:
    """Return a 2xx ``response``; raise the engine error that its status means."""
    if response.is_success:
        return response
    where = f"{response.request.method} {response.request.url}"
    message = f"{where} answered {response.status_code}: {server_message(response.content)}"
    if response.status_code in _BUSY:
        raise EngineOverloaded(message)
    if response.is_client_error:
        raise EngineRejected(message)
    raise EngineUnreachable(message)


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


def _timeout(seconds: float) -> httpx.Timeout:
    return httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))
