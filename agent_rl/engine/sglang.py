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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import tenacity

from agent_rl.aio import shielded
from agent_rl.config import EngineConfig
from agent_rl.engine.answer import Asked, read_answer, read_scores, split_body
from agent_rl.engine.homes import SessionHomes
from agent_rl.engine.http import INFRASTRUCTURE, AsyncHttp, retrying, timed_out
from agent_rl.engine.options import refusal
from agent_rl.engine.types import EngineInfo, Scores
from agent_rl.errors import EngineError, EngineRejected, EngineUnreachable, RoutesMissingError, UserError
from agent_rl.model_facts import ModelFacts
from agent_rl.types import Completion, SamplingParams, TokenIds

_ABORT_SECONDS = 5.0
_CONTROL_SECONDS = 120.0
_LARGE = 1 << 20
"""Bytes of an answer from which on it is read on a thread: 1 MiB takes a millisecond or two."""


class SGLangEngine:
    """Client of one or more SGLang servers that hold the same weights. Implements ``agent_rl.engine.types.Engine``.

    ``facts`` describe the model served. Of ``config``, ``request_timeout`` bounds one request and ``retries`` how often
    one that met an infrastructure failure is tried again. ``death`` is asked why a server that we launched is dead:
    once it answers, nothing is retried. Entering it as an async context manager refuses servers with options that
    do harm (:mod:`.options`) and, where ``routes`` will be asked for, checks that every engine captures them
    (:meth:`check_capture`); leaving closes it.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        facts: ModelFacts,
        config: EngineConfig | None = None,
        *,
        death: Callable[[], str | None] = lambda: None,
        routes: bool = True,
        backoff: float = 0.5,
    ) -> None:
        config = config or EngineConfig()
        self.urls: tuple[str, ...] = tuple(
            url.rstrip("/") for url in ((urls,) if isinstance(urls, str) else tuple(urls))
        )
        self.facts = facts
        self._routes = routes
        self._homes = SessionHomes(self.urls)
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._retries = config.retries
        self._death = death
        self._backoff = backoff
        self._http = AsyncHttp(config.request_timeout)

    async def __aenter__(self) -> SGLangEngine:
        try:
            await self._refuse_options()
            await self.resume()  # a trainer that was killed within a weight update left it paused
            if self._routes:
                await self.check_capture()
            await self._read_limits()
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
        await self._http.close()

    def death(self) -> str | None:
        """Why the server that we launched is dead, in one line; None while it lives, or where we launched none."""
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
        return await self._ask(self._request(tokens, sampling, routes_from), tokens, routes_from, session)

    async def prefill(self, tokens: TokenIds, *, session: str, afresh: bool) -> Completion:
        """Compute ``tokens``; see :class:`agent_rl.rollout.audit.Prefiller`. A sequence that fills the model's context
        is EngineRejected."""
        body = self._request(tokens, SamplingParams(temperature=0.0, max_new_tokens=1), 0)
        if afresh:
            body["extra_key"] = uuid.uuid4().hex  # prefixes are shared among requests of one key
        return await self._ask(body, tokens, 0, session)

    async def _ask(
        self, body: Mapping[str, Any], tokens: TokenIds, routes_from: int | None, session: str
    ) -> Completion:
        async for attempt in self._attempts(session):
            with attempt:
                return await self._once(body, tokens, routes_from, session)
        raise AssertionError("unreachable: the last attempt re-raises")

    def _request(self, tokens: TokenIds, sampling: SamplingParams, routes_from: int | None) -> dict[str, Any]:
        room = self.facts.max_positions - len(tokens)
        if not len(tokens) or room <= 0:
            raise EngineRejected(
                f"{len(tokens)} prompt tokens, expected between 1 and {self.facts.max_positions - 1} (the context)"
            )
        body: dict[str, Any] = {
            "input_ids": np.array(tokens, np.int32),
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
        late = False

        def rehome(error: BaseException) -> None:
            nonlocal late
            if not isinstance(error, EngineUnreachable):
                return
            # One that only was late holds the session's prefix: it gets a second chance.
            if timed_out(error) and not late:
                late = True
                return
            self._homes.failed(session)

        return retrying(self._retries, self._backoff, worth=self._worth_retrying, before_pause=rehome)

    def _worth_retrying(self, error: BaseException) -> bool:
        return isinstance(error, INFRASTRUCTURE) and self._death() is None

    @asynccontextmanager
    async def _visit(self, session: str) -> AsyncIterator[str]:
        """The session's engine, once it runs one request less than it can: so time-outs don't count its queue."""
        with self._homes.visit(session) as url:
            async with self._slots.get(url) or nullcontext():
                yield url

    async def _once(
        self, body: Mapping[str, Any], tokens: TokenIds, routes_from: int | None, session: str
    ) -> Completion:
        rid, prompt_tokens = uuid.uuid4().hex, len(tokens)
        started = time.perf_counter()
        async with self._visit(session) as url:
            asked = Asked(rid, session, url, prompt_tokens, routes_from, self.facts.layout)
            answer = await self._post(url, {"rid": rid, **body})
        read = partial(read_answer, answer, asked, time.perf_counter() - started)
        return await asyncio.to_thread(read) if len(answer) > _LARGE else read()

    async def _post(self, url: str, body: Mapping[str, Any]) -> bytes:
        """POST to ``/generate``; whatever ends our waiting early also ends the request on the server."""
        try:
            answer = await self._http.post(f"{url}/generate", body)
            self._homes.answered(url)
            return answer
        except asyncio.CancelledError:
            await shielded(self._abort(url, str(body["rid"])))
            raise
        except EngineUnreachable as error:
            reason = self._death()
            if reason is not None:
                raise EngineUnreachable(reason) from error
            if timed_out(error):
                await self._abort(url, str(body["rid"]))
            raise

    async def _abort(self, url: str, rid: str) -> None:
        # A server that can't be reached isn't running the request either, or ends it when the connection drops.
        with contextlib.suppress(EngineError):
            await self._http.post(f"{url}/abort_request", {"rid": rid}, seconds=_ABORT_SECONDS)

    async def score(self, tokens: TokenIds, *, url: str | None = None) -> tuple[float, ...]:
        """Teacher-forced log-prob of every token given those before it, 0 for the first, at temperature 1."""
        return (await self._scores(url or self.urls[0], tokens, "score")).logprobs

    async def rescore(self, tokens: TokenIds, *, session: str) -> Scores:
        """As :meth:`score`, on any of the engines, tried again like a turn; see :class:`agent_rl.engine.types.Scorer`.

        A sequence that fills the model's context is EngineRejected: SGLang wants room for a token after a prompt.
        """
        async for attempt in self._attempts(session):
            with attempt:
                async with self._visit(session) as url:
                    return await self._scores(url, tokens, session)
        raise AssertionError("unreachable: the last attempt re-raises")

    async def _scores(self, url: str, tokens: TokenIds, session: str) -> Scores:
        asked = Asked(uuid.uuid4().hex, session, url, len(tokens), None, None)
        body = {
            "rid": asked.rid,
            "input_ids": np.array(tokens, np.int32),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            # From token 0, which keeps SGLang from taking a prefix from its cache: for that it has no log-probs.
            "logprob_start_len": 0,
        }
        return read_scores(await self._post(url, body), tokens, asked, self.facts.vocab_size)

    async def info(self, url: str | None = None) -> EngineInfo:
        """What the server at ``url`` (the first by default) says of itself."""
        url = url or self.urls[0]
        server = await self._http.get_json(f"{url}/server_info")
        model = await self._http.get_json(f"{url}/model_info")
        return EngineInfo(
            url=url,
            model=str(server.get("model_path", "")),
            weight_version=str(model.get("weight_version", "")),
            captures_routes=bool(server.get("enable_return_routed_experts")),
            dtype=str(server.get("dtype", "")),
            max_total_tokens=int(server.get("max_total_num_tokens") or server.get("max_total_tokens") or 0),
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

    async def _refuse_options(self) -> None:
        """Raise UserError for servers started in a way that gives wrong routes or keeps old weights."""
        for url in self.urls:
            try:
                reason = refusal(await self._http.get_json(f"{url}/server_info"), routes=self._routes)
            except EngineRejected:
                continue  # a router in front of it, perhaps: the probe and each answer's checks remain
            if reason is not None:
                raise UserError(f"the engine at {url} was started with {reason}")

    async def _read_limits(self) -> None:
        """How many requests each engine runs at once, which is how many it is sent; no limit where it does not tell."""
        for url in self.urls:
            with contextlib.suppress(EngineError, KeyError, TypeError, ValueError):
                loads = (await self._http.get_json(f"{url}/v1/loads"))["loads"]
                most = sum(int(load["max_running_requests"]) for load in loads)
                if most > 0:
                    self._slots[url] = asyncio.Semaphore(most)

    async def resume(self) -> None:
        """Let every engine go on sampling, were it paused."""
        for url in self.urls:
            await self._http.post(f"{url}/continue_generation", {}, seconds=_CONTROL_SECONDS)
