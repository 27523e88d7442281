"""Sends the probe's requests to a server and returns its raw responses, without validation or retries."""

from __future__ import annotations

import binascii
import math
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pybase64
from numpy.typing import NDArray

from agent_rl.engine.admission_checks import data_parallel_ranks
from agent_rl.errors import EngineRejected
from agent_rl.models.spec import ModelSpec
from agent_rl.utils.concurrency import shielded
from agent_rl.utils.http import AsyncHttp

Rows = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class RawResponse:
    """One response of ``/generate``.

    ``start``: the first row of routes requested. ``logprobs``: number of finite log-probs. ``payload_bytes``: size of
    the routes before base64, None if the key is absent, -1 if it is not base64. ``wire_TLK``: int32 ``[rows, layers,
    top_k]`` with dense layers; None if the bytes are not whole rows of that shape. ``dp_rank``: the data-parallel rank
    that it was sent to, None on a server with one. ``order``: its place among the responses, as they came.
    """

    prompt: tuple[int, ...]
    start: int
    tokens: tuple[int, ...]
    finish: str
    cached_tokens: int
    retractions: int
    logprobs: int
    weight_version: str
    payload_bytes: int | None
    wire_TLK: Rows | None
    dp_rank: int | None = None
    order: int = 0

    @property
    def rows_expected(self) -> int:
        return len(self.prompt) + len(self.tokens) - 1 - self.start


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What a server reports of itself. ``captures``: its flag for route capture, None if it reports none.
    ``dp_ranks``: data-parallel ranks, of attention or of whole replicas. ``chunk``: tokens of a prompt that it computes
    at once, ``cache``: tokens that its cache holds; 0 if unknown."""

    captures: bool | None = None
    dp_ranks: int = 1
    chunk: int = 0
    cache: int = 0

    @staticmethod
    def of(info: Mapping[str, Any]) -> ServerOptions:
        captures = info.get("enable_return_routed_experts")
        return ServerOptions(
            captures=None if captures is None else bool(captures),
            dp_ranks=data_parallel_ranks(info),
            chunk=int(info.get("chunked_prefill_size") or 0),
            cache=int(info.get("max_total_num_tokens") or 0),
        )


class ProbeClient:
    """Sends requests to one SGLang server. ``timeout`` limits each request, in seconds; ``requests`` counts those to
    ``/generate``. ``dp_ranks``: the server's data-parallel ranks, 1 until :meth:`query_info`.

    A context manager. All methods raise engine errors; EngineRejected also for a response that is not SGLang's.
    """

    def __init__(self, url: str, *, timeout: float, headers: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self.requests, self.dp_ranks, self._responses = 0, 1, 0
        self._http = AsyncHttp(timeout, headers=headers)

    async def __aenter__(self) -> ProbeClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.close()

    async def generate(
        self,
        prompt: Sequence[int],
        model_spec: ModelSpec,
        *,
        new_tokens: int,
        start: int = 0,
        temperature: float = 0.0,
        stop: Sequence[int] = (),
        dp_rank: int = 0,
        afresh: bool = False,
    ) -> RawResponse:
        """Sample ``new_tokens`` after ``prompt``, or up to one of the ``stop`` tokens; routes from row ``start`` on.
        ``afresh`` uses no cached prefix. ``dp_rank``: by default the first, so that requests share its cache."""
        body = self._body(prompt, new_tokens, start, temperature, stop, dp_rank)
        if afresh:
            body["extra_key"] = uuid.uuid4().hex  # prefixes are shared among requests of one key
        return self._read(body, await self._http.post(f"{self.url}/generate", body), model_spec)

    async def interrupt(
        self, prompt: Sequence[int], model_spec: ModelSpec, *, new_tokens: int, do: Callable[[str], Awaitable[None]]
    ) -> RawResponse:
        """Sample in a stream and call ``do`` with the request's id after its first token, on the last
        data-parallel rank; returns the last response."""
        body = self._body(prompt, new_tokens, 0, 0.0, (), self.dp_ranks - 1) | {"stream": True}
        called, last = False, b""
        async with aclosing(self._http.lines(f"{self.url}/generate", body)) as lines:
            async for line in lines:
                if not line.startswith("data: {"):
                    continue
                last = line.removeprefix("data: ").encode()
                if not called:
                    called = True
                    await do(body["rid"])
        return self._read(body, last, model_spec)

    def _body(
        self,
        prompt: Sequence[int],
        new_tokens: int,
        start: int,
        temperature: float,
        stop: Sequence[int],
        dp_rank: int,
    ) -> dict[str, Any]:
        """The body of a request. On a server with one rank ``dp_rank`` is left out."""
        self.requests += 1
        rank = {"routed_dp_rank": dp_rank} if self.dp_ranks > 1 else {}
        return _body(uuid.uuid4().hex, prompt, new_tokens, start, temperature, stop) | rank

    def _read(self, body: Mapping[str, Any], raw: bytes, model_spec: ModelSpec) -> RawResponse:
        self._responses += 1
        return _read(self.url, body, raw, model_spec, self._responses)

    async def abort(self, rid: str) -> None:
        """Abort a request."""
        await self._http.post(f"{self.url}/abort_request", {"rid": rid})

    async def retract(self) -> None:
        """Return every running request to the queue, then continue."""
        await self._http.post(f"{self.url}/pause_generation", {"mode": "retract"})
        # A paused server serves nobody: complete this even if cancelled.
        await shielded(self._http.post(f"{self.url}/continue_generation", {}))

    async def count_other_requests(self) -> int | None:
        """Number of running and waiting requests on the server; None if it does not report it."""
        try:
            loads = (await self._http.get_json(f"{self.url}/v1/loads"))["loads"]
            return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in loads)
        except (EngineRejected, KeyError, TypeError, ValueError):
            return None

    async def query_info(self) -> ServerOptions:
        """The server's options, and set :attr:`dp_ranks`; the defaults if it reports none (a router in front of it, for
        example)."""
        try:
            info = await self._http.get_json(f"{self.url}/server_info")
            options = ServerOptions.of(info)
        except (EngineRejected, TypeError, ValueError, AttributeError):
            options = ServerOptions()
        self.dp_ranks = options.dp_ranks
        return options

    async def model_path(self) -> str:
        """The server's model directory; empty if it reports none."""
        try:
            return str((await self._http.get_json(f"{self.url}/model_info")).get("model_path") or "")
        except (EngineRejected, ValueError):
            return ""


def _body(
    rid: str, prompt: Sequence[int], new_tokens: int, start: int, temperature: float, stop: Sequence[int]
) -> dict[str, Any]:
    sampling = {"max_new_tokens": new_tokens, "temperature": temperature, "stop_token_ids": list(stop)}
    return {
        "rid": rid,
        "input_ids": list(prompt),
        "sampling_params": sampling | {"ignore_eos": not stop},
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_routed_experts": True,
        "routed_experts_start_len": start,
    }


def _read(url: str, body: Mapping[str, Any], raw: bytes, model_spec: ModelSpec, order: int) -> RawResponse:
    try:
        response = orjson.loads(raw)
        meta = response["meta_info"]
        payload = meta.get("routed_experts")
        size, wire = _wire(payload, model_spec) if payload is not None else (None, None)
        entries = meta.get("output_token_logprobs") or ()
        return RawResponse(
            prompt=tuple(body["input_ids"]),
            start=int(body["routed_experts_start_len"]),
            tokens=tuple(response.get("output_ids") or ()),
            finish=str((meta.get("finish_reason") or {}).get("type")),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            retractions=int(meta.get("num_retractions") or 0),
            logprobs=sum(entry[0] is not None and math.isfinite(entry[0]) for entry in entries),
            weight_version=str(meta.get("weight_version") or ""),
            payload_bytes=size,
            wire_TLK=wire,
            dp_rank=body.get("routed_dp_rank"),
            order=order,
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise EngineRejected(f"{url}: not a response of SGLang's /generate ({error!r})") from None


def _wire(payload: str, model_spec: ModelSpec) -> tuple[int, NDArray[np.int32] | None]:
    try:
        raw = pybase64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        return -1, None
    layout = model_spec.layout
    if layout is None or len(raw) % layout.wire_bytes_per_row:
        return len(raw), None
    return len(raw), np.frombuffer(raw, dtype="<i4").reshape(-1, model_spec.num_layers, model_spec.top_k)
