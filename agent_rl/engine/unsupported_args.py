"""Server options that make an engine return wrong routes or keep old weights without an error. They are refused at
start.

Read from ``/server_info`` of SGLang 0.5.23. Each reason names the effect and an issue of sgl-project/sglang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Server = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class UnsupportedArg:
    """``option`` as written on the server's command line, when it is set (``applies``), and its effect. ``routes``:
    it affects only runs that request routes."""

    option: str
    applies: Callable[[Server], bool]
    reason: str
    routes: bool = True


def _more_than_one(key: str) -> Callable[[Server], bool]:
    return lambda server: int(server.get(key) or 1) > 1


def _is(key: str, *values: object) -> Callable[[Server], bool]:
    return lambda server: server.get(key) in values


def _scatters_tokens(server: Server) -> bool:
    """Whether tensor ranks route different tokens, and the capture does not gather them (SGLang's
    ``_is_scattered_a2a_backend`` has DeepEP only)."""
    return int(server.get("tp_size") or 1) > 1 and server.get("moe_a2a_backend") not in _GATHERED_BACKENDS


_GATHERED_BACKENDS = (None, "none", "deepep", "deepep_v2")

UNSUPPORTED_ARGS = (
    UnsupportedArg(
        "--pp-size above 1", _more_than_one("pp_size"), "routes and weights reach only its first stage", routes=False
    ),
    UnsupportedArg(
        "--dp-size above 1",
        _more_than_one("dp_size"),
        "turns alternate between its ranks, which then lack their prefix, and a weight update reaches only the first; "
        "start one engine per rank",
        routes=False,
    ),
    UnsupportedArg(
        "--enable-dp-attention",
        _is("enable_dp_attention", True),
        "ranks above 0 return the routes of other tokens after a prefill graph ran (issue 31100)",
    ),
    UnsupportedArg(
        "--enable-hierarchical-cache",
        _is("enable_hierarchical_cache", True),
        "a prefix restored from host memory has no routes (issue 26975)",
    ),
    UnsupportedArg(
        "--speculative-algorithm NGRAM",
        _is("speculative_algorithm", "NGRAM"),
        "accepted tokens get the rows of rejected drafts (issue 37949)",
    ),
    UnsupportedArg(
        "--speculative-eagle-topk above 1",
        lambda server: bool(server.get("speculative_algorithm")) and int(server.get("speculative_eagle_topk") or 1) > 1,
        "accepted tokens get the rows of rejected drafts (issue 37949)",
    ),
    UnsupportedArg(
        "--chunked-prefill-size -1",
        lambda server: (size := server.get("chunked_prefill_size")) is not None and int(size) <= 0,
        "a prompt longer than the capture buffer crashes the server (issue 26860)",
    ),
    UnsupportedArg(
        "--disaggregation-mode",
        _is("disaggregation_mode", "prefill", "decode"),
        "the routes of prompt and response come from two servers and are not joined; only one gets new weights",
        routes=False,
    ),
    UnsupportedArg(
        "--moe-runner-backend flashinfer_trtllm",
        _is("moe_runner_backend", "flashinfer_trtllm"),
        "its fused router does not report experts; use triton or flashinfer_trtllm_routed",
    ),
    UnsupportedArg(
        "--moe-runner-backend triton_kernel or flashinfer_mxfp4",
        _is("moe_runner_backend", "triton_kernel", "flashinfer_mxfp4"),
        "it chooses experts itself and does not report them; use triton with bfloat16 weights",
    ),
    UnsupportedArg(
        "--moe-a2a-backend",
        _scatters_tokens,
        "each tensor rank captures its own tokens, and only DeepEP's are gathered; use deepep, or none",
    ),
    UnsupportedArg(
        "--enable-two-batch-overlap",
        _is("enable_two_batch_overlap", True),
        "both halves of a batch write their routes to the same rows",
    ),
    UnsupportedArg(
        "--enable-lmcache",
        _is("enable_lmcache", True),
        "a prefix restored from its store has no routes",
    ),
    UnsupportedArg(
        "--enable-flexkv",
        _is("enable_flexkv", True),
        "a prefix restored from its store has no routes",
    ),
    UnsupportedArg(
        "--disaggregation-decode-enable-offload-kvcache",
        _is("disaggregation_decode_enable_offload_kvcache", True),
        "a prefix restored from host memory has no routes",
    ),
)


def unsupported_reason(server: Server, *, routes: bool = True) -> str | None:
    """Why a server with this ``/server_info`` must not be used, in one line; None if no unsupported option is set.

    ``routes``: whether routes will be requested.
    """
    matches = [each for each in UNSUPPORTED_ARGS if (routes or not each.routes) and each.applies(server)]
    return "; ".join(f"{each.option}: {each.reason}" for each in matches) or None
