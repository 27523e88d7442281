"""Parses SGLang's responses to ``/generate`` into :class:`Completion` and validates every field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from agent_rl.engine.types import Scores
from agent_rl.errors import EngineAborted, EngineOverloaded, EngineRejected, RoutesMissingError
from agent_rl.types import Completion, FinishReason, TokenIds, TopTokens, VersionSpan
from r3.kept_tokens import KeptTokens, KeptTokensError
from r3.payload import RawRoutes, RouteLayout, decode_payload, extract_payload, split_raw
from r3.routing import Routing, RoutingError, Span, SpanKind, append_span


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The request that a response belongs to: the numbers to validate against, and its name in errors. ``vocab_size``:
    that of a request for kept tokens, else None."""

    rid: str
    session: str
    url: str
    prompt_tokens: int
    routes_from: int | None
    layout: RouteLayout | None
    vocab_size: int | None = None

    def __str__(self) -> str:
        return f"{self.url} request {self.rid} of session {self.session!r} ({self.prompt_tokens} prompt tokens)"


def read_completion(body: bytes, context: RequestContext, seconds: float) -> Completion:
    """The body of a response with status 200 as a Completion.

    An aborted request has the tokens sampled so far, possibly none and then no routes. ``routing`` is None also if
    routes were requested but the response holds none; the caller decides whether that is an error.

    With kept tokens the log-probs are those of the distribution over them.

    Raises EngineOverloaded for a rejected request, EngineRejected for a response that is not SGLang's,
    RoutesMissingError for routes with the wrong number of rows or invalid expert ids.
    """
    response, payload = split_body(body, context)
    meta = response["meta_info"]
    tokens = tuple(response["output_ids"])
    finish = _finish(meta, context)
    # Aborted while queued, initially or after a retraction, which clears the routes of the sampled tokens.
    if finish is FinishReason.ABORT and (not tokens or (payload is None and context.routes_from is not None)):
        version = _last_version(meta)
        return Completion(
            (), (), finish, version, context.url, retractions=_retractions(meta), wire_bytes=len(body), seconds=seconds
        )
    logprobs, kept = _logprobs(meta, tokens, context), None
    if context.vocab_size is not None:
        logprobs, kept = _kept_tokens(meta, tokens, context, context.vocab_size)
    return Completion(
        tokens=tokens,
        logprobs=logprobs,
        kept=kept,
        finish=finish,
        weight_version=_last_version(meta),
        engine=context.url,
        routing=_routing(payload, meta, len(tokens), context),
        earlier=_earlier(meta),
        retractions=_retractions(meta),
        cached_tokens=int(meta.get("cached_tokens", 0)),
        wire_bytes=len(body),
        seconds=seconds,
    )


def read_scores(body: bytes, tokens: TokenIds, context: RequestContext, vocab_size: int, top: int = 0) -> Scores:
    """The log-probs of an evaluated prompt, the ``top`` most likely tokens in place of each, and its routes if these
    were requested and sent.

    Raises EngineAborted for an aborted request (EngineOverloaded for a rejected one), EngineRejected for other tokens,
    a null log-prob or other top tokens, RoutesMissingError as :func:`read_completion`.
    """
    response, payload = split_body(body, context)
    meta = response["meta_info"]
    if _finish(meta, context) is FinishReason.ABORT:
        raise EngineAborted(f"{context}: aborted by the engine while it was evaluated")
    entries = meta.get("input_token_logprobs") or []
    # SGLang 0.5.23 reports the vocabulary's last id as 0 here (logprob_result_processor.py) with the right log-prob.
    last = vocab_size - 1
    expected = [token if token < last else 0 for token in tokens]
    if [entry[1] if entry[1] < last else 0 for entry in entries] != expected:
        raise EngineRejected(
            f"{context}: expected input log-probs of its {len(tokens)} tokens, received {len(entries)} for other tokens"
        )
    values = [entry[0] for entry in entries[1:]]
    _reject_null(values, context)
    likely = _top_tokens(meta, len(tokens), context, vocab_size, top) if top else None
    return Scores((0.0, *map(float, values)), _last_version(meta), _routing(payload, meta, 0, context), likely)


def _top_tokens(
    meta: Mapping[str, Any], tokens: int, context: RequestContext, vocab_size: int, top: int
) -> TopTokens:  # fmt: skip
    rows = (meta.get("input_top_logprobs") or [])[1:]
    try:
        pairs = np.array([[entry[:2] for entry in row] for row in rows], np.float64).reshape(len(rows), -1, 2)
    except (TypeError, ValueError):
        pairs = np.zeros((0, 0, 2))
    values, ids = pairs[..., 0].astype(np.float32), pairs[..., 1].astype(np.int32)
    sound = np.isfinite(values).all() and bool(((ids >= 0) & (ids < vocab_size)).all())
    if pairs.shape[:2] != (tokens - 1, top) or not sound or (values > 1e-3).any():
        raise EngineRejected(
            f"{context}: expected the log-probs of the {top} most likely tokens at {tokens - 1} positions, received "
            f"{pairs.shape[1]} at {pairs.shape[0]}, or values that are none"
        )
    return TopTokens(ids, np.minimum(values, 0.0))


Payload = bytes | memoryview | RawRoutes
"""Routes as base64, or raw."""


def split_body(body: bytes, context: RequestContext) -> tuple[Mapping[str, Any], Payload | None]:
    """The parsed response without its routes, and the routes (None if there are none)."""
    payload: Payload | None
    rest: bytes | memoryview
    try:
        payload, rest = split_raw(body) or extract_payload(body) or (None, body)
        response = orjson.loads(rest)
        meta = response["meta_info"]
        if payload is None and meta.get("routed_experts") is not None:
            payload = str(meta["routed_experts"]).encode()
        if _is_aborted(meta):
            response.setdefault("output_ids", [])
        if not isinstance(response["output_ids"], list):
            raise TypeError("output_ids is not a list")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, RoutingError) as error:
        raise EngineRejected(f"{context}: not a response of SGLang's /generate ({error!r})") from None
    return response, payload


def _is_aborted(meta: Mapping[str, Any]) -> bool:
    return bool((meta.get("finish_reason") or {}).get("type") == FinishReason.ABORT)


def _finish(meta: Mapping[str, Any], context: RequestContext) -> FinishReason:
    reason = meta.get("finish_reason") or {}
    kind = reason.get("type")
    if _is_aborted(meta) and reason.get("status_code") in (429, 503):
        raise EngineOverloaded(f"{context}: aborted by the engine: {reason.get('message') or 'no reason given'}")
    if kind not in tuple(FinishReason):
        raise EngineRejected(f"{context}: finish_reason {reason!r}, expected stop, length or abort")
    return FinishReason(kind)


def _logprobs(meta: Mapping[str, Any], tokens: Sequence[int], context: RequestContext) -> tuple[float, ...]:
    entries = meta.get("output_token_logprobs")
    if entries is None or len(entries) != len(tokens):
        received = "none" if entries is None else str(len(entries))
        raise EngineRejected(f"{context}: expected {len(tokens)} log-probs, received {received}")
    # By columns: a Python loop over entries costs as much as decoding their routes.
    values, token_ids, *_ = zip(*entries, strict=True) if entries else ((), ())
    if token_ids != tuple(tokens):
        raise EngineRejected(f"{context}: the log-probs belong to other tokens than output_ids")
    _reject_null(values, context)
    return tuple(map(float, values))


def _kept_tokens(
    meta: Mapping[str, Any], tokens: Sequence[int], context: RequestContext, vocab_size: int
) -> tuple[tuple[float, ...], KeptTokens]:
    """The log-probs over the kept tokens, and the kept tokens, which every token must have."""
    rows, values = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
    if rows is None or values is None or not len(rows) == len(values) == len(tokens):
        received = "none" if rows is None or values is None else f"{len(rows)} with {len(values)} log-probs"
        raise EngineRejected(f"{context}: expected {len(tokens)} sampling masks, received {received}")
    _reject_null(values, context)
    try:
        kept = KeptTokens.from_rows(rows)
        kept.check(tokens, vocab_size)
        if not kept.counts.all():
            raise KeptTokensError(f"token {kept.counts.argmin()} has no kept ids")
    except (TypeError, ValueError, OverflowError) as error:
        raise EngineRejected(f"{context}: wrong sampling mask: {error}") from None
    return tuple(map(float, values)), kept


def _reject_null(values: Sequence[Any], context: RequestContext) -> None:
    if None in values:
        raise EngineRejected(f"{context}: a log-prob is null, by which the engine means NaN: its weights are broken")


def _last_version(meta: Mapping[str, Any]) -> str:
    versions = meta.get("weight_versions")
    return str(versions[-1]["version"] if versions else meta.get("weight_version", ""))


def _earlier(meta: Mapping[str, Any]) -> tuple[VersionSpan, ...]:
    parts = (meta.get("weight_versions") or ())[:-1]
    return tuple(VersionSpan(int(part["start"]), int(part["end"]), str(part["version"])) for part in parts)


def _retractions(meta: Mapping[str, Any]) -> int:
    return int(meta.get("num_retractions") or 0)


def _routing(
    payload: Payload | None, meta: Mapping[str, Any], completion_tokens: int, context: RequestContext
) -> Routing | None:
    if context.routes_from is None:
        return None
    if context.layout is None:
        raise RoutesMissingError(f"{context}: routes were requested, but the model has no MoE layout to read them by")
    if payload is None:
        return None
    rows = context.prompt_tokens + completion_tokens - 1 - context.routes_from
    try:
        experts = decode_payload(payload, context.layout, rows, f"{context}, rows from {context.routes_from}")
    except RoutingError as error:
        raise RoutesMissingError(str(error)) from None
    spans = provenance(meta, context.prompt_tokens, completion_tokens, context.routes_from, context.url)
    return Routing(experts, np.ones(rows, dtype=np.bool_), spans, context.layout.num_experts)


def provenance(
    meta: Mapping[str, Any], prompt_tokens: int, completion_tokens: int, routes_from: int, engine: str
) -> tuple[Span, ...]:
    """Spans of rows ``[routes_from, prompt + completion - 1)``, numbered from 0.

    A row is SAMPLED if this request sampled the token after it, i.e. from the prompt's last row on. It was computed
    with that token's weight version (``weight_versions`` counts sampled tokens); earlier rows with the first version.

    A retracted request lost its computed rows, and its tokens were prefilled again with the weights at that time. The
    response does not say how many, so all its sampled rows are RECOMPUTED with the last version.
    """
    first_sampled = prompt_tokens - 1 if completion_tokens else prompt_tokens
    stop = prompt_tokens + completion_tokens - 1
    version = str(meta.get("weight_version", ""))
    versions = meta.get("weight_versions") or [{"version": version, "start": 0, "end": completion_tokens}]
    sampled_kind = SpanKind.SAMPLED
    if _retractions(meta):
        versions = [{"version": versions[-1]["version"], "start": 0, "end": completion_tokens}]
        sampled_kind = SpanKind.RECOMPUTED
    spans: list[Span] = []

    def add(start: int, end: int, version: str, kind: SpanKind) -> None:
        start, end = max(start, routes_from), min(end, stop)
        if start < end:
            append_span(spans, Span(start - routes_from, end - routes_from, version, engine, kind))

    add(routes_from, first_sampled, str(versions[0]["version"]), SpanKind.PREFILLED)
    for part in versions:
        add(first_sampled + int(part["start"]), first_sampled + int(part["end"]), str(part["version"]), sampled_kind)
    return tuple(spans)
