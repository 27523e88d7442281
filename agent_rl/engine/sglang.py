"""The engine client: SGLang's native ``/generate``, token-in and token-out, with log-probs and routes.

What can fail and what is done about it::

    no answer, 5xx           EngineUnreachable   retried on the budget, on another engine where there is one
    429, 503                 EngineOverloaded    retried on the budget
    other 4xx                EngineRejected      never retried: the request is wrong
    aborted by the server    -                   the part that came, with finish ABORT: the caller may go on from there
    routes don't line up     RoutesMissingError  never retried: training on such routes would be wrong
    our caller is cancelled  -                   the request is aborted on the server, within a bound
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx
import tenacity

from agent_rl.aio import shielded
from agent_rl.config import EngineConfig
from agent_rl.engine.answer import Asked, read_answer, read_scores, split_body
from agent_rl.engine.homes import SessionHomes
from agent_rl.engine.http import get_json, post
from agent_rl.engine.types import Scores
from agent_rl.errors import EngineAborted, EngineOverloaded, EngineRejected, EngineUnreachable, RoutesMissingError
from agent_rl.model_facts import ModelFacts
from agent_rl.types import Completion, SamplingParams, TokenIds

_ABORT_SECONDS = 5.0
_CONTROL_SECONDS = 120.0
_INFRASTRUCTURE = (EngineUnreachable, EngineOverloaded, EngineAborted)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a server says of itself."""

    url: str
    model: str
    weight_version: str
    captures_routes: bool
    dtype: str
    max_total_tokens: int


_IDLE_CONNECTIONS = 16
"""Idle connections kept. For each of them httpcore 1.0 goes through all connections at every request: with 64 requests
in flight a thousand cost 8 ms of processor time a request, 16 cost 1.4 ms (tests/bench/bench_http.py)."""


class SGLangEngine:
    """Client of one or more SGLang servers that hold the same weights. Implements ``agent_rl.engine.types.Engine``.

    ``facts`` describe the model served. Of ``config``, ``request_timeout`` bounds one request and ``retries`` how often
    one that met an infrastructure failure is tried again. ``death`` is asked why a server that we launched is dead:
    once it answers, nothing is retried. Entering it as an async context manager checks that every engine captures
    routes (:meth:`check_capture`); leaving closes it.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        facts: ModelFacts,
        config: EngineConfig | None = None,
        *,
        death: Callable[[], str | None] = lambda: None,
        backoff: float = 0.5,
    ) -> None:
        config = config or EngineConfig()
        self.urls: tuple[str, ...] = tuple(
            url.rstrip("/") for url in ((urls,) if isinstance(urls, str) else tuple(urls))
        )
        self.facts = facts
        self._homes = SessionHomes(self.urls)
        self._retries = config.retries
        self._death = death
        self._backoff = backoff
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=_IDLE_CONNECTIONS)
        # Environment proxies are for the way out; engines are on this machine or in this cluster.
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(config.request_timeout, connect=10.0), limits=limits, trust_env=False
        )

    async def __aenter__(self) -> SGLangEngine:
        try:
            await self.resume()  # a trainer that was killed within a weight update left it paused
            await self.check_capture()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await shielded(self._client.aclose())

    def death(self) -> str | None:
        """Why the server that we launched is dead, in one line; None while it lives, or where it is not ours."""
        return self._death()

    def retire(self, url: str) -> None:
        """Use the engine at ``url`` no more. Raises ValueError where it is the last."""
        self._homes.retire(url)
        self.urls = tuple(each for each in self.urls if each != url)

    async def generate(
        self, tokens: TokenIds, sampling: SamplingParams, *, routes_from: int | None, session: str
    ) -> Completion:
        """Sample after ``tokens``; see :class:`agent_rl.engine.types.Engine`.

        ``max_new_tokens`` is lowered to what the model's context still holds. Log-probs are those of the distribution
        sampled from, temperature applied (raw at temperature 0), not renormalised for top-p or top-k. The model's own
        end-of-text token ends a turn too.
        """
        body = self._request(tokens, sampling, routes_from)
        async for attempt in self._attempts(session):
            with attempt:
                return await self._once(body, tokens, routes_from, session)
        raise AssertionError("unreachable: the last attempt re-raises")

    def _request(self, tokens: TokenIds, sampling: SamplingParams, routes_from: int | None) -> dict[str, Any]:
        room = self.facts.max_positions - len(tokens)
        if not tokens or room <= 0:
            raise EngineRejected(
                f"{len(tokens)} prompt tokens, expected between 1 and {self.facts.max_positions - 1} (the context)"
            )
        body: dict[str, Any] = {
            "input_ids": list(tokens),
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_new_tokens": min(sampling.max_new_tokens, room),
                "stop_token_ids": list(sampling.stop_token_ids),
            },
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        if routes_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": routes_from}
        return body

    def _attempts(self, session: str) -> tenacity.AsyncRetrying:
        def rehome(state: tenacity.RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            if isinstance(error, EngineUnreachable):
                self._homes.forget(session)

        return tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(self._worth_retrying),
            stop=tenacity.stop_after_attempt(self._retries + 1),
            wait=tenacity.wait_exponential(multiplier=self._backoff, max=30.0) + tenacity.wait_random(0, self._backoff),
            before_sleep=rehome,
            reraise=True,
        )

    def _worth_retrying(self, error: BaseException) -> bool:
        return isinstance(error, _INFRASTRUCTURE) and self._death() is None

    async def _once(
        self, body: Mapping[str, Any], tokens: TokenIds, routes_from: int | None, session: str
    ) -> Completion:
        rid = uuid.uuid4().hex
        with self._homes.visit(session) as url:
            asked = Asked(rid, session, url, len(tokens), routes_from, self.facts.layout)
            started = time.perf_counter()
            answer = await self._post(url, {"rid": rid, **body})
            return read_answer(answer, asked, time.perf_counter() - started)

    async def _post(self, url: str, body: Mapping[str, Any]) -> bytes:
        """POST to ``/generate``; whatever ends our waiting early also ends the request on the server."""
        try:
            return await post(self._client, f"{url}/generate", body)
        except asyncio.CancelledError:
            await shielded(self._abort(url, str(body["rid"])))
            raise
        except EngineUnreachable as error:
            reason = self._death()
            if reason is not None:
                raise EngineUnreachable(reason) from error
            if isinstance(error.__cause__, httpx.ReadTimeout):
                await self._abort(url, str(body["rid"]))
            raise

    async def _abort(self, url: str, rid: str) -> None:
        # A server that can't be told isn't running the request either, or ends it when the connection drops.
        with contextlib.suppress(httpx.HTTPError):
            await self._client.post(f"{url}/abort_request", json={"rid": rid}, timeout=_ABORT_SECONDS)

    async def abort_all(self) -> None:
        """Abort every request on every engine."""
        for url in self.urls:
            await post(self._client, f"{url}/abort_request", {"abort_all": True})

    async def score(self, tokens: TokenIds, *, url: str | None = None) -> tuple[float, ...]:
        """Teacher-forced log-prob of every token given those before it, 0 for the first, at temperature 1."""
        return (await self._scores(url or self.urls[0], tokens, "score")).logprobs

    async def rescore(self, tokens: TokenIds, *, session: str) -> Scores:
        """As :meth:`score`, on any of the engines, tried again like a turn; see :class:`agent_rl.engine.types.Scorer`.

        A sequence that fills the model's context is EngineRejected: SGLang wants room for a token after a prompt.
        """
        async for attempt in self._attempts(session):
            with attempt, self._homes.visit(session) as url:
                return await self._scores(url, tokens, session)
        raise AssertionError("unreachable: the last attempt re-raises")

    async def _scores(self, url: str, tokens: TokenIds, session: str) -> Scores:
        asked = Asked(uuid.uuid4().hex, session, url, len(tokens), None, None)
        body = {
            "rid": asked.rid,
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            # From token 0, which keeps SGLang from taking a prefix from its cache: for that it has no log-probs.
            "logprob_start_len": 0,
        }
        return read_scores(await self._post(url, body), tokens, asked, self.facts.vocab_size)

    async def info(self, url: str | None = None) -> EngineInfo:
        """What the server at ``url`` (the first by default) says of itself."""
        url = url or self.urls[0]
        said = await get_json(self._client, f"{url}/server_info")
        model = await get_json(self._client, f"{url}/model_info")
        return EngineInfo(
            url=url,
            model=str(said.get("model_path", "")),
            weight_version=str(model.get("weight_version", "")),
            captures_routes=bool(said.get("enable_return_routed_experts")),
            dtype=str(said.get("dtype", "")),
            max_total_tokens=int(said.get("max_total_num_tokens") or said.get("max_total_tokens") or 0),
        )

    async def check_capture(self) -> None:
        """Ask every engine for one token with routes. Raises RoutesMissingError where it does not capture them.

        The engine silently leaves the routes out when it was started without the flag, so this is found out by asking.
        """
        greedy = SamplingParams(temperature=0.0, max_new_tokens=1)
        for url in self.urls:
            asked = Asked(uuid.uuid4().hex, "capture probe", url, 2, 0, self.facts.layout)
            body = self._request((0, 1), greedy, 0)
            answer = await self._post(url, {"rid": asked.rid, **body})
            _, payload = split_body(answer, asked)
            if payload is None:
                raise RoutesMissingError(
                    f"{url}: the engine sends no routes: start it with --enable-return-routed-experts, or take the "
                    f"router away that drops them; `agent-rl r3 probe {url}` says which it is"
                )
            read_answer(answer, asked, 0.0)

    async def flush_cache(self) -> None:
        """Forget every cached prefix. Raises EngineRejected while requests are running."""
        await self._control("flush_cache", {})

    async def pause(self, mode: str = "retract") -> None:
        """Pause sampling; ``mode`` is SGLang's: ``abort``, ``in_place`` (keeps the cache) or ``retract``."""
        await self._control("pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on sampling after :meth:`pause`."""
        await self._control("continue_generation", {})

    async def _control(self, endpoint: str, body: Mapping[str, Any]) -> None:
        async with asyncio.timeout(_CONTROL_SECONDS):
            for url in self.urls:
                await post(self._client, f"{url}/{endpoint}", body)
