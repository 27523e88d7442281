"""A server's answers as they were sent: taken apart, nothing refused, nothing retried. What the probe looks at."""

from __future__ import annotations

import binascii
import math
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import orjson
import pybase64
from numpy.typing import NDArray

from agent_rl.errors import EngineRejected
from agent_rl.models.spec import ModelSpec
from agent_rl.utils.concurrency import shielded
from agent_rl.utils.http import AsyncHttp


@dataclass(frozen=True, slots=True, eq=False)
class RawAnswer:
    """One answer to ``/generate``.

    ``start``: the first row of routes asked for. ``logprobs``: how many finite log-probs came. ``payload_bytes``: of
    the routes before base64, None where the key is absent, -1 where it is not base64. ``wire_TLK``: int32 ``[rows,
    layers, top_k]``, dense layers included; None where the bytes are not whole rows of that shape.
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
    wire_TLK: NDArray[np.int32] | None

    @property
    def rows_expected(self) -> int:
        return len(self.prompt) + len(self.tokens) - 1 - self.start


class RawServer:
    """Asks one SGLang server. ``timeout`` bounds each request, in seconds; ``requests`` counts those to ``/generate``.

    A context manager. Every method raises the engine error for what went wrong; EngineRejected also for an answer that
    is not SGLang's.
    """

    def __init__(self, url: str, *, timeout: float, headers: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self.requests = 0
        self._http = AsyncHttp(timeout, headers=headers)

    async def __aenter__(self) -> RawServer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def ask(
        self,
        prompt: Sequence[int],
        facts: ModelSpec,
        *,
        new_tokens: int,
        start: int = 0,
        temperature: float = 0.0,
        stop: Sequence[int] = (),
    ) -> RawAnswer:
        """Sample ``new_tokens`` after ``prompt``, or up to one of the ``stop`` tokens; routes from row ``start`` on."""
        self.requests += 1
        body = _body(uuid.uuid4().hex, prompt, new_tokens, start, temperature, stop)
        return _read(self.url, body, await self._http.post(f"{self.url}/generate", body), facts)

    async def interrupt(
        self, prompt: Sequence[int], facts: ModelSpec, *, new_tokens: int, do: Callable[[str], Awaitable[None]]
    ) -> RawAnswer:
        """Sample in a stream, and call ``do`` with the request's id once its first token is there; the last answer."""
        self.requests += 1
        body = _body(uuid.uuid4().hex, prompt, new_tokens, 0, 0.0, ()) | {"stream": True}
        done, last = False, b""
        async with aclosing(self._http.lines(f"{self.url}/generate", body)) as lines:
            async for line in lines:
                if not line.startswith("data: {"):
                    continue
                last = line.removeprefix("data: ").encode()
                if not done:
                    done = True
                    await do(body["rid"])
        return _read(self.url, body, last, facts)

    async def abort(self, rid: str) -> None:
        """Abort a request."""
        await self._http.post(f"{self.url}/abort_request", {"rid": rid})

    async def retract(self) -> None:
        """Put every running request back into the queue, and go on."""
        await self._http.post(f"{self.url}/pause_generation", {"mode": "retract"})
        # A server left paused answers nobody: this must not be cut short.
        await shielded(self._http.post(f"{self.url}/continue_generation", {}))

    async def others_running(self) -> int | None:
        """How many requests run or wait on the server, None where it does not say."""
        try:
            loads = (await self._http.get_json(f"{self.url}/v1/loads"))["loads"]
            return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in loads)
        except (EngineRejected, KeyError, TypeError, ValueError):
            return None

    async def says_it_captures(self) -> bool | None:
        """What the server says of its own flag, None where it says nothing (a router in front of it, perhaps)."""
        try:
            flag = (await self._http.get_json(f"{self.url}/server_info")).get("enable_return_routed_experts")
        except (EngineRejected, ValueError):
            return None
        return None if flag is None else bool(flag)

    async def model_path(self) -> str:
        """The directory of the model it serves, as it names it; empty where it names none."""
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


def _read(url: str, body: Mapping[str, Any], reply: bytes, facts: ModelSpec) -> RawAnswer:
    try:
        answer = orjson.loads(reply)
        meta = answer["meta_info"]
        payload = meta.get("routed_experts")
        size, wire = _wire(payload, facts) if payload is not None else (None, None)
        entries = meta.get("output_token_logprobs") or ()
        return RawAnswer(
            prompt=tuple(body["input_ids"]),
            start=int(body["routed_experts_start_len"]),
            tokens=tuple(answer.get("output_ids") or ()),
            finish=str((meta.get("finish_reason") or {}).get("type")),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            retractions=int(meta.get("num_retractions") or 0),
            logprobs=sum(entry[0] is not None and math.isfinite(entry[0]) for entry in entries),
            weight_version=str(meta.get("weight_version") or ""),
            payload_bytes=size,
            wire_TLK=wire,
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise EngineRejected(f"{url}: not an answer of SGLang's /generate ({error!r})") from None


def _wire(payload: str, facts: ModelSpec) -> tuple[int, NDArray[np.int32] | None]:
    try:
        raw = pybase64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        return -1, None
    layout = facts.layout
    if layout is None or len(raw) % layout.wire_bytes_per_row:
        return len(raw), None
    return len(raw), np.frombuffer(raw, dtype="<i4").reshape(-1, facts.num_layers, facts.top_k)
