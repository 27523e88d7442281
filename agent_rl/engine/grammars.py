"""Converts the form of a reply to a grammar, on the engine that will sample it (``server/grammars.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from agent_rl.engine.routing import RequestRouter
from agent_rl.engine.types import Constraining, Engine
from agent_rl.errors import EngineRejected, GrammarRefused, GrammarsUnsupported
from agent_rl.utils.http import AsyncHttp, check, json_object

_CACHED = 256
"""Grammars that are kept: a program uses the same few for all its requests."""
MAX_BYTES = 1 << 20
"""Maximum bytes of a form: a hundred tools with long schemas take half of it."""


async def convert(engine: Engine, form: Mapping[str, Any]) -> str:
    """See :meth:`agent_rl.engine.types.Constraining.grammar`. Raises GrammarsUnsupported if ``engine`` is no such."""
    if not isinstance(engine, Constraining):
        raise GrammarsUnsupported("this engine cannot constrain a reply")
    return await engine.grammar(form)


class Grammars:
    """The grammars of the engines behind ``router``, by their forms."""

    def __init__(self, http: AsyncHttp, router: RequestRouter) -> None:
        self._http, self._router = http, router
        self._known: dict[bytes, str] = {}

    async def convert(self, form: Mapping[str, Any]) -> str:
        """See :meth:`agent_rl.engine.types.Constraining.grammar`."""
        key = orjson.dumps(form)
        if len(key) > MAX_BYTES:
            raise GrammarRefused(f"{len(key)} bytes of schemas, expected at most {MAX_BYTES}")
        if (known := self._known.get(key)) is None:
            known = await self._router.send("grammar", lambda url: self._request(url, form), _unchanged)
            while len(self._known) >= _CACHED:
                del self._known[next(iter(self._known))]
            self._known[key] = known
        return known

    async def _request(self, url: str, form: Mapping[str, Any]) -> str:
        response = await self._http.exchange(f"{url}/grammar", {"format": form})
        if response.status == 404:
            raise GrammarsUnsupported(f"the engine at {url} cannot constrain a reply; omit engine.urls to launch one")
        if response.status == 400:
            raise GrammarRefused(str(json_object(response.content, url).get("error")))
        text = json_object(check(response).content, url).get("ebnf")
        if not isinstance(text, str):
            raise EngineRejected(f"{url}/grammar: no grammar in its response")
        return text


async def _unchanged(grammar: str, seconds: float) -> tuple[str, None]:
    return grammar, None
