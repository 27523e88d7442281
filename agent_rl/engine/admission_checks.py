"""Checks of an SGLang server before it receives requests: its options, its model, and that it captures routes.

Options that make an engine return wrong routes or keep old weights without an error are refused. They are read from
``/server_info`` of SGLang 0.5.21 and 0.5.23. Each reason names the effect and an issue of sgl-project/sglang.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_rl.engine.request import generate_body, post_generate
from agent_rl.engine.response import RequestContext, read_completion, split_body
from agent_rl.engine.routing import RequestRouter
from agent_rl.errors import EngineError, EngineRejected, RoutesMissingError, UserError
from agent_rl.models.spec import ModelSpec, difference, read_model_spec
from agent_rl.types import SamplingParams
from agent_rl.utils.http import AsyncHttp

Server = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class UnsupportedArg:
    """``option`` as written on the server's command line, when it is set (``applies``), and its effect. ``routes``:
    it affects only runs that request routes."""

    option: str
    applies: Callable[[Server], bool]
    reason: str
    routes: bool = True


def attention_ranks(server: Server) -> int:
    """Ranks of data-parallel attention by ``/server_info``. SGLang 0.5.23 turns ``--dp-size N --enable-dp-attention``
    into ``attn_dp_size`` N and ``dp_size`` 1; 0.5.21 reports the two options."""
    ranks = server.get("attn_dp_size") or (server.get("enable_dp_attention") and server.get("dp_size"))
    return int(ranks or 1)


def replicas(server: Server) -> int:
    """Copies of the model in a server, by ``/server_info``."""
    return 1 if attention_ranks(server) > 1 else int(server.get("dp_size") or 1)


def data_parallel_ranks(server: Server) -> int:
    """Data-parallel ranks by ``/server_info``, among which a request chooses one."""
    return replicas(server) * attention_ranks(server)


def _more_than_one(key: str) -> Callable[[Server], bool]:
    return lambda server: int(server.get(key) or 1) > 1


def _is(key: str, *values: object) -> Callable[[Server], bool]:
    return lambda server: server.get(key) in values


def _scatters_tokens(server: Server) -> bool:
    """Whether tensor ranks route different tokens, and the capture does not gather them (SGLang's
    ``_is_scattered_a2a_backend`` has DeepEP only)."""
    return int(server.get("tp_size") or 1) > 1 and server.get("moe_a2a_backend") not in _GATHERED_BACKENDS


_GATHERED_BACKENDS = (None, "none", "deepep", "deepep_v2")


def _slices_a_prefill_graph(server: Server) -> bool:
    """Whether ranks of data-parallel attention cut their rows out of a prefill graph's. DeepEP's ranks do not."""
    prefill = (server.get("cuda_graph_config") or {}).get("prefill") or {}
    graph = prefill.get("backend") != "disabled"
    return data_parallel_ranks(server) > 1 and graph and server.get("moe_a2a_backend") not in ("deepep", "deepep_v2")


UNSUPPORTED_ARGS = (
    UnsupportedArg(
        "--pp-size above 1",
        _more_than_one("pp_size"),
        "routes and weights reach only its first stage: the layers of the others have routes of zeros",
        routes=False,
    ),
    UnsupportedArg(
        "--dp-size above 1",
        lambda server: replicas(server) > 1,
        "SGLang refuses weight updates of its replicas; start one engine per rank, or use --enable-dp-attention",
        routes=False,
    ),
    UnsupportedArg(
        "--enable-dp-attention with a prefill graph",
        _slices_a_prefill_graph,
        "ranks above 0 return the routes of other tokens (issue 31100); set --cuda-graph-backend-prefill disabled, or "
        "--moe-a2a-backend deepep",
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
        "--speculative-algorithm on a CPU",
        lambda server: bool(server.get("speculative_algorithm")) and server.get("device") == "cpu",
        "SGLang commits the most likely token there, whatever the temperature",
        routes=False,
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


_CONTINUE_SECONDS = 120.0
_RESPONSE_SECONDS = 5.0


class AdmissionChecks:
    """Checks engines that shall serve ``model_spec``, capture routes (``routes``) and return kept tokens (``masks``).
    Tells ``router`` how many requests each runs at once."""

    def __init__(
        self, model_spec: ModelSpec, http: AsyncHttp, router: RequestRouter, *, routes: bool, masks: bool
    ) -> None:
        self._model_spec, self._http, self._router = model_spec, http, router
        self._routes, self._masks = routes, masks
        self._common: dict[str, str] = {}
        self._data_parallel: dict[str, int] = {}

    def placement(self, url: str, session: str) -> dict[str, int]:
        """The part of a request that keeps ``session`` on one data-parallel rank of the engine at ``url``, which has
        its prefix; empty for an engine with one rank."""
        ranks = self._data_parallel.get(url, 1)
        return {"routed_dp_rank": zlib.crc32(session.encode()) % ranks} if ranks > 1 else {}

    async def admit(self, url: str) -> None:
        """Check the engine at ``url``.

        Raises UserError for options that give wrong routes or keep old weights, for another model, and for another
        tokenizer or SGLang release than the engines checked before, and where no kept tokens come; RoutesMissingError
        where no routes come. An engine that does not know them leaves both out silently, so requests ask for some.
        """
        await self._check_options(url)
        await self._check_model(url)
        # A trainer that was killed within a weight update left it paused.
        await self._http.post(f"{url}/continue_generation", {}, seconds=_CONTINUE_SECONDS)
        if self._routes:
            await self._check_capture(url)
        if self._masks:
            await self._check_masks(url)
        self._router.set_limit(url, await self._max_running(url))

    async def _check_options(self, url: str) -> None:
        try:
            info = await self._http.get_json(f"{url}/server_info")
        except EngineRejected:
            return  # perhaps a router in front of it: the probe and the checks of each response remain
        if (reason := unsupported_reason(info, routes=self._routes)) is not None:
            raise UserError(f"the engine at {url} was started with {reason}")
        self._data_parallel[url] = data_parallel_ranks(info)
        self._check_common(url, "SGLang", str(info.get("version") or ""))

    async def _check_model(self, url: str) -> None:
        try:
            info = await self._http.get_json(f"{url}/model_info")
        except EngineRejected:
            return
        kind, directory = info.get("model_type"), Path(str(info.get("tokenizer_path") or ""))
        expected = self._model_spec
        if kind not in (None, expected.kind):
            raise UserError(f"the engine at {url} serves a {kind}, and the config's model is a {expected.kind}")
        if (directory / "config.json").is_file() and (other := difference(expected, read_model_spec(directory))):
            raise UserError(
                f"the engine at {url} serves {directory}, which is another model than the config's: it has {other}"
            )
        self._check_common(url, "the tokenizer", directory.name)

    def _check_common(self, url: str, name: str, value: str) -> None:
        """Raise UserError where an engine has another ``name`` than those before it; empty where it does not say."""
        if value and (common := self._common.setdefault(name, value)) != value:
            raise UserError(f"the engine at {url} has {name} {value}, and those before it {common}: make them alike")

    async def _check_capture(self, url: str) -> None:
        rid, sampling = secrets.token_hex(16), SamplingParams(temperature=0.0, max_new_tokens=1)
        context = RequestContext(rid, "capture probe", url, 2, 0, self._model_spec.layout)
        body = generate_body((0, 1), sampling, 0, max_positions=self._model_spec.max_positions)
        response = await post_generate(self._http, url, rid, body)
        _, payload = split_body(response, context)
        if payload is None:
            raise RoutesMissingError(
                f"{url}: the engine sends no routes: start it with --enable-return-routed-experts, or remove the "
                f"router that drops them; `agent-rl r3 probe {url}` says which it is"
            )
        try:
            read_completion(response, context, 0.0)
        except RoutesMissingError as error:
            raise UserError(
                f"the engine at {url} serves another model than the config's, or gives wrong routes: {error}"
            ) from None

    async def _check_masks(self, url: str) -> None:
        rid, sampling = secrets.token_hex(16), SamplingParams(top_k=2, max_new_tokens=1, keep_mask=True)
        context = RequestContext(rid, "mask probe", url, 2, None, None, self._model_spec.vocab_size)
        body = generate_body((0, 1), sampling, None, max_positions=self._model_spec.max_positions)
        try:
            read_completion(await post_generate(self._http, url, rid, body), context, 0.0)
        except EngineRejected as error:
            raise UserError(
                "rollout.top_p, top_k and min_p require engines that return sampling masks, as SGLang 0.5.23 does: "
                f"{error}"
            ) from None

    async def _max_running(self, url: str) -> int:
        """How many requests it runs at once; 0 where it does not say."""
        with contextlib.suppress(EngineError, KeyError, TypeError, ValueError):
            loads = (await self._http.get_json(f"{url}/v1/loads"))["loads"]
            return sum(int(load["max_running_requests"]) for load in loads)
        return 0


async def responds(http: AsyncHttp, url: str) -> bool:
    """Whether the server at ``url`` answers ``/model_info`` within 5 s."""
    try:
        async with asyncio.timeout(_RESPONSE_SECONDS):
            await http.get(f"{url}/model_info")
    except (EngineError, TimeoutError):
        return False
    return True
