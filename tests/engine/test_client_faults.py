"""What the client does about each kind of failure, against a local HTTP server that misbehaves on order."""

from __future__ import annotations

import asyncio
import base64
import gc
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from support.local_server import Handler, serving

from agent_rl.config import EngineConfig
from agent_rl.engine.factory import check_engines, open_engine
from agent_rl.engine.fleet import Phase
from agent_rl.engine.response import read_completion
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.engine.types import Scores
from agent_rl.engine.unsupported_args import UNSUPPORTED_ARGS, unsupported_reason
from agent_rl.errors import (
    EngineAborted,
    EngineLost,
    EngineOverloaded,
    EngineRejected,
    EngineUnreachable,
    RoutesMissingError,
    UserError,
)
from agent_rl.models.spec import ModelSpec
from agent_rl.types import Completion, FinishReason, SamplingParams, VersionSpan
from r3.routing import Span, SpanKind

FACTS = ModelSpec(
    "qwen3_moe", moe=(False, True, True), hidden=8, heads=2, kv_heads=1, head_dim=4, inner=8, vocab_size=100,
    max_positions=64, num_experts=8, top_k=2,
)  # fmt: skip
CONFIG = EngineConfig(retries=2, request_timeout=5.0)
SAMPLE = SamplingParams(max_new_tokens=2)


def answer(request: dict[str, Any], **changes: Any) -> bytes:
    """A right answer of two tokens to ``request``, with ``changes`` to its meta_info (None takes a key out)."""
    prompt, start = len(request["input_ids"]), request.get("routed_experts_start_len", 0)
    routes = np.broadcast_to(np.arange(2, dtype="<i4"), (prompt + 1 - start, 3, 2))
    meta = {
        "id": request["rid"],
        "finish_reason": {"type": "length", "length": 2},
        "weight_version": "3",
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]],
        "cached_tokens": 0,
        "routed_experts": base64.b64encode(routes.tobytes()).decode(),
        **changes,
    }
    kept = {key: value for key, value in meta.items() if value is not None}
    return orjson.dumps({"text": "", "output_ids": [7, 8], "meta_info": kept})


def client(*urls: str, **options: Any) -> SGLangEngine:
    return SGLangEngine(urls, FACTS, CONFIG, backoff=0.001, **options)


def failing(times: int, status: int, body: bytes = b'{"error":{"message":"as told"}}') -> tuple[Handler, list[str]]:
    """Fails the first ``times`` requests with ``status`` (0 hangs up), then answers; and the rids it saw."""
    seen: list[str] = []

    async def handler(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        if path != "/generate":
            return 200, b""
        seen.append(request["rid"])
        return (status, body) if len(seen) <= times else (200, answer(request))

    return handler, seen


@pytest.mark.parametrize("status", [0, 429, 500, 502, 503])
async def test_infrastructure_failures_are_retried(status: int) -> None:
    handler, seen = failing(2, status)
    async with serving(handler) as url:
        engine = client(url)
        got = await engine.generate([1, 2, 3], SAMPLE, routes_from=0, session="s")
        await engine.close()
    assert got.tokens == (7, 8)
    assert len(seen) == len(set(seen)) == 3, "each attempt is a request of its own"


@pytest.mark.parametrize(
    ("status", "error"), [(0, EngineUnreachable), (503, EngineOverloaded), (500, EngineUnreachable)]
)
async def test_the_budget_is_a_bound(status: int, error: type[Exception]) -> None:
    handler, seen = failing(99, status)
    async with serving(handler) as url:
        engine = client(url)
        with pytest.raises(error):
            await engine.generate([1, 2, 3], SAMPLE, routes_from=0, session="s")
        await engine.close()
    assert len(seen) == 3


@pytest.mark.parametrize("body", [b'{"error":{"message":"as told"}}', b'{"error":"as told"}', b"as told"])
async def test_a_rejected_request_is_not_retried(body: bytes) -> None:
    handler, seen = failing(1, 400, body)
    async with serving(handler) as url:
        engine = client(url)
        with pytest.raises(EngineRejected, match="answered 400: as told"):
            await engine.generate([1, 2, 3], SAMPLE, routes_from=0, session="s")
        await engine.close()
    assert len(seen) == 1


async def test_nobody_there_is_unreachable() -> None:
    async with serving(failing(0, 0)[0]) as url:
        pass
    engine = client(url)
    with pytest.raises(EngineUnreachable, match="ClientConnectorError"):
        await engine.generate([1], SAMPLE, routes_from=0, session="s")
    await engine.close()


async def test_where_no_engine_is_left_nothing_is_tried_again() -> None:
    handler, seen = failing(99, 0)
    async with serving(handler) as url:
        engine = client(url)
        engine.fleet.listeners.append(
            lambda before, after: (
                engine.fleet.retire(url, "the engine server died (signal SIGKILL): out of memory")
                if after.phase is Phase.SUSPECT
                else None
            )
        )
        with pytest.raises(EngineLost, match=r"no engine is left: the engine server died .*out of memory"):
            await engine.generate([1], SAMPLE, routes_from=0, session="s")
        await engine.close()
    assert len(seen) == 1


async def test_a_session_moves_away_from_an_engine_that_fails() -> None:
    broken, _ = failing(99, 0)
    sound, seen = failing(0, 0)
    async with serving(broken) as first, serving(sound) as second:
        engine = client(first, second)
        for _ in range(3):
            got = await engine.generate([1, 2], SAMPLE, routes_from=0, session="s")
            assert got.engine == second
        await engine.close()
    assert len(seen) == 3


BAD_META: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"routed_experts": base64.b64encode(bytes(72)).decode()}, RoutesMissingError, "expected 4 rows .*received 3 rows"),
    ({"routed_experts": base64.b64encode(b"\x09" * 96).decode()}, RoutesMissingError, "names expert"),
    ({"routed_experts": base64.b64encode(bytes(96)).decode()}, RoutesMissingError, "names expert 0 twice"),
    ({"output_token_logprobs": None}, EngineRejected, "expected 2 log-probs, received none"),
    ({"output_token_logprobs": [[-1.0, 7, None]]}, EngineRejected, "expected 2 log-probs, received 1"),
    ({"output_token_logprobs": [[-1.0, 7, None], [-1.0, 9, None]]}, EngineRejected, "other tokens"),
    ({"finish_reason": {"type": "surprise"}}, EngineRejected, "surprise"),
    ({"finish_reason": None}, EngineRejected, "finish_reason"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD_META)
async def test_an_answer_that_does_not_line_up_names_its_request(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    seen: list[str] = []

    async def handler(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        seen.append(request["rid"])
        return 200, answer(request, **changes)

    async with serving(handler) as url:
        engine = client(url)
        with pytest.raises(error, match=rf"request \w+ of session 'ep/3' \(3 prompt tokens\).*{message}"):
            await engine.generate([1, 2, 3], SAMPLE, routes_from=0, session="ep/3")
        await engine.close()
    assert len(seen) == 1, "a wrong answer is not asked for again"


ABORTED = {"type": "abort", "message": "by hand"}


async def test_whether_routes_may_be_absent_is_the_callers_to_say() -> None:
    got = await answered(lambda request: answer(request, routed_experts=None))
    assert (got.finish, got.tokens, got.routing) == (FinishReason.LENGTH, (7, 8), None)


async def answered(body: Callable[[dict[str, Any]], bytes]) -> Completion:
    async def handler(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        return 200, body(request)

    async with serving(handler) as url:
        engine = client(url)
        try:
            return await engine.generate([1, 2, 3], SAMPLE, routes_from=1, session="s")
        finally:
            await engine.close()


async def test_an_aborted_request_gives_what_came_with_its_rows() -> None:
    got = await answered(lambda request: answer(request, finish_reason=ABORTED))
    assert (got.finish, got.tokens, got.logprobs) == (FinishReason.ABORT, (7, 8), (-0.5, -0.25))
    assert got.routing is not None
    assert got.routing.tokens == 3


async def test_the_rows_of_an_aborted_request_are_counted_as_ever() -> None:
    short = base64.b64encode(bytes(72)).decode()
    with pytest.raises(RoutesMissingError, match=r"expected 3 rows .*received 6 rows"):
        await answered(lambda request: answer(request, finish_reason=ABORTED, routed_experts=short * 2))


@pytest.mark.parametrize(
    "body",
    [
        orjson.dumps({"text": "", "meta_info": {"finish_reason": ABORTED, "weight_version": "3"}}),
        orjson.dumps({"output_ids": [], "meta_info": {"finish_reason": ABORTED, "weight_version": "3"}}),
    ],
)
async def test_a_request_aborted_while_queued_gives_nothing(body: bytes) -> None:
    got = await answered(lambda request: body)
    assert (got.finish, got.tokens, got.routing, got.weight_version) == (FinishReason.ABORT, (), None, "3")


async def test_what_a_retraction_left_without_routes_is_not_kept() -> None:
    got = await answered(lambda request: answer(request, finish_reason=ABORTED, routed_experts=None))
    assert (got.finish, got.tokens, got.logprobs, got.routing) == (FinishReason.ABORT, (), (), None)


async def test_a_request_turned_away_in_an_answer_is_retried() -> None:
    seen: list[str] = []

    async def handler(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        seen.append(request["rid"])
        return 200, answer(request, **({"finish_reason": ABORTED | {"status_code": 503}} if len(seen) < 3 else {}))

    async with serving(handler) as url:
        engine = client(url)
        assert (await engine.generate([1, 2, 3], SAMPLE, routes_from=0, session="s")).tokens == (7, 8)
        await engine.close()
    assert len(seen) == 3


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"meta_info":{},"output_ids":7}', b"<html>"])
async def test_what_is_not_sglang_is_said(body: bytes) -> None:
    async def handler(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        return 200, body

    async with serving(handler) as url:
        engine = client(url)
        with pytest.raises(EngineRejected, match="not a response of SGLang"):
            await engine.generate([1, 2, 3], SAMPLE, routes_from=0, session="s")
        await engine.close()


async def test_each_weight_version_within_a_turn_has_its_span() -> None:
    versions = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]

    async def handler(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        return 200, answer(request, weight_versions=versions)

    async with serving(handler) as url:
        engine = client(url)
        got = await engine.generate([1, 2, 3], SAMPLE, routes_from=1, session="s")
        await engine.close()
    assert (got.versions, got.retractions) == ((VersionSpan(0, 1, "3"), VersionSpan(1, 2, "4")), 0)
    assert got.routing is not None
    assert got.routing.spans == (
        Span(0, 1, "3", url, SpanKind.PREFILLED),
        Span(1, 2, "3", url, SpanKind.SAMPLED),
        Span(2, 3, "4", url, SpanKind.SAMPLED),
    )


async def test_rows_of_a_retracted_request_are_not_called_sampled() -> None:
    """Its tokens were computed again, some of them by other weights, and it does not say how many."""
    versions = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    got = await answered(lambda request: answer(request, weight_versions=versions, num_retractions=1))
    assert (got.versions, got.retractions) == ((VersionSpan(0, 1, "3"), VersionSpan(1, 2, "4")), 1)
    assert got.routing is not None
    kinds = [(span.start, span.stop, span.weight_version, span.kind) for span in got.routing.spans]
    assert kinds == [(0, 1, "4", SpanKind.PREFILLED), (1, 3, "4", SpanKind.RECOMPUTED)]


def evaluated(request: dict[str, Any], **changes: Any) -> bytes:
    """A right answer to an evaluation of tokens, each of log-prob -1."""
    entries = [[None if at == 0 else -1.0, token, None] for at, token in enumerate(request["input_ids"])]
    meta = {"finish_reason": {"type": "length", "length": 0}, "weight_version": "7", "input_token_logprobs": entries}
    return orjson.dumps({"text": "", "output_ids": [], "meta_info": meta | changes})


async def rescored(*answers: Callable[[dict[str, Any]], tuple[int, bytes]]) -> tuple[Scores, list[dict[str, Any]]]:
    """What rescoring three tokens gives where the server answers so, the last of them ever after; and the requests."""
    asked: list[dict[str, Any]] = []

    async def handler(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        asked.append(request)
        return answers[min(len(asked), len(answers)) - 1](request)

    async with serving(handler) as url:
        engine = client(url)
        try:
            return await engine.rescore([1, 2, 3], session="s"), asked
        finally:
            await engine.close()


async def test_an_evaluation_asks_for_every_token_and_no_routes() -> None:
    scores, (request,) = await rescored(lambda request: (200, evaluated(request)))
    assert scores == Scores((0.0, -1.0, -1.0), "7")
    assert request["logprob_start_len"] == 0, "or SGLang takes the prefix from its cache, which has no log-probs"
    assert request["sampling_params"]["max_new_tokens"] == 0
    assert "return_routed_experts" not in request


@pytest.mark.parametrize(
    "failure",
    [
        lambda request: (503, b"busy"),
        lambda request: (0, b""),
        lambda request: (200, evaluated(request, finish_reason={"type": "abort", "message": "paused"})),
    ],
)
async def test_an_evaluation_that_the_infrastructure_broke_is_tried_again(failure: Any) -> None:
    scores, asked = await rescored(failure, failure, lambda request: (200, evaluated(request)))
    assert scores.logprobs == (0.0, -1.0, -1.0)
    assert len({request["rid"] for request in asked}) == 3
    with pytest.raises((EngineUnreachable, EngineOverloaded, EngineAborted)):
        await rescored(failure)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_token_logprobs": [[None, 1, None], [-1.0, 2, None], [None, 3, None]]}, "a log-prob is null"),
        ({"input_token_logprobs": [[None, 1, None], [-1.0, 9, None], [-1.0, 3, None]]}, "received 3 for other tokens"),
        ({"input_token_logprobs": [[None, 1, None]]}, "received 1 for other tokens"),
        ({"input_token_logprobs": None}, "received 0 for other tokens"),
    ],
)
async def test_a_wrong_evaluation_is_refused_and_not_asked_again(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineRejected, match=message):
        await rescored(lambda request: (200, evaluated(request, **changes)), lambda request: (200, evaluated(request)))


async def test_cancelling_aborts_the_request_before_it_is_raised() -> None:
    arrived, aborted = asyncio.Event(), list[str]()

    async def handler(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/abort_request":
            aborted.append(request["rid"])
            return 200, b""
        aborted.append("started " + request["rid"])
        arrived.set()
        await asyncio.sleep(60)
        return 0, b""

    async with serving(handler) as url:
        engine = client(url)
        task = asyncio.ensure_future(engine.generate([1], SAMPLE, routes_from=0, session="s"))
        await asyncio.wait_for(arrived.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
        assert aborted == [f"started {aborted[1]}", aborted[1]]
        await engine.close()


async def test_a_request_that_takes_too_long_is_aborted_and_retried() -> None:
    aborted, seen = list[str](), list[str]()

    async def handler(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/abort_request":
            aborted.append(request["rid"])
            return 200, b""
        seen.append(request["rid"])
        if len(seen) == 1:
            await asyncio.sleep(60)
        return 200, answer(request)

    async with serving(handler) as url:
        engine = SGLangEngine(url, FACTS, EngineConfig(retries=1, request_timeout=0.2), backoff=0.001)
        assert (await engine.generate([1], SAMPLE, routes_from=0, session="s")).tokens == (7, 8)
        await engine.close()
    assert aborted == seen[:1]


async def test_one_that_is_late_once_keeps_its_session() -> None:
    """It holds the prefix; another would compute all of it again."""
    seen: dict[str, list[str]] = {"first": [], "second": []}

    def engine_named(name: str) -> Handler:
        async def handler(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
            if path == "/generate":
                seen[name].append(request["rid"])
                if len(seen["first"]) == 1:
                    await asyncio.sleep(60)
                return 200, answer(request)
            return 200, b""

        return handler

    async with serving(engine_named("first")) as first, serving(engine_named("second")) as second:
        engine = SGLangEngine((first, second), FACTS, EngineConfig(retries=1, request_timeout=0.2), backoff=0.001)
        assert (await engine.generate([1], SAMPLE, routes_from=0, session="s")).engine == first
        await engine.close()
    assert (len(seen["first"]), len(seen["second"])) == (2, 0)


async def test_two_dead_of_eight_cost_each_session_at_most_one_retry() -> None:
    attempts = list[int]()

    def answering(status: int) -> Handler:
        async def handler(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
            attempts.append(status)
            return status, answer(request) if status else b""  # 0 closes the connection

        return handler

    async with AsyncExitStack() as stack:
        dead = [await stack.enter_async_context(serving(answering(0))) for _ in range(2)]
        urls = [await stack.enter_async_context(serving(answering(200))) for _ in range(6)]
        engine = client(*dead, *urls)
        stack.push_async_callback(engine.close)
        sessions = [engine.generate([1], SAMPLE, routes_from=0, session=f"s{n}") for n in range(200)]
        assert not {got.engine for got in await asyncio.gather(*sessions)} & set(dead)
    assert len(attempts) == 250, "the 50 that began at a dead one were sent once more"


async def test_an_engine_is_sent_no_more_than_it_runs_at_once() -> None:
    """What waits for a slot waits here, and its time-out has not begun: ten requests of 0.1 s, two at once."""
    running, most = 0, 0

    async def handler(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        nonlocal running, most
        if path == "/v1/loads":
            return 200, orjson.dumps({"loads": [{"max_running_requests": 2}]})
        if path == "/generate":
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.1)
            running -= 1
            return 200, answer(request)
        return 200, b"{}"

    async with (
        serving(handler) as url,
        SGLangEngine(url, FACTS, EngineConfig(retries=0, request_timeout=0.4), backoff=0.001) as engine,
    ):
        sampled = [engine.generate([1, 2, 3], SAMPLE, routes_from=0, session=str(n)) for n in range(10)]
        assert len(await asyncio.gather(*sampled)) == 10
    assert most == 2


async def test_a_large_answer_is_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set[int]()
    monkeypatch.setattr("agent_rl.engine.sglang._LARGE_BYTES", 1)
    monkeypatch.setattr(
        "agent_rl.engine.sglang.read_completion",
        lambda *given: threads.add(threading.get_ident()) or read_completion(*given),
    )
    assert (await answered(answer)).tokens == (7, 8)
    assert threads
    assert threading.get_ident() not in threads


async def test_entering_finds_an_engine_without_capture() -> None:
    asked: list[str] = []

    async def handler(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        asked.append(path)
        return 200, answer(request, routed_experts=None) if path == "/generate" else b"{}"

    async with serving(handler) as url:
        with pytest.raises(RoutesMissingError, match="the engine sends no routes: start it with --enable"):
            async with client(url):
                pass
    assert asked[:3] == ["/server_info", "/model_info", "/continue_generation"], (
        "one that was left paused would never answer"
    )


async def test_addresses_that_do_not_answer_are_told_with_their_key() -> None:
    async with serving(_no_page) as other, serving(_model_info) as good:
        urls = (good, "http://127.0.0.1:1", other, "http://[::1")
        with pytest.raises(UserError) as raised:
            await check_engines(urls, seconds=5.0)
    message = str(raised.value)
    assert message.startswith("engine.urls: http://127.0.0.1:1/model_info: no response (ClientConnectorError")
    assert f"{other}/model_info answered 404" in message
    assert "http://[::1/model_info: not the address of a server" in message
    assert good not in message
    assert "\n" not in message


async def test_an_address_that_keeps_silent_is_waited_for_within_a_bound() -> None:
    async def silent(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(silent) as url:
        with pytest.raises(UserError, match=f"engine.urls: {url}/model_info: no answer within 0.2 s"):
            await check_engines([url], seconds=0.2)


async def test_opening_a_dead_engine_names_the_key(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"engine\.urls: http://127\.0\.0\.1:1/model_info: no response \(ClientConnectorError"
    ):
        async with open_engine(EngineConfig(urls=("http://127.0.0.1:1",)), model, FACTS, tmp_path):
            pass


async def _no_page(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    return 404, b"<html>no such page</html>"


async def _model_info(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    assert path == "/model_info"
    return 200, b'{"model_path": "models/tiny-moe"}'


SERVER_INFO = {
    "tp_size": 4, "pp_size": 1, "dp_size": 1, "enable_dp_attention": False, "enable_hierarchical_cache": False,
    "speculative_algorithm": None, "speculative_eagle_topk": None, "chunked_prefill_size": 4096,
    "disaggregation_mode": "null", "moe_runner_backend": "auto",
}  # fmt: skip


@pytest.mark.parametrize(
    ("harmful", "message"),
    [
        ({"pp_size": 2}, "--pp-size above 1: routes and weights reach only its first stage"),
        ({"dp_size": 2}, "--dp-size above 1: .*start one engine per rank"),
        ({"enable_dp_attention": True}, "--enable-dp-attention: .*issue 31100"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache: .*issue 26975"),
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm NGRAM: .*issue 37949"),
        ({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4}, "--speculative-eagle-topk above 1: "),
        ({"chunked_prefill_size": -1}, "--chunked-prefill-size -1: .*issue 26860"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode: "),
        ({"moe_runner_backend": "flashinfer_trtllm"}, "--moe-runner-backend .*use triton"),
    ],
)
async def test_server_options_that_do_harm_are_refused(harmful: dict[str, Any], message: str) -> None:
    async def handler(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        assert path == "/server_info"
        return 200, orjson.dumps(SERVER_INFO | harmful)

    async with serving(handler) as url:
        with pytest.raises(UserError, match=f"the engine at {url} was started with {message}"):
            async with client(url):
                pass


def test_every_refused_option_is_tried() -> None:
    assert len(UNSUPPORTED_ARGS) == 9
    assert unsupported_reason(SERVER_INFO) is None
    assert unsupported_reason(SERVER_INFO | {"enable_hierarchical_cache": True}, routes=False) is None
    assert unsupported_reason(SERVER_INFO | {"pp_size": 2}, routes=False) is not None
    assert unsupported_reason(SERVER_INFO | {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}) is None


async def test_a_request_leaves_no_garbage_for_a_collection_that_stops_the_loop() -> None:
    async def handler(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        return 200, answer(request)

    async with serving(handler) as url:
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
    ("path", "key", "values", "told"),
    [
        ("/server_info", "version", ("0.5.23", "0.5.24"), "has SGLang 0.5.24, and those before it 0.5.23"),
        (
            "/model_info",
            "tokenizer_path",
            ("/a/Qwen3", "/b/Other"),
            "has the tokenizer Other, and those before it Qwen3",
        ),
    ],
)
async def test_engines_that_differ_are_one_line(path: str, key: str, values: tuple[str, str], told: str) -> None:
    def engine_with(value: str) -> Handler:
        async def handler(asked: str, request: dict[str, Any]) -> tuple[int, bytes]:
            return 200, orjson.dumps({key: value} if asked == path else {})

        return handler

    async with serving(engine_with(values[0])) as first, serving(engine_with(values[1])) as second:
        with pytest.raises(UserError, match=f"^the engine at {second} {told}: make them alike$"):
            async with client(first, second, routes=False):
                pass


async def test_weights_of_different_versions_are_one_line(model: Path, tmp_path: Path) -> None:
    """In a run that publishes none of its own."""

    def engine_at(version: str) -> Handler:
        async def handler(asked: str, request: dict[str, Any]) -> tuple[int, bytes]:
            return 200, orjson.dumps({"weight_version": version} if asked == "/model_info" else {})

        return handler

    async with serving(engine_at("3")) as first, serving(engine_at("default")) as second:
        with pytest.raises(UserError) as raised:
            async with open_engine(EngineConfig(urls=(first, second)), model, FACTS, tmp_path, routes=False):
                pass
    found = f"{first} has '3', {second} has 'default'"
    assert str(raised.value).startswith(f"engine.urls: their weights are of different versions ({found}): ")
