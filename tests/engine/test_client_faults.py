"""How the client treats each kind of failure, with a local HTTP server that fails as the test says."""

from __future__ import annotations

import asyncio
import base64
import gc
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.fake_sglang import SPEC, generated
from support.local_server import Handler, serving

from agent_rl.config import EngineConfig
from agent_rl.engine.admission_checks import UNSUPPORTED_ARGS, data_parallel_ranks, unsupported_reason
from agent_rl.engine.factory import check_engines, open_engine
from agent_rl.engine.fleet import Phase
from agent_rl.engine.response import read_completion
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.engine.types import Scores
from agent_rl.errors import (
    EngineAborted,
    EngineLost,
    EngineOverloaded,
    EngineRejected,
    EngineUnreachable,
    RoutesMissingError,
    UserError,
)
from agent_rl.types import Completion, FinishReason, SamplingParams, VersionSpan
from r3.routing import Span, SpanKind

CONFIG = EngineConfig(retries=2, request_timeout=5.0)
IMPATIENT = EngineConfig(retries=1, request_timeout=0.2)
SAMPLE = SamplingParams(max_new_tokens=2)
ABORTED = {"type": "abort", "message": "by hand"}
Reply = Callable[[dict[str, Any]], tuple[int, bytes] | None]


def client(*urls: str, config: EngineConfig = CONFIG, **options: Any) -> SGLangEngine:
    return SGLangEngine(urls, SPEC, config, backoff=0.001, **options)


def sends(status: int = 200, body: bytes | None = None, **changes: Any) -> Reply:
    """Replies with ``body``, or with two tokens and ``changes`` to their meta_info; status 0 hangs up."""
    return lambda request: (status, generated(request, **changes) if body is None else body)


def hangs(request: dict[str, Any]) -> None:
    """Never replies."""


class Server:
    """Replies to the first requests with ``replies`` in order, and to all others with the last of them."""

    def __init__(self, *replies: Reply) -> None:
        self.replies, self.received, self.aborted = replies or (sends(),), list[dict[str, Any]](), list[str]()
        self.begun = asyncio.Event()

    async def handle(self, path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/abort_request":
            self.aborted.append(request["rid"])
        if path != "/generate":
            return 200, b"{}"
        self.received.append(request)
        self.begun.set()
        reply = self.replies[min(len(self.received), len(self.replies)) - 1](request)
        if reply is None:
            await asyncio.sleep(60)
        return reply or (0, b"")

    @property
    def rids(self) -> list[str]:
        return [request["rid"] for request in self.received]

    async def sample(self, routes_from: int = 0, session: str = "s", config: EngineConfig = CONFIG) -> Completion:
        """The completion of three prompt tokens that a client of this server gets."""
        async with serving(self.handle) as url:
            engine = client(url, config=config)
            try:
                return await engine.generate([1, 2, 3], SAMPLE, routes_from=routes_from, session=session)
            finally:
                await engine.close()

    async def rescore(self) -> Scores:
        async with serving(self.handle) as url:
            engine = client(url)
            try:
                return await engine.rescore([1, 2, 3], session="s")
            finally:
                await engine.close()


@pytest.mark.parametrize("failure", [*map(sends, [0, 429, 500, 502, 503])])
async def test_infrastructure_failures_are_retried(failure: Reply) -> None:
    server = Server(failure, failure, sends())
    assert (await server.sample()).tokens == (7, 8)
    assert len(set(server.rids)) == len(server.rids) == 3, "each attempt has its own request id"


@pytest.mark.parametrize(
    ("status", "error"), [(0, EngineUnreachable), (503, EngineOverloaded), (500, EngineUnreachable)]
)
async def test_retries_are_limited(status: int, error: type[Exception]) -> None:
    server = Server(sends(status))
    with pytest.raises(error):
        await server.sample()
    assert len(server.received) == 3


@pytest.mark.parametrize("body", [b'{"error":{"message":"wrong"}}', b'{"error":"wrong"}', b"wrong"])
async def test_a_rejected_request_is_not_retried(body: bytes) -> None:
    server = Server(sends(400, body))
    with pytest.raises(EngineRejected, match="answered 400: wrong"):
        await server.sample()
    assert len(server.received) == 1


async def test_nothing_is_retried_where_no_engine_is_left() -> None:
    server = Server(sends(0))
    async with serving(server.handle) as url:
        engine = client(url)
        engine.fleet.listeners.append(
            lambda before, after: engine.fleet.retire(url, "out of memory") if after.phase is Phase.SUSPECT else None
        )
        with pytest.raises(EngineLost, match=r"no engine is left: out of memory"):
            await engine.generate([1], SAMPLE, routes_from=0, session="s")
        await engine.close()
    assert len(server.received) == 1


BAD_META: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"routed_experts": base64.b64encode(bytes(72)).decode()}, RoutesMissingError, "expected 4 rows .*received 3 rows"),
    ({"routed_experts": base64.b64encode(b"\x09" * 96).decode()}, RoutesMissingError, "names expert"),
    (
        {"routed_experts": base64.b64encode(bytes(96)).decode()},
        RoutesMissingError,
        "every id is 0: this server captures no routes",
    ),
    ({"output_token_logprobs": None}, EngineRejected, "expected 2 log-probs, received none"),
    ({"output_token_logprobs": [[-1.0, 7, None]]}, EngineRejected, "expected 2 log-probs, received 1"),
    ({"output_token_logprobs": [[-1.0, 7, None], [-1.0, 9, None]]}, EngineRejected, "other tokens"),
    ({"finish_reason": {"type": "surprise"}}, EngineRejected, "surprise"),
    ({"finish_reason": None}, EngineRejected, "finish_reason"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD_META)
async def test_an_inconsistent_response_is_refused_once_with_its_request(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    server = Server(sends(**changes))
    with pytest.raises(error, match=rf"request \w+ of session 'ep/3' \(3 prompt tokens\).*{message}"):
        await server.sample(session="ep/3")
    assert len(server.received) == 1


MASK = {"output_token_sampling_mask": [[7, 3], [8]], "output_token_sampling_logprobs": [-0.25, 0.0]}
BAD_MASKS: list[tuple[dict[str, Any], str]] = [
    ({}, "expected 2 sampling masks, received none"),
    ({**MASK, "output_token_sampling_mask": [[7, 3]]}, "expected 2 sampling masks, received 1 with 2 log-probs"),
    ({**MASK, "output_token_sampling_mask": [[7], [9, 3]]}, "token 1, id 8, is not among its 2 kept ids"),
    ({**MASK, "output_token_sampling_mask": [[7, 100], [8]]}, "kept ids 7 to 100, expected 0 to 99"),
    ({**MASK, "output_token_sampling_mask": [[7], []]}, "token 1 has no kept ids"),
    ({**MASK, "output_token_sampling_mask": [[7], [None]]}, "wrong sampling mask: "),
    ({**MASK, "output_token_sampling_logprobs": [-0.25, None]}, "NaN"),
]


async def test_kept_tokens_come_with_their_log_probs() -> None:
    masked = SamplingParams(top_p=0.9, min_p=0.1, max_new_tokens=2, keep_mask=True)
    server = Server(sends(**MASK))
    async with serving(server.handle) as url, client(url, routes=False) as engine:
        got = await engine.generate([1, 2, 3], masked, routes_from=0, session="s")
        plain = await engine.generate([1, 2, 3], replace(masked, keep_mask=False), routes_from=0, session="s")
    assert (got.logprobs, plain.logprobs, plain.kept) == ((-0.25, 0.0), (-0.5, -0.25), None)
    assert (got.kept.counts.tolist(), got.kept.ids.tolist()) == ([2, 1], [7, 3, 8])
    first, second = (request["sampling_params"] for request in server.received)
    assert (first["top_p"], first["min_p"], first["top_k"], second["top_k"]) == (0.9, 0.1, 4000, -1)
    assert [request.get("return_sampling_mask") for request in server.received] == [True, None]


@pytest.mark.parametrize(("changes", "message"), BAD_MASKS)
async def test_wrong_kept_tokens_are_refused(changes: dict[str, Any], message: str) -> None:
    async with serving(Server(sends(**changes)).handle) as url:
        engine = client(url)
        with pytest.raises(EngineRejected, match=message):
            await engine.generate([1], replace(SAMPLE, top_k=2, keep_mask=True), routes_from=None, session="s")
        await engine.close()


async def test_an_engine_without_sampling_masks_is_refused_at_the_start() -> None:
    message = r"rollout\.top_p, top_k and min_p require engines .* as SGLang 0.5.23 does: .* received none"
    async with serving(Server().handle) as url:
        with pytest.raises(UserError, match=message):
            await client(url, routes=False, masks=True).__aenter__()
        async with client(url, routes=False):
            pass


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"meta_info":{},"output_ids":7}', b"<html>"])
async def test_a_response_of_another_server_is_refused(body: bytes) -> None:
    with pytest.raises(EngineRejected, match="not a response of SGLang"):
        await Server(sends(200, body)).sample()


async def test_a_complete_response_without_routes_is_returned() -> None:
    """The caller decides whether routes may be missing."""
    got = await Server(sends(routed_experts=None)).sample()
    assert (got.finish, got.tokens, got.routing) == (FinishReason.LENGTH, (7, 8), None)


async def test_an_aborted_request_returns_its_tokens_and_rows() -> None:
    got = await Server(sends(finish_reason=ABORTED)).sample(1)
    assert (got.finish, got.tokens, got.logprobs) == (FinishReason.ABORT, (7, 8), (-0.5, -0.25))
    assert got.routing is not None
    assert got.routing.tokens == 3


async def test_the_rows_of_an_aborted_request_are_counted() -> None:
    rows = base64.b64encode(bytes(144)).decode()
    with pytest.raises(RoutesMissingError, match=r"expected 3 rows .*received 6 rows"):
        await Server(sends(finish_reason=ABORTED, routed_experts=rows)).sample(1)


@pytest.mark.parametrize("part", [{"text": ""}, {"output_ids": []}, {"output_ids": [7, 8]}])
async def test_an_aborted_request_without_routes_returns_no_tokens(part: dict[str, Any]) -> None:
    """It was aborted in the queue, or after a retraction."""
    meta = {"finish_reason": ABORTED, "weight_version": "3"}
    if part.get("output_ids"):
        meta["output_token_logprobs"] = [[-0.5, token, None] for token in part["output_ids"]]
    got = await Server(sends(200, orjson.dumps({**part, "meta_info": meta}))).sample()
    assert (got.finish, got.tokens, got.logprobs, got.routing) == (FinishReason.ABORT, (), (), None)
    assert got.weight_version == "3"


async def test_a_request_aborted_as_overload_is_retried() -> None:
    overloaded = sends(finish_reason=ABORTED | {"status_code": 503})
    server = Server(overloaded, overloaded, sends())
    assert (await server.sample()).tokens == (7, 8)
    assert len(server.received) == 3


VERSIONS = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]


@pytest.mark.parametrize(
    ("retractions", "expected"),
    [
        (0, [("3", 0, 1, SpanKind.PREFILLED), ("3", 1, 2, SpanKind.SAMPLED), ("4", 2, 3, SpanKind.SAMPLED)]),
        (1, [("4", 0, 1, SpanKind.PREFILLED), ("4", 1, 3, SpanKind.RECOMPUTED)]),
    ],
)
async def test_each_weight_version_within_a_turn_has_its_span(retractions: int, expected: list[Any]) -> None:
    """The rows of a retracted request are not called sampled: some were computed again, by other weights."""
    got = await Server(sends(weight_versions=VERSIONS, num_retractions=retractions)).sample(1)
    assert (got.versions, got.retractions) == ((VersionSpan(0, 1, "3"), VersionSpan(1, 2, "4")), retractions)
    assert got.routing is not None
    engine = got.engine
    assert got.routing.spans == tuple(Span(a, b, version, engine, kind) for version, a, b, kind in expected)


async def test_a_rescoring_requests_every_token_and_no_routes() -> None:
    server = Server(sends())
    assert await server.rescore() == Scores((0.0, -0.5, -0.5), "3")
    (request,) = server.received
    assert request["logprob_start_len"] == 0, "or SGLang takes the prefix from its cache, which has no log-probs"
    assert request["sampling_params"]["max_new_tokens"] == 0
    assert "return_routed_experts" not in request


@pytest.mark.parametrize("failure", [sends(503), sends(0), sends(finish_reason=ABORTED)])
async def test_a_rescoring_that_the_infrastructure_broke_is_retried(failure: Reply) -> None:
    server = Server(failure, failure, sends())
    assert (await server.rescore()).logprobs == (0.0, -0.5, -0.5)
    assert len(set(server.rids)) == 3
    with pytest.raises((EngineUnreachable, EngineOverloaded, EngineAborted)):
        await Server(failure).rescore()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([[None, 1, None], [-1.0, 2, None], [None, 3, None]], "a log-prob is null"),
        ([[None, 1, None], [-1.0, 9, None], [-1.0, 3, None]], "received 3 for other tokens"),
        ([[None, 1, None]], "received 1 for other tokens"),
        (None, "received 0 for other tokens"),
    ],
)
async def test_a_wrong_rescoring_is_refused_and_not_retried(entries: list[Any] | None, message: str) -> None:
    with pytest.raises(EngineRejected, match=message):
        await Server(sends(input_token_logprobs=entries), sends()).rescore()


async def test_cancelling_aborts_the_request_before_it_is_raised() -> None:
    server = Server(hangs)
    task = asyncio.create_task(server.sample())
    await asyncio.wait_for(server.begun.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    assert server.aborted == server.rids


async def test_a_request_that_takes_too_long_is_aborted_and_retried() -> None:
    server = Server(hangs, sends())
    assert (await server.sample(config=IMPATIENT)).tokens == (7, 8)
    assert server.aborted == server.rids[:1]


@pytest.mark.parametrize(
    ("replies", "expected"), [((hangs, sends()), 0), ((sends(0),), 1)], ids=["late once", "broken"]
)
async def test_a_session_leaves_a_broken_engine_but_not_one_that_is_late_once(
    replies: tuple[Reply, ...], expected: int
) -> None:
    """The late engine holds the prefix; another would compute all of it again."""
    first, second = Server(*replies), Server()
    async with serving(first.handle) as one, serving(second.handle) as other:
        engine = client(one, other, config=IMPATIENT)
        for _ in range(3):
            got = await engine.generate([1], SAMPLE, routes_from=0, session="s")
            assert got.engine == (one, other)[expected]
        await engine.close()
    assert len(second.received) == 3 * expected


async def test_two_dead_of_eight_cost_each_session_at_most_one_retry() -> None:
    servers = [Server(sends(0)) for _ in range(2)] + [Server() for _ in range(6)]
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(server.handle)) for server in servers]
        engine = client(*urls)
        stack.push_async_callback(engine.close)
        sessions = [engine.generate([1], SAMPLE, routes_from=0, session=f"s{n}") for n in range(200)]
        assert not {got.engine for got in await asyncio.gather(*sessions)} & set(urls[:2])
    assert sum(len(server.received) for server in servers) == 250, "the 50 that began at a dead one were sent once more"


async def test_an_engine_is_sent_no_more_than_it_runs_at_once() -> None:
    """What waits for a slot waits here, and its time-out has not begun: ten requests of 0.5 s, two at once."""
    running, most = 0, 0

    async def handler(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        nonlocal running, most
        if path == "/v1/loads":
            return 200, orjson.dumps({"loads": [{"max_running_requests": 2}]})
        if path != "/generate":
            return 200, b"{}"
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.5)
        running -= 1
        return 200, generated(request)

    config = EngineConfig(retries=0, request_timeout=2)
    async with serving(handler) as url, client(url, config=config) as engine:
        sampled = [engine.generate([1, 2, 3], SAMPLE, routes_from=0, session=str(n)) for n in range(10)]
        assert len(await asyncio.gather(*sampled)) == 10
    assert most == 2


async def test_a_large_response_is_read_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set[int]()
    monkeypatch.setattr("agent_rl.engine.sglang._LARGE_BYTES", 1)
    monkeypatch.setattr(
        "agent_rl.engine.sglang.read_completion",
        lambda *given: threads.add(threading.get_ident()) or read_completion(*given),
    )
    assert (await Server().sample()).tokens == (7, 8)
    assert threads
    assert threading.get_ident() not in threads


async def test_entering_finds_an_engine_without_capture() -> None:
    paths: list[str] = []

    async def handler(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        paths.append(path)
        return 200, generated(request, routed_experts=None) if path == "/generate" else b"{}"

    async with serving(handler) as url:
        with pytest.raises(RoutesMissingError, match="the engine sends no routes: start it with --enable"):
            async with client(url):
                pass
    assert paths[:3] == ["/server_info", "/model_info", "/continue_generation"], "it may have been left paused"


def pages(**bodies: dict[str, Any]) -> Handler:
    """Sends ``bodies`` under their paths, and an empty object under all others."""

    async def handler(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        return 200, orjson.dumps(bodies.get(path.strip("/"), {}))

    return handler


async def test_addresses_that_do_not_respond_are_named_in_one_line() -> None:
    async def no_page(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        return 404, b"<html>no such page</html>"

    async with serving(no_page) as other, serving(pages(model_info={"model_path": "m"})) as good:
        urls = (good, "http://127.0.0.1:1", other, "http://[::1")
        with pytest.raises(UserError) as raised:
            await check_engines(urls, seconds=5.0)
    message = str(raised.value)
    assert message.startswith("engine.urls: http://127.0.0.1:1/model_info: no response (ClientConnectorError")
    assert f"{other}/model_info answered 404" in message
    assert "http://[::1/model_info: not the address of a server" in message
    assert good not in message
    assert "\n" not in message


async def test_a_silent_address_is_waited_for_until_the_timeout() -> None:
    async def silent(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(silent) as url:
        with pytest.raises(UserError, match=f"engine.urls: {url}/model_info: no answer within 0.2 s"):
            await check_engines([url], seconds=0.2)


async def test_opening_a_dead_engine_names_the_key(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"engine\.urls: http://127\.0\.0\.1:1/model_info: no response \(ClientConn"):
        async with open_engine(EngineConfig(urls=("http://127.0.0.1:1",)), model, SPEC, tmp_path):
            pass


SERVER_INFO = {
    "tp_size": 4, "pp_size": 1, "dp_size": 1, "enable_dp_attention": False, "enable_hierarchical_cache": False,
    "speculative_algorithm": None, "speculative_eagle_topk": None, "chunked_prefill_size": 4096,
    "disaggregation_mode": "null", "moe_runner_backend": "auto",
}  # fmt: skip

PREFILL_GRAPH = {"decode": {"backend": "full"}, "prefill": {"backend": "breakable"}}


@pytest.mark.parametrize(
    ("harmful", "message"),
    [
        ({"pp_size": 2}, "--pp-size above 1: routes and weights reach only its first stage"),
        ({"dp_size": 2}, "--dp-size above 1: .*start one engine per rank"),
        ({"attn_dp_size": 2}, "--enable-dp-attention with a prefill graph: .*issue 31100"),
        ({"dp_size": 2, "enable_dp_attention": True}, "--enable-dp-attention with a prefill graph: .*issue 31100"),
        ({"attn_dp_size": 2, "cuda_graph_config": PREFILL_GRAPH}, "--enable-dp-attention with a prefill graph: "),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache: .*issue 26975"),
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm NGRAM: .*issue 37949"),
        ({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4}, "--speculative-eagle-topk above 1: "),
        ({"chunked_prefill_size": -1}, "--chunked-prefill-size -1: .*issue 26860"),
        ({"speculative_algorithm": "EAGLE", "device": "cpu"}, "--speculative-algorithm on a CPU: SGLang commits"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode: "),
        ({"moe_runner_backend": "flashinfer_trtllm"}, "--moe-runner-backend .*use triton"),
        ({"moe_runner_backend": "triton_kernel"}, "--moe-runner-backend triton_kernel .*does not report"),
        ({"moe_runner_backend": "flashinfer_mxfp4"}, "--moe-runner-backend triton_kernel or flashinfer_mxfp4: "),
        ({"moe_a2a_backend": "mooncake"}, "--moe-a2a-backend: .*use deepep"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap: "),
        ({"enable_lmcache": True}, "--enable-lmcache: .*has no routes"),
        ({"enable_flexkv": True}, "--enable-flexkv: .*has no routes"),
        ({"disaggregation_decode_enable_offload_kvcache": True}, "--disaggregation-decode-enable-offload-kvcache: "),
    ],
)
async def test_harmful_server_options_are_refused(harmful: dict[str, Any], message: str) -> None:
    async with serving(pages(server_info=SERVER_INFO | harmful)) as url:
        with pytest.raises(UserError, match=f"the engine at {url} was started with {message}"):
            async with client(url):
                pass


def test_all_refused_options_have_a_case() -> None:
    assert len(UNSUPPORTED_ARGS) == 16
    assert unsupported_reason(SERVER_INFO | {"moe_a2a_backend": "deepep"}) is None
    assert unsupported_reason(SERVER_INFO | {"moe_a2a_backend": "mooncake", "tp_size": 1}) is None
    assert unsupported_reason(SERVER_INFO) is None
    for dp_attention in ({"attn_dp_size": 2, "enable_dp_attention": True}, {"dp_size": 2, "enable_dp_attention": True}):
        server = SERVER_INFO | dp_attention  # of SGLang 0.5.23, and of 0.5.21
        assert unsupported_reason(server | {"cuda_graph_config": {"prefill": {"backend": "disabled"}}}) is None
        assert unsupported_reason(server | {"moe_a2a_backend": "deepep"}) is None
        assert unsupported_reason(server, routes=False) is None
        assert data_parallel_ranks(server) == 2
    assert unsupported_reason(SERVER_INFO | {"enable_hierarchical_cache": True}, routes=False) is None
    assert unsupported_reason(SERVER_INFO | {"pp_size": 2}, routes=False) is not None
    assert unsupported_reason(SERVER_INFO | {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}) is None


async def test_a_request_leaves_no_garbage_for_a_collection_that_stops_the_loop() -> None:
    async with serving(Server().handle) as url:
        engine = client(url)
        await engine.generate([1], SAMPLE, routes_from=0, session="first")
        gc.collect()
        gc.disable()
        try:
            for number in range(20):
                await engine.generate([1], SAMPLE, routes_from=0, session=str(number))
            left = gc.collect()
        finally:
            gc.enable()
        await engine.close()
    assert left < 20, "what a retry, a request or an answer is made of refers to itself"


@pytest.mark.parametrize(
    ("page", "key", "values", "message"),
    [
        ("server_info", "version", ("0.5.23", "0.5.24"), "has SGLang 0.5.24, and those before it 0.5.23"),
        ("model_info", "tokenizer_path", ("/a/Qwen3", "/b/X"), "has the tokenizer X, and those before it Qwen3"),
    ],
)
async def test_engines_that_differ_are_refused(page: str, key: str, values: tuple[str, str], message: str) -> None:
    one, other = (pages(**{page: {key: value}}) for value in values)
    async with serving(one) as first, serving(other) as second:
        with pytest.raises(UserError, match=f"^the engine at {second} {message}: make them alike$"):
            async with client(first, second, routes=False):
                pass


async def test_weights_of_different_versions_are_refused_without_a_publish(model: Path, tmp_path: Path) -> None:
    one, other = (pages(model_info={"weight_version": version}) for version in ("3", "default"))
    async with serving(one) as first, serving(other) as second:
        with pytest.raises(UserError) as raised:
            async with open_engine(EngineConfig(urls=(first, second)), model, SPEC, tmp_path, routes=False):
                pass
    found = f"{first} has '3', {second} has 'default'"
    assert str(raised.value).startswith(f"engine.urls: their weights are of different versions ({found}): ")
