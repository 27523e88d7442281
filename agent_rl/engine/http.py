"""One place where HTTP trouble becomes an engine error, so that callers can tell what is worth a retry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import orjson

from agent_rl.errors import EngineError, EngineOverloaded, EngineRejected, EngineUnreachable

_BUSY = (429, 503)


def check(response: httpx.Response) -> httpx.Response:
    """Return a 2xx ``response``; raise the engine error that its status means."""
    if response.is_success:
        return response
    where = f"{response.request.method} {response.request.url}"
    said = f"{where} answered {response.status_code}: {server_message(response.content)}"
    if response.status_code in _BUSY:
        raise EngineOverloaded(said)
    if response.is_client_error:
        raise EngineRejected(said)
    raise EngineUnreachable(said)


def unreachable(error: httpx.HTTPError, url: str) -> EngineError:
    """The engine error for a request that got no answer."""
    return EngineUnreachable(f"{url}: {type(error).__name__}: {error or 'no details'}")


def server_message(body: bytes) -> str:
    """What the server said was wrong, in one line, from any of the shapes SGLang answers errors in."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return " ".join(body.decode(errors="replace").split())[:500] or "nothing"
    if isinstance(data, Mapping):
        data = data.get("error", data.get("message", data.get("detail", data)))
    if isinstance(data, Mapping):
        data = data.get("message", data)
    return " ".join(str(data).split())[:500]


async def post(client: httpx.AsyncClient, url: str, body: Mapping[str, Any]) -> bytes:
    """POST ``body`` as JSON and return the answer's bytes. Raises the engine error for whatever went wrong."""
    try:
        response = await client.post(
            url, content=orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY), headers=_JSON_HEADERS
        )
    except httpx.TransportError as error:
        raise unreachable(error, url) from error
    return check(response).content


async def get_json(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """GET a JSON object. Raises the engine error for whatever went wrong."""
    try:
        response = await client.get(url)
    except httpx.TransportError as error:
        raise unreachable(error, url) from error
    data = orjson.loads(check(response).content)
    if not isinstance(data, dict):
        raise EngineRejected(f"{url} answered a {type(data).__name__}, expected an object")
    return data


_JSON_HEADERS = {"content-type": "application/json"}
"""orjson writes the body: the client's own encoder takes several times as long on lists of token ids."""
