"""The engine client: SGLang's native ``/generate``, token-in and token-out, with log-probs and routes.

A request's way: :class:`SGLangEngine` builds the body and reads the response, :mod:`agent_rl.engine.routing` picks the
engine and retries, :mod:`agent_rl.engine.fleet` says which engines serve. Besides the errors that routing retries::

    other 4xx                EngineRejected      never retried: the request is wrong
    routes don't line up     RoutesMissingError  never retried: training on such routes would be wrong
    aborted by the server    -                   the part that came, with finish ABORT: the caller may continue from it
    our caller is cancelled  -                   the request is aborted on the server, within 5 s
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from agent_rl.config import EngineConfig
from agent_rl.engine.admission_checks import AdmissionChecks, responds
from agent_rl.engine.fleet import Fleet
from agent_rl.engine.generation_gate import GenerationGate, InFlightRequest
from agent_rl.engine.grammars import Grammars
from agent_rl.engine.request import abort, generate_body, post_generate, score_body
from agent_rl.engine.response import RequestContext, read_completion, read_scores
from agent_rl.engine.routing import RequestRouter
from agent_rl.engine.sleep import EngineSleep
from agent_rl.engine.types import EngineInfo, Scores, Server
from agent_rl.engine.utilization import EngineUtilization
from agent_rl.models.spec import ModelSpec
from agent_rl.types import Completion, FinishReason, SamplingParams, TokenIds
from agent_rl.utils.http import AsyncHttp

_LARGE_BYTES = 1 << 20
"""A response of this size or more is parsed on a thread: 1 MiB takes a millisecond or two."""


@dataclass(frozen=True, slots=True)
class _Response:
    """A response to ``/generate``, the request it belongs to, and whether that was interrupted."""

    body: bytes
    context: RequestContext
    request: InFlightRequest


class SGLangEngine:
    """Client of one or more SGLang servers that hold the same weights. Implements ``agent_rl.engine.types.Engine``.

    ``model_spec`` is the model served. Of ``config``, ``request_timeout`` bounds one HTTP request and ``retries`` is
    the budget of a failed one. Requests go to the engines that serve by ``fleet``; without one, to those at ``urls``.
    ``servers``: the fleet's engines that are our own processes, by name; they can sleep. ``routes``, ``masks``: whether
    requests will ask for routes and for kept tokens. As an async context manager it checks every engine and closes the
    connections.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        model_spec: ModelSpec,
        config: EngineConfig | None = None,
        *,
        fleet: Fleet | None = None,
        servers: Mapping[str, Server] = MappingProxyType({}),
        routes: bool = True,
        masks: bool = False,
        backoff: float = 0.5,
    ) -> None:
        config = config or EngineConfig()
        self.fleet = fleet or _unsupervised((urls,) if isinstance(urls, str) else urls, config.restarts)
        self.model_spec = model_spec
        self.gate = GenerationGate(config.weight_sync_timeout)
        self._http = AsyncHttp(config.request_timeout, headers=config.headers)
        self._router = RequestRouter(self.fleet, self.gate, config, backoff=backoff)
        self._grammars = Grammars(self._http, self._router)
        self.admission = AdmissionChecks(model_spec, self._http, self._router, routes=routes, masks=masks)
        self.sleep = EngineSleep(self.fleet, self.gate, servers, config, self._http)

    async def __aenter__(self) -> SGLangEngine:
        try:
            for url in self.urls:
                await self.admission.admit(url)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._http.close()

    @property
    def urls(self) -> tuple[str, ...]:
        """The engines in use."""
        return self.fleet.in_use

    @property
    def load(self) -> EngineUtilization:
        """The running requests per engine."""
        return self._router.load

    async def generate(
        self, tokens: TokenIds, sampling: SamplingParams, *, routes_from: int | None, session: str
    ) -> Completion:
        """Sample after ``tokens``; see :class:`agent_rl.engine.types.Engine`.

        ``max_new_tokens`` is lowered to what the model's context still holds. Log-probs are those of the distribution
        sampled from, temperature applied (raw at temperature 0); normalized over the kept tokens only with
        ``keep_mask``. The model's own end-of-text token ends a turn too.
        """
        body = generate_body(tokens, sampling, routes_from, max_positions=self.model_spec.max_positions)
        return await self._sample(body, tokens, routes_from, session)

    async def grammar(self, form: Mapping[str, Any]) -> str:
        """See :meth:`agent_rl.engine.types.Constraining.grammar`."""
        return await self._grammars.convert(form)

    async def prefill(self, tokens: TokenIds, *, session: str, afresh: bool) -> Completion:
        """The routes of ``tokens`` (one token is sampled after them). ``afresh`` uses no cached prefix. Raises
        EngineRejected for a sequence that fills the model's context, and other engine errors once the retry budget is
        spent."""
        sampling = SamplingParams(temperature=0.0, max_new_tokens=1)
        body = generate_body(tokens, sampling, 0, max_positions=self.model_spec.max_positions)
        if afresh:
            body["extra_key"] = secrets.token_hex(16)  # prefixes are shared among requests of one key
        return await self._sample(body, tokens, 0, session)

    async def _sample(
        self, body: Mapping[str, Any], tokens: TokenIds, routes_from: int | None, session: str
    ) -> Completion:
        async def post(url: str) -> _Response:
            context = self._context(url, session, tokens, routes_from, masks="return_sampling_mask" in body)
            placed = {**body, **self.admission.placement(url, session)}
            with self.gate.in_flight(partial(abort, self._http, url, context.rid)) as request:
                return _Response(await post_generate(self._http, url, context.rid, placed), context, request)

        async def read(response: _Response, seconds: float) -> tuple[tuple[Completion, bool], str | None]:
            parse = partial(read_completion, response.body, response.context, seconds)
            completion = await asyncio.to_thread(parse) if len(response.body) > _LARGE_BYTES else parse()
            return (completion, response.request.interrupted), completion.weight_version if completion.tokens else None

        completion, interrupted = await self._router.send(session, post, read)
        if not interrupted or completion.finish is not FinishReason.ABORT:  # it had just ended by itself
            return completion
        self.gate.record_interrupted(len(tokens) + len(completion.tokens))
        return replace(completion, interrupted=True)

    def _context(
        self, url: str, session: str, tokens: TokenIds, routes_from: int | None, *, masks: bool = False
    ) -> RequestContext:
        rid, vocab_size = secrets.token_hex(16), self.model_spec.vocab_size if masks else None
        return RequestContext(rid, session, url, len(tokens), routes_from, self.model_spec.layout, vocab_size)

    async def score(self, tokens: TokenIds, *, url: str | None = None) -> tuple[float, ...]:
        """Teacher-forced log-prob of every token given those before it, 0 for the first, at temperature 1, by the
        engine at ``url`` (the first in use by default)."""
        return (await self.scores(tokens, url=url or self.urls[0])).logprobs

    async def scores(self, tokens: TokenIds, *, url: str, routes: bool = False) -> Scores:
        """As :meth:`score`, with ``routes`` also the experts of that pass."""
        return await self._scores(url, tokens, "score", routes=routes)

    async def rescore(self, tokens: TokenIds, *, session: str, routes: bool = False, top: int = 0) -> Scores:
        """As :meth:`score`, on any engine, with retries and without a cached prefix. ``session`` distributes
        evaluations over engines. ``routes``: also return the experts of that pass. ``top``: also return so many of the
        most likely tokens in place of each token.

        Raises EngineRejected for a sequence that fills the model's context: SGLang needs a free token after a prompt.
        """

        async def post(url: str) -> Scores:
            return await self._scores(url, tokens, session, routes=routes, top=top)

        async def read(scores: Scores, seconds: float) -> tuple[Scores, str]:
            return scores, scores.weight_version

        return await self._router.send(session, post, read)

    async def _scores(
        self, url: str, tokens: TokenIds, session: str, *, routes: bool = False, top: int = 0
    ) -> Scores:  # fmt: skip
        context = self._context(url, session, tokens, 0 if routes else None)
        body = await post_generate(self._http, url, context.rid, score_body(tokens, routes=routes, top=top))
        return read_scores(body, tokens, context, self.model_spec.vocab_size, top)

    async def lives(self, url: str) -> bool:
        """Whether the server at ``url`` responds within 5 s."""
        return await responds(self._http, url)

    async def info(self, url: str | None = None) -> EngineInfo:
        """What the server at ``url`` (the first in use by default) reports about itself."""
        url = url or self.urls[0]
        server = await self._http.get_json(f"{url}/server_info")
        model = await self._http.get_json(f"{url}/model_info")
        return EngineInfo(
            url=url,
            model=str(server.get("model_path", "")),
            weight_version=str(model.get("weight_version", "")),
            captures_routes=bool(server.get("enable_return_routed_experts")),
            dtype=str(server.get("dtype", "")),
            kv_dtype=str(server.get("kv_cache_dtype", "")),
            max_total_tokens=int(server.get("max_total_num_tokens") or server.get("max_total_tokens") or 0),
        )


def _unsupervised(urls: Sequence[str], restarts: int) -> Fleet:
    """Engines that are assumed to serve and have no supervisor."""
    fleet = Fleet(restarts)
    for url in (each.rstrip("/") for each in urls):
        fleet.add(url)
        fleet.up(url, url)
        fleet.admitted(url)
    return fleet
