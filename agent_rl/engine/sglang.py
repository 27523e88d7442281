"""The engine client: SGLang's native ``/generate``, token-in and token-out, with log-probs and routes.

What can fail and what is done about it::

    no answer, 5xx           EngineUnreachable   retried on the budget, on another engine where there is one
    unpublished weights      EngineStale         the same; that engine serves no more until it was published to
    no engine serves         EngineLost          after a wait for one that is being started, where one is
    429, 503                 EngineOverloaded    retried on the budget
    other 4xx                EngineRejected      never retried: the request is wrong
    aborted by the server    -                   the part that came, with finish ABORT: the caller may go on from there
    routes don't line up     RoutesMissingError  never retried: training on such routes would be wrong
    our caller is cancelled  -                   the request is aborted on the server, within a bound
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar

import numpy as np

from agent_rl.config import EngineConfig
from agent_rl.engine.fleet import Fleet
from agent_rl.engine.generation_gate import GenerationGate
from agent_rl.engine.response import Asked, read_answer, read_scores, split_body
from agent_rl.engine.session_affinity import SessionAffinity
from agent_rl.engine.sleep import EngineSleep
from agent_rl.engine.types import EngineInfo, Scores, Server
from agent_rl.engine.unsupported_args import refusal
from agent_rl.engine.utilization import EngineLoad
from agent_rl.errors import (
    EngineError,
    EngineLost,
    EngineRejected,
    EngineStale,
    EngineUnreachable,
    RoutesMissingError,
    UserError,
)
from agent_rl.models.spec import ModelSpec, difference, read_model_spec
from agent_rl.types import Completion, FinishReason, SamplingParams, TokenIds
from agent_rl.utils.concurrency import Pulse, shielded
from agent_rl.utils.http import AsyncHttp, retried, timed_out
from sandbox.timeouts import PausableTimeout

T = TypeVar("T")

_ABORT_SECONDS = 5.0
_CONTROL_SECONDS = 120.0
_LARGE = 1 << 20
"""Bytes of an answer from which on it is read on a thread: 1 MiB takes a millisecond or two."""


@dataclass(slots=True)
class _Tried:
    """The attempts at one request: the last engine, those that failed it, and whether one was late."""

    last: str = ""
    urls: list[str] = field(default_factory=list)
    late: bool = False


class SGLangEngine:
    """Client of one or more SGLang servers that hold the same weights. Implements ``agent_rl.engine.types.Engine``.

    ``facts`` describe the model served. Of ``config``, ``request_timeout`` bounds one request and ``retries`` how often
    one that met an infrastructure failure is tried again. Requests go to the engines that serve by ``fleet``; without
    one, to those at ``urls``. ``servers``: those of the fleet that are ours, by name, which can sleep. ``routes``:
    whether they will be asked for. Entering it as an async context manager checks every engine (:meth:`admit`); leaving
    closes it.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        facts: ModelSpec,
        config: EngineConfig | None = None,
        *,
        fleet: Fleet | None = None,
        servers: Mapping[str, Server] = MappingProxyType({}),
        routes: bool = True,
        backoff: float = 0.5,
    ) -> None:
        config = config or EngineConfig()
        self.fleet = fleet or _unattended((urls,) if isinstance(urls, str) else urls, config.restarts)
        self.facts, self._layout = facts, facts.layout
        self._routes = routes
        self.gate = GenerationGate(config.weight_sync_timeout)
        self.load = EngineLoad()
        self._turns = Pulse()
        self.fleet.listeners.append(lambda before, after: self._turns.give())
        self._homes = SessionAffinity()
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._common: dict[str, str] = {}
        self._retries = config.retries
        self._patience = config.start_timeout + config.weight_sync_timeout
        self._backoff = backoff
        self._http = AsyncHttp(config.request_timeout, headers=config.headers)
        self.sleep = EngineSleep(self.fleet, self.gate, servers, config, self._http)

    async def __aenter__(self) -> SGLangEngine:
        try:
            for url in self.urls:
                await self.admit(url)
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

    @property
    def urls(self) -> tuple[str, ...]:
        """The engines in use."""
        return self.fleet.in_use

    async def until(self, look: Callable[[Fleet], T]) -> T:
        """Wait until ``look`` finds something in the fleet, and return it. Raises EngineLost where none is left."""
        while not (found := look(self.fleet)):
            if (reason := self.fleet.lost) is not None:
                raise EngineLost(f"no engine is left: {reason}")
            await self._turns.wait()
        return found

    async def generate(
        self, tokens: TokenIds, sampling: SamplingParams, *, routes_from: int | None, session: str
    ) -> Completion:
        """Sample after ``tokens``; see :class:`agent_rl.engine.types.Engine`.

        ``max_new_tokens`` is lowered to what the model's context still holds. Log-probs are those of the distribution
        sampled from, temperature applied (raw at temperature 0), not renormalized for top-p or top-k. The model's own
        end-of-text token ends a turn too.
        """
        return await self._ask(self._request(tokens, sampling, routes_from), tokens, routes_from, session)

    async def prefill(self, tokens: TokenIds, *, session: str, afresh: bool) -> Completion:
        """Compute ``tokens``; see :class:`agent_rl.rollout.route_audit.Prefiller`. A sequence that fills the model's
        context is EngineRejected."""
        body = self._request(tokens, SamplingParams(temperature=0.0, max_new_tokens=1), 0)
        if afresh:
            body["extra_key"] = secrets.token_hex(16)  # prefixes are shared among requests of one key
        return await self._ask(body, tokens, 0, session)

    async def _ask(
        self, body: Mapping[str, Any], tokens: TokenIds, routes_from: int | None, session: str
    ) -> Completion:
        tried = _Tried()
        return await self._retried(tried, partial(self._once, body, tokens, routes_from, session, tried))

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

    async def _retried(self, tried: _Tried, attempt: Callable[[], Awaitable[T]]) -> T:
        return await retried(attempt, self._retries, self._backoff, before_pause=partial(self._note_failure, tried))

    def _note_failure(self, tried: _Tried, error: Exception) -> None:
        """What a failed attempt says of its engine, which is tried again only where there is no other."""
        if not isinstance(error, EngineUnreachable | EngineStale):
            return
        # One that only was late holds the session's prefix: it gets a second chance.
        if isinstance(error, EngineUnreachable):
            if timed_out(error) and not tried.late:
                tried.late = True
                return
            self.fleet.failed(tried.last, str(error))
        tried.urls.append(tried.last)

    @asynccontextmanager
    async def _visit(self, session: str, tried: _Tried) -> AsyncIterator[str]:
        """The session's engine, once the gate is open and it runs one request less than it can: so time-outs count
        neither its queue nor a weight update."""
        while True:
            candidates = await self._candidates(tried)
            with self._homes.visit(session, candidates) as url:
                async with self._slots.get(url) or nullcontext():
                    await self.gate.opened()
                    if url in self.fleet.candidates(tried.urls):
                        tried.last = url
                        with self.load.running(url):
                            yield url
                        return

    async def _candidates(self, tried: _Tried) -> tuple[str, ...]:
        """Engines for a request; waits for one that is being started or published to, and no time passes while the gate
        is closed: engines that died asleep are started when the others wake."""
        if found := self.fleet.candidates(tried.urls):
            return found
        try:
            async with PausableTimeout(self._patience) as limit:
                with self.gate.uncharged(limit):
                    return await self.until(lambda fleet: fleet.candidates(tried.urls))
        except TimeoutError:
            raise EngineLost(f"no engine came into use within {self._patience:g} s") from None

    async def _once(
        self, body: Mapping[str, Any], tokens: TokenIds, routes_from: int | None, session: str, tried: _Tried
    ) -> Completion:
        rid, prompt_tokens = secrets.token_hex(16), len(tokens)
        started = time.perf_counter()
        async with self._visit(session, tried) as url:
            asked, floor = Asked(rid, session, url, prompt_tokens, routes_from, self._layout), self.fleet.floor
            with self.gate.passing(partial(self._abort, url, rid)) as passage:
                answer = await self._post(url, {"rid": rid, **body})
        read = partial(read_answer, answer, asked, time.perf_counter() - started)
        completion = await asyncio.to_thread(read) if len(answer) > _LARGE else read()
        if completion.tokens:
            self._check_version(asked, completion.weight_version, floor)
        return self._noted(completion, prompt_tokens) if passage.cut else completion

    def _noted(self, completion: Completion, prompt_tokens: int) -> Completion:
        """``completion``, told to be cut unless it had just ended by itself."""
        if completion.finish is not FinishReason.ABORT:
            return completion
        self.gate.note_interrupted(prompt_tokens + len(completion.tokens))
        return replace(completion, cut=True)

    def _check_version(self, asked: Asked, version: str, floor: int) -> None:
        """Raise EngineStale for an answer from other weights than were published since the request began."""
        if not self.fleet.accepts(version, floor):
            self.fleet.stale(asked.url, version)
            raise EngineStale(f"{asked}: answered from weights {version!r}, which are not the published ones")
        if (member := self.fleet.find(asked.url)) is not None:
            self.fleet.answered(member.name)

    async def _post(self, url: str, body: Mapping[str, Any]) -> bytes:
        """POST to ``/generate``; whatever ends our waiting early also ends the request on the server."""
        try:
            return await self._http.post(f"{url}/generate", body)
        except asyncio.CancelledError:
            await shielded(self._abort(url, str(body["rid"])))
            raise
        except EngineUnreachable as error:
            if timed_out(error):
                await self._abort(url, str(body["rid"]))
            raise

    async def _abort(self, url: str, rid: str) -> None:
        # A server that can't be reached isn't running the request either, or ends it when the connection drops.
        with contextlib.suppress(EngineError):
            await self._http.post(f"{url}/abort_request", {"rid": rid}, seconds=_ABORT_SECONDS)

    async def score(self, tokens: TokenIds, *, url: str | None = None) -> tuple[float, ...]:
        """Teacher-forced log-prob of every token given those before it, 0 for the first, at temperature 1."""
        return (await self._scores(url or self.urls[0], tokens, "score"))[1].logprobs

    async def rescore(self, tokens: TokenIds, *, session: str, routes: bool = False) -> Scores:
        """As :meth:`score`, on any of the engines, tried again like a turn; see :class:`agent_rl.engine.types.Scorer`.
        With ``routes`` also the experts of that pass.

        A sequence that fills the model's context is EngineRejected: SGLang wants room for a token after a prompt.
        """
        tried = _Tried()

        async def attempt() -> Scores:
            async with self._visit(session, tried) as url:
                floor = self.fleet.floor
                asked, scores = await self._scores(url, tokens, session, routes=routes)
            self._check_version(asked, scores.weight_version, floor)
            return scores

        return await self._retried(tried, attempt)

    async def _scores(self, url: str, tokens: TokenIds, session: str, *, routes: bool = False) -> tuple[Asked, Scores]:
        wanted = {"return_routed_experts": True, "routed_experts_start_len": 0} if routes else {}
        asked = Asked(secrets.token_hex(16), session, url, len(tokens), 0 if routes else None, self._layout)
        body = {
            "rid": asked.rid,
            "input_ids": np.array(tokens, np.int32),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            # From token 0, which keeps SGLang from taking a prefix from its cache: for that it has no log-probs.
            "logprob_start_len": 0,
            **wanted,
        }
        return asked, read_scores(await self._post(url, body), tokens, asked, self.facts.vocab_size)

    async def lives(self, url: str) -> bool:
        """Whether the server at ``url`` says which model it serves, within seconds."""
        try:
            async with asyncio.timeout(_ABORT_SECONDS):
                await self._http.get(f"{url}/model_info")
        except (EngineError, TimeoutError):
            return False
        return True

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
            kv_dtype=str(server.get("kv_cache_dtype", "")),
            max_total_tokens=int(server.get("max_total_num_tokens") or server.get("max_total_tokens") or 0),
        )

    async def admit(self, url: str) -> None:
        """Check the engine at ``url`` before it is used: its options, its model, and that it captures routes,
        where these will be asked for.

        Raises UserError for options that give wrong routes or keep old weights, for another model, and for another
        tokenizer or release of SGLang than those of the engines before it; RoutesMissingError where no routes come. The
        engine silently leaves the routes out when it was started without the flag: so it is asked for some.
        """
        await self._refuse_options(url)
        await self._refuse_model(url)
        # A trainer that was killed within a weight update left it paused.
        await self._http.post(f"{url}/continue_generation", {}, seconds=_CONTROL_SECONDS)
        if self._routes:
            await self._check_capture(url)
        await self._read_limit(url)

    async def _check_capture(self, url: str) -> None:
        asked = Asked(secrets.token_hex(16), "capture probe", url, 2, 0, self._layout)
        body = self._request((0, 1), SamplingParams(temperature=0.0, max_new_tokens=1), 0)
        answer = await self._post(url, {"rid": asked.rid, **body})
        _, payload = split_body(answer, asked)
        if payload is None:
            raise RoutesMissingError(
                f"{url}: the engine sends no routes: start it with --enable-return-routed-experts, or take the "
                f"router away that drops them; `agent-rl r3 probe {url}` says which it is"
            )
        try:
            read_answer(answer, asked, 0.0)
        except RoutesMissingError as error:
            raise UserError(
                f"the engine at {url} serves another model than the config's, or gives wrong routes: {error}"
            ) from None

    async def _refuse_options(self, url: str) -> None:
        try:
            info = await self._http.get_json(f"{url}/server_info")
        except EngineRejected:
            return  # a router in front of it, perhaps: the probe and each answer's checks remain
        if (reason := refusal(info, routes=self._routes)) is not None:
            raise UserError(f"the engine at {url} was started with {reason}")
        self._refuse_mixed(url, "SGLang", str(info.get("version") or ""))

    async def _refuse_model(self, url: str) -> None:
        try:
            info = await self._http.get_json(f"{url}/model_info")
        except EngineRejected:
            return
        kind, directory = info.get("model_type"), Path(str(info.get("tokenizer_path") or ""))
        if kind not in (None, self.facts.kind):
            raise UserError(f"the engine at {url} serves a {kind}, and the config's model is a {self.facts.kind}")
        if (directory / "config.json").is_file() and (
            found := difference(self.facts, read_model_spec(directory))
        ) is not None:
            raise UserError(
                f"the engine at {url} serves {directory}, which is another model than the config's: it has {found}"
            )
        self._refuse_mixed(url, "the tokenizer", directory.name)

    def _refuse_mixed(self, url: str, what: str, value: str) -> None:
        """Raise UserError where an engine has another ``what`` than those before it; one may not tell (empty)."""
        if value and (common := self._common.setdefault(what, value)) != value:
            raise UserError(f"the engine at {url} has {what} {value}, and those before it {common}: make them alike")

    async def _read_limit(self, url: str) -> None:
        """How many requests it runs at once, which is how many it is sent; no limit where it does not tell."""
        most = 0
        with contextlib.suppress(EngineError, KeyError, TypeError, ValueError):
            loads = (await self._http.get_json(f"{url}/v1/loads"))["loads"]
            most = sum(int(load["max_running_requests"]) for load in loads)
        if most > 0:
            self._slots[url] = asyncio.Semaphore(most)
        self.load.add(url, most)


def _unattended(urls: Sequence[str], restarts: int) -> Fleet:
    """Engines that are taken to serve, whose health nobody looks after."""
    fleet = Fleet(restarts)
    for url in (each.rstrip("/") for each in urls):
        fleet.add(url)
        fleet.up(url, url)
        fleet.admitted(url)
    return fleet
