"""SGLang's answer to ``/generate`` as a :class:`Completion`, with nothing taken on trust."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from agent_rl.engine.types import Scores
from agent_rl.errors import EngineAborted, EngineOverloaded, EngineRejected, RoutesMissingError
from agent_rl.types import Completion, FinishReason, TokenIds, VersionSpan
from r3.payload import RouteLayout, decode_payload, extract_payload
from r3.routing import Routing, RoutingError, Span, SpanKind, append_span


@dataclass(frozen=True, slots=True)
class Asked:
    """The request an answer belongs to: what its numbers are checked against, and how errors name it."""

    rid: str
    session: str
    url: str
    prompt_tokens: int
    routes_from: int | None
    layout: RouteLayout | None

    def __str__(self) -> str:
        return f"{self.url} request {self.rid} of session {self.session!r} ({self.prompt_tokens} prompt tokens)"


def read_answer(body: bytes, asked: Asked, seconds: float) -> Completion:
    """Turn the body of a 200 answer into a Completion.

    Of an aborted request it holds what was sampled before, which may be nothing, then without routes. ``routing`` is
    None also where routes were asked for and the key is absent: whether that may be is the caller's to say.

    Raises EngineOverloaded for a request that was turned away, EngineRejected for an answer that is not SGLang's,
    RoutesMissingError for routes of the wrong row count, or that are not expert ids.
    """
    answer, payload = split_body(body, asked)
    meta = answer["meta_info"]
    tokens = tuple(answer["output_ids"])
    finish = _finish(meta, asked)
    # Aborted while queued, for the first time or again after a retraction, which clears the routes of what was sampled.
    if finish is FinishReason.ABORT and (not tokens or (payload is None and asked.routes_from is not None)):
        version = _last_version(meta)
        lost = _retractions(meta)
        return Completion((), (), finish, version, asked.url, retractions=lost, wire_bytes=len(body), seconds=seconds)
    logprobs = _logprobs(meta, tokens, asked)
    return Completion(
        tokens=tokens,
        logprobs=logprobs,
        finish=finish,
        weight_version=_last_version(meta),
        engine=asked.url,
        routing=_routing(payload, meta, len(tokens), asked),
        earlier=_earlier(meta),
        retractions=_retractions(meta),
        cached_tokens=int(meta.get("cached_tokens", 0)),
        wire_bytes=len(body),
        seconds=seconds,
    )


def read_scores(body: bytes, tokens: TokenIds, asked: Asked, vocab_size: int) -> Scores:
    """The log-probs of a prompt that was evaluated whole, and its routes where they were asked for and came.

    Raises EngineAborted for a request that the engine gave up (EngineOverloaded for one it turned away), EngineRejected
    for an answer about other tokens or with a log-prob that is no number, RoutesMissingError as :func:`read_answer`.
    """
    answer, payload = split_body(body, asked)
    meta = answer["meta_info"]
    if _finish(meta, asked) is FinishReason.ABORT:
        raise EngineAborted(f"{asked}: aborted by the engine while it was evaluated")
    entries = meta.get("input_token_logprobs") or []
    # SGLang 0.5.23 names the vocabulary's last id as 0 here (logprob_result_processor.py); its log-prob is right.
    last = vocab_size - 1
    named = [token if token < last else 0 for token in tokens]
    if [entry[1] if entry[1] < last else 0 for entry in entries] != named:
        raise EngineRejected(
            f"{asked}: expected input log-probs of its {len(tokens)} tokens, received {len(entries)} of others"
        )
    values = [entry[0] for entry in entries[1:]]
    _no_null(values, asked)
    return Scores((0.0, *map(float, values)), _last_version(meta), _routing(payload, meta, 0, asked))


def split_body(body: bytes, asked: Asked) -> tuple[Mapping[str, Any], bytes | memoryview | None]:
    """The parsed answer without its routes, and the routes' base64 (None where there are none)."""
    cut = extract_payload(body)
    payload: bytes | memoryview | None
    payload, rest = cut if cut else (None, body)
    try:
        answer = orjson.loads(rest)
        meta = answer["meta_info"]
        if payload is None and meta.get("routed_experts") is not None:
            payload = str(meta["routed_experts"]).encode()
        if _is_aborted(meta):
            answer.setdefault("output_ids", [])
        if not isinstance(answer["output_ids"], list):
            raise TypeError("output_ids is no list")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise EngineRejected(f"{asked}: not an answer of SGLang's /generate ({error!r})") from None
    return answer, payload


def _is_aborted(meta: Mapping[str, Any]) -> bool:
    return bool((meta.get("finish_reason") or {}).get("type") == FinishReason.ABORT)


def _finish(meta: Mapping[str, Any], asked: Asked) -> FinishReason:
    reason = meta.get("finish_reason") or {}
    kind = reason.get("type")
    if _is_aborted(meta) and reason.get("status_code") in (429, 503):
        raise EngineOverloaded(f"{asked}: aborted by the engine: {reason.get('message') or 'no reason given'}")
    if kind not in tuple(FinishReason):
        raise EngineRejected(f"{asked}: finish_reason {reason!r}, expected stop, length or abort")
    return FinishReason(kind)


def _logprobs(meta: Mapping[str, Any], tokens: Sequence[int], asked: Asked) -> tuple[float, ...]:
    entries = meta.get("output_token_logprobs")
    if entries is None or len(entries) != len(tokens):
        received = "none" if entries is None else str(len(entries))
        raise EngineRejected(f"{asked}: expected {len(tokens)} log-probs, received {received}")
    # By columns: Python's loops over entries cost as much as the decoding of their routes.
    values, named, *_ = zip(*entries, strict=True) if entries else ((), ())
    if named != tuple(tokens):
        raise EngineRejected(f"{asked}: the log-probs belong to other tokens than output_ids")
    _no_null(values, asked)
    return tuple(map(float, values))


def _no_null(values: Sequence[Any], asked: Asked) -> None:
    if None in values:
        raise EngineRejected(f"{asked}: a log-prob is null, which is how the engine writes NaN: its weights are broken")


def _last_version(meta: Mapping[str, Any]) -> str:
    versions = meta.get("weight_versions")
    return str(versions[-1]["version"] if versions else meta.get("weight_version", ""))


def _earlier(meta: Mapping[str, Any]) -> tuple[VersionSpan, ...]:
    parts = (meta.get("weight_versions") or ())[:-1]
    return tuple(VersionSpan(int(part["start"]), int(part["end"]), str(part["version"])) for part in parts)


def _retractions(meta: Mapping[str, Any]) -> int:
    return int(meta.get("num_retractions") or 0)


def _routing(
    payload: bytes | memoryview | None, meta: Mapping[str, Any], completion_tokens: int, asked: Asked
) -> Routing | None:
    if asked.routes_from is None:
        return None
    if asked.layout is None:
        raise RoutesMissingError(f"{asked}: routes asked, but the client was given no model facts to read them by")
    if payload is None:
        return None
    rows = asked.prompt_tokens + completion_tokens - 1 - asked.routes_from
    try:
        experts = decode_payload(payload, asked.layout, rows, f"{asked}, rows from {asked.routes_from}")
    except RoutingError as error:
        raise RoutesMissingError(str(error)) from None
    spans = provenance(meta, asked.prompt_tokens, completion_tokens, asked.routes_from, asked.url)
    return Routing(experts, np.ones(rows, dtype=np.bool_), spans, asked.layout.num_experts)


def provenance(
    meta: Mapping[str, Any], prompt_tokens: int, completion_tokens: int, routes_from: int, engine: str
) -> tuple[Span, ...]:
    """Spans of rows ``[routes_from, prompt + completion - 1)``, numbered from 0.

    A row is SAMPLED when the token after it was sampled by this request: the prompt's last row on. It was then computed
    with that token's weight version (``weight_versions`` counts sampled tokens); the rows before with the first one.

    A request that was retracted lost what it had computed, and its tokens so far went through a prefill again, with the
    weights of then. How many they were its answer does not say: all those rows are RECOMPUTED, with the last version.
    """
    first_sampled = prompt_tokens - 1 if completion_tokens else prompt_tokens
    stop = prompt_tokens + completion_tokens - 1
    version = str(meta.get("weight_version", ""))
    versions = meta.get("weight_versions") or [{"version": version, "start": 0, "end": completion_tokens}]
    of_sampled = SpanKind.SAMPLED
    if _retractions(meta):
        versions = [{"version": versions[-1]["version"], "start": 0, "end": completion_tokens}]
        of_sampled = SpanKind.RECOMPUTED
    spans: list[Span] = []

    def add(start: int, end: int, of: str, kind: SpanKind) -> None:
        start, end = max(start, routes_from), min(end, stop)
        if start < end:
            append_span(spans, Span(start - routes_from, end - routes_from, of, engine, kind))

    add(routes_from, first_sampled, str(versions[0]["version"]), SpanKind.PREFILLED)
    for part in versions:
        add(
            first_sampled + int(part["start"]),
            first_sampled + int(part["end"]),
            str(part["version"]),
            of_sampled,
        )
    return tuple(spans)
