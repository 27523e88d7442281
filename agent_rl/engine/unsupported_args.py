"""Server options with which an engine gives wrong routes, or keeps old weights, without a word: refused at the start.

Read from ``/server_info``, as of SGLang 0.5.23. Each reason names what goes wrong and an issue of sgl-project/sglang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Server = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Refusal:
    """``option`` as it is set on the server's command line, where it does harm, and the harm: only to ``routes``, or
    also to a run that asks for none."""

    option: str
    holds: Callable[[Server], bool]
    reason: str
    routes: bool = True


def _more_than_one(key: str) -> Callable[[Server], bool]:
    return lambda server: int(server.get(key) or 1) > 1


def _is(key: str, *values: object) -> Callable[[Server], bool]:
    return lambda server: server.get(key) in values


REFUSED = (
    Refusal(
        "--pp-size above 1", _more_than_one("pp_size"), "routes and weights reach its first stage alone", routes=False
    ),
    Refusal(
        "--dp-size above 1",
        _more_than_one("dp_size"),
        "turns go round its ranks, none of which then holds their prefix, and a weight update reaches the first alone; "
        "start one engine a rank",
        routes=False,
    ),
    Refusal(
        "--enable-dp-attention",
        _is("enable_dp_attention", True),
        "ranks above 0 give other tokens' routes where a prefill graph ran (issue 31100)",
    ),
    Refusal(
        "--enable-hierarchical-cache",
        _is("enable_hierarchical_cache", True),
        "a prefix that comes back from the host's memory brings no routes (issue 26975)",
    ),
    Refusal(
        "--speculative-algorithm NGRAM",
        _is("speculative_algorithm", "NGRAM"),
        "rows of drafts that were not taken are given for tokens that were (issue 37949)",
    ),
    Refusal(
        "--speculative-eagle-topk above 1",
        lambda server: bool(server.get("speculative_algorithm")) and int(server.get("speculative_eagle_topk") or 1) > 1,
        "rows of drafts that were not taken are given for tokens that were (issue 37949)",
    ),
    Refusal(
        "--chunked-prefill-size -1",
        lambda server: (size := server.get("chunked_prefill_size")) is not None and int(size) <= 0,
        "a prompt longer than the capture buffer ends the server (issue 26860)",
    ),
    Refusal(
        "--disaggregation-mode",
        _is("disaggregation_mode", "prefill", "decode"),
        "the routes of prompt and answer come from two servers and are not put together, nor do both get the weights",
        routes=False,
    ),
    Refusal(
        "--moe-runner-backend flashinfer_trtllm",
        _is("moe_runner_backend", "flashinfer_trtllm"),
        "its fused router names no experts; start with triton or flashinfer_trtllm_routed",
    ),
)


def refusal(server: Server, *, routes: bool = True) -> str | None:
    """Why a server that reports this of itself must not be used, in one line; None where nothing is known.

    ``routes``: whether it will be asked for them.
    """
    harmful = [each for each in REFUSED if (routes or not each.routes) and each.holds(server)]
    found = [f"{each.option}: {each.reason}" for each in harmful]
    return "; ".join(found) or None
