"""Requests to SGLang's ``/generate``: their bodies, and how one is sent so that it never outlives its caller."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from agent_rl.config.rollout import MAX_TOP_K
from agent_rl.errors import EngineError, EngineRejected, EngineUnreachable
from agent_rl.types import SamplingParams, TokenIds
from agent_rl.utils.concurrency import shielded
from agent_rl.utils.http import AsyncHttp, timed_out

_ABORT_SECONDS = 5.0


def generate_body(
    tokens: TokenIds, sampling: SamplingParams, routes_from: int | None, *, max_positions: int
) -> dict[str, Any]:
    """Sample after ``tokens``, at most as much as a context of ``max_positions`` tokens holds. ``routes_from``: the
    first row of routes to return (None: no routes). Raises EngineRejected for a prompt that is empty or fills the
    context."""
    remaining = max_positions - len(tokens)
    if not len(tokens) or remaining <= 0:
        raise EngineRejected(f"{len(tokens)} prompt tokens, expected between 1 and {max_positions - 1} (the context)")
    body: dict[str, Any] = {
        "input_ids": np.array(tokens, np.int32),
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # SGLang returns masks for a limited top_k only; -1 is none.
            "top_k": sampling.top_k or (MAX_TOP_K if sampling.keep_mask else -1),
            "min_p": sampling.min_p,
            "max_new_tokens": min(sampling.max_new_tokens, remaining),
            "stop_token_ids": list(sampling.stop_token_ids),
        },
        "return_logprob": True,
        "logprob_start_len": -1,
    }
    if sampling.keep_mask:
        body["return_sampling_mask"] = True
    if sampling.grammar is not None:
        body["sampling_params"]["ebnf"] = sampling.grammar
        body["sampling_params"]["custom_params"] = {"grammar_prefix": sampling.grammar_prefix}
    if routes_from is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": routes_from}
    return body


def score_body(tokens: TokenIds, *, routes: bool, top: int = 0) -> dict[str, Any]:
    """Compute the log-probs of ``tokens`` at temperature 1, those of the ``top`` most likely tokens in place of each,
    and with ``routes`` their routes."""
    body: dict[str, Any] = {
        "input_ids": np.array(tokens, np.int32),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        # From token 0, which keeps SGLang from taking a prefix from its cache: it caches no log-probs.
        "logprob_start_len": 0,
    }
    if top:
        body["top_logprobs_num"] = top
    return body | ({"return_routed_experts": True, "routed_experts_start_len": 0} if routes else {})


async def post_generate(http: AsyncHttp, url: str, rid: str, body: Mapping[str, Any]) -> bytes:
    """POST ``body`` as request ``rid``. A cancellation or a time-out also ends the request on the server."""
    # Servers that agent-rl launches then send routes as raw bytes. Others ignore it.
    raw = "?routes=raw" if body.get("return_routed_experts") else ""
    try:
        return await http.post(f"{url}/generate{raw}", {"rid": rid, **body})
    except asyncio.CancelledError:
        await shielded(abort(http, url, rid))
        raise
    except EngineUnreachable as error:
        if timed_out(error):
            await abort(http, url, rid)
        raise


async def abort(http: AsyncHttp, url: str, rid: str) -> None:
    """Ask the engine to give request ``rid`` up."""
    # A server that can't be reached isn't running the request either, or ends it when the connection drops.
    with contextlib.suppress(EngineError):
        await http.post(f"{url}/abort_request", {"rid": rid}, seconds=_ABORT_SECONDS)
