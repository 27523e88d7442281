"""The client against the real server: tokens, log-probs and routes of one and of many turns."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from engine_proxy import Fault, proxy
from server_control import idle, running, tell
from support.memory_env import run_memory_episode
from support.routing_rows import slice_rows
from support.trajectories import trajectory

from agent_rl.config import GuardConfig, R3Config, RolloutConfig
from agent_rl.engine.request import generate_body
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.errors import EngineRejected
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.group import GroupSettings, Limiter, collect_groups
from agent_rl.rollout.rescore import Rescorer
from agent_rl.rollout.route_audit import Auditor, audit_metrics
from agent_rl.rollout.scripted_policies import ByteRenderer
from agent_rl.rollout.transcript import Transcript
from agent_rl.types import FinishReason, RouteAudit, SamplingParams, Trajectory, VersionSpan
from agent_rl.utils.http import AsyncHttp
from envs import Task
from r3.routing import Routing, SpanKind, validate
from r3.stitch import RouteStitcher
from tools import Reasoning

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PROMPT = [int(token) for token in np.random.default_rng(7).integers(2, 250, 40)]
SAMPLE = SamplingParams(max_new_tokens=12)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12)


def same_sets(first: Routing, second: Routing) -> None:
    np.testing.assert_array_equal(np.sort(first.experts, axis=2), np.sort(second.experts, axis=2))


async def test_raw_routes_are_those_of_the_json_answer(engine: SGLangEngine, server_url: str) -> None:
    got = await engine.generate(PROMPT, GREEDY, routes_from=0, session="s")
    body = generate_body(PROMPT, GREEDY, 0, max_positions=512)
    async with AsyncHttp(30.0) as http:
        answer = orjson.loads(await http.post(f"{server_url}/generate", body))
    assert tuple(answer["output_ids"]) == got.tokens
    wide = base64.b64decode(answer["meta_info"]["routed_experts"])
    rows = np.frombuffer(wide, "<i4").reshape(51, 4, 2)
    np.testing.assert_array_equal(np.sort(rows, axis=2), np.sort(got.routing.experts, axis=2))


async def prefill(engine: SGLangEngine, tokens: list[int]) -> Routing:
    """Routes of all of ``tokens`` but the last, from one cold prefill."""
    await idle(engine)  # an answer may be here before its request is off the books
    cold = await engine.generate(tokens, SamplingParams(max_new_tokens=1), routes_from=0, session="prefill")
    assert cold.cached_tokens == 0
    assert cold.routing is not None
    return slice_rows(cold.routing, 0, len(tokens) - 1)


async def test_tokens_log_probs_and_rows_line_up(engine: SGLangEngine) -> None:
    got = await engine.generate(PROMPT, SAMPLE, routes_from=0, session="s")
    assert len(got.tokens) == len(got.logprobs) == 12
    assert got.finish is FinishReason.LENGTH
    assert got.routing is not None
    validate(got.routing)
    assert got.routing.experts.shape == (40 + 12 - 1, 4, 2)
    assert got.routing.experts.dtype == np.uint8
    assert [(span.start, span.stop, span.kind) for span in got.routing.spans] == [
        (0, 39, SpanKind.PREFILLED),
        (39, 51, SpanKind.SAMPLED),
    ]
    assert {span.weight_version for span in got.routing.spans} == {got.weight_version}
    assert 4 * 2 * 51 < got.wire_bytes < 4 * 4 * 2 * 51, "one byte per id"


async def test_the_last_id_of_the_vocabulary_is_scored(engine: SGLangEngine) -> None:
    prompt = [*PROMPT, engine.model_spec.vocab_size - 1]
    got = await engine.generate(prompt, SAMPLE, routes_from=None, session="s")
    scored = await engine.score([*prompt, *got.tokens])
    np.testing.assert_allclose(scored[41:], got.logprobs, atol=1e-4)
    assert (scored[0], len(scored)) == (0.0, 53)
    assert scored[40] < 0.0


async def test_a_rescoring_uses_no_cached_prefix_and_names_its_weights(engine: SGLangEngine) -> None:
    """SGLang has no log-probs for what it takes from its cache: each rescoring is computed whole."""
    got = await engine.generate(PROMPT, SAMPLE, routes_from=None, session="s")
    whole = [*PROMPT, *got.tokens]
    first, second = [await engine.rescore(whole, session="r") for _ in range(2)]
    assert len(first.logprobs) == len(second.logprobs) == 52
    assert min(first.logprobs[1:]) < max(first.logprobs[1:]) < 0.0
    np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-4)
    np.testing.assert_allclose(first.logprobs[40:], got.logprobs, atol=1e-4)
    assert first.weight_version == got.weight_version


async def test_rescored_log_probs_ignore_the_temperature(engine: SGLangEngine) -> None:
    """Why train.old_logprob.source rescore wants rollout.temperature 1: sampled ones are scaled, evaluated ones not."""
    cool = SamplingParams(temperature=0.5, max_new_tokens=12)
    got = await engine.generate(PROMPT, cool, routes_from=None, session="s")
    scored = (await engine.rescore([*PROMPT, *got.tokens], session="r")).logprobs[40:]
    assert np.abs(np.array(scored) - np.array(got.logprobs)).max() > 0.05


async def test_a_finished_trajectory_is_rescored_while_another_still_samples(engine: SGLangEngine) -> None:
    """The long episode of the group ends only after the short one's rescorings: they overlapped."""
    finished, evaluated = asyncio.Event(), asyncio.Event()

    async def run(task: Task) -> Trajectory:
        if not finished.is_set():
            finished.set()
            return await sampled(engine, SAMPLE, reward=1.0)
        async with asyncio.TaskGroup() as scope:
            request = scope.create_task(engine.generate(PROMPT, LONG, routes_from=None, session="long"))
            await evaluated.wait()
            assert not request.done(), "the engine was still sampling for the other episode"
            await tell(engine, "abort_request", abort_all=True)
        return await sampled(engine, SAMPLE, reward=0.0)

    rescorer = Rescorer(engine, n=3, limiter=Limiter(2))

    async def rescore(ended: Trajectory) -> Trajectory:
        got = await rescorer(ended)
        evaluated.set()
        return got

    settings = GroupSettings(size=2, rescore_uniform=True)
    async with asyncio.timeout(60):
        rollout = await collect_groups([Task("t", "e", {})], run, settings, limiter=Limiter(2), rescore=rescore)
    (group,) = rollout.groups
    for member in group.trajectories:
        assert member.rescored is not None
        assert member.rescored.values.shape == (3, 12)
        np.testing.assert_allclose(member.rescored.mean, member.logprobs[member.loss_mask], atol=1e-4)


async def sampled(engine: SGLangEngine, sampling: SamplingParams, *, reward: float) -> Trajectory:
    """A trajectory of one turn, as an episode would leave it."""
    got = await engine.generate(PROMPT, sampling, routes_from=None, session="s")
    mask = np.arange(len(PROMPT) + len(got.tokens)) >= len(PROMPT)
    logprobs = np.zeros(len(mask), np.float32)
    logprobs[mask] = got.logprobs
    made = trajectory(reward)
    return replace(
        made, tokens=np.array([*PROMPT, *got.tokens], np.int32), loss_mask=mask, logprobs=logprobs,
        versions=(VersionSpan(len(PROMPT), len(mask), got.weight_version),),
    )  # fmt: skip


async def test_turns_stitched_equal_one_prefill(engine: SGLangEngine) -> None:
    rng = np.random.default_rng(3)
    tokens, stitcher, received = list(PROMPT), RouteStitcher(moe_layers=4, top_k=2, num_experts=8), 0
    for turn in range(6):
        got = await engine.generate(tokens, SAMPLE, routes_from=stitcher.next_row, session="long")
        assert got.routing is not None
        received += got.routing.tokens
        tokens += got.tokens
        stitcher.append(got.routing, sequence=len(tokens))
        assert got.cached_tokens > 0 or turn == 0
        if turn < 5:
            tokens += rng.integers(2, 250, 9).tolist()
    stitched = stitcher.finish(len(tokens))
    validate(stitched)
    assert received == len(tokens) - 1, "each row crosses the wire exactly once"
    same_sets(slice_rows(stitched, 0, len(tokens) - 1), await prefill(engine, tokens))


class OpenThoughts(ByteRenderer):
    """Its prompts open thoughts; all of its tokens are in the model's vocabulary."""

    STOP = 255
    stop_token_ids = (STOP,)
    reasoning = Reasoning("<think>", "</think>", prompt_opens=True)


async def test_tokens_that_close_thoughts_have_the_routes_and_no_log_probs(engine: SGLangEngine) -> None:
    limits = {"max_turns": 4, "max_new_tokens": 24, "max_thinking_tokens": 8, "max_parse_failures": None}
    rules = EpisodeRules(RolloutConfig(describe_tools=False, **limits))
    made = await run_memory_episode(engine, rules=rules, renderer=OpenThoughts())
    closing, tokens = list(OpenThoughts.end_of_thoughts), made.tokens.tolist()
    closed = [turn for turn in made.turns if turn.inserted_tokens]
    assert len(closed) >= 3, "few turns of a random model end in eight tokens"
    for turn in closed:
        start = turn.prompt_tokens + 8
        assert tokens[start : start + len(closing)] == closing
        assert not made.loss_mask[start : start + len(closing)].any()
    assert int(made.loss_mask.sum()) == sum(turn.completion_tokens for turn in made.turns)
    assert made.routes_missing == 0
    audited = (await Auditor(engine, 1.0)(made, "audit")).audit
    assert (audited.cached_differing, audited.prefilled_differing) == (0, 0)
    assert audited.cached >= 0.9 * audited.prefilled > 0
    scored = np.array(await engine.score(tokens))
    np.testing.assert_allclose(made.logprobs[made.loss_mask], scored[made.loss_mask], atol=1e-4)
    same_sets(slice_rows(made.routing, 0, len(tokens) - 1), await prefill(engine, tokens))


class Mixes(Fault):
    """Every second answer brings the rows of the answer before it, as long as its own."""

    def __init__(self) -> None:
        self._before, self._answers = None, 0

    def rows(self, request: Any, answer: Any, rows: Any) -> Any:
        self._answers += 1
        before, self._before = self._before, rows
        wrong = self._answers % 2 == 0 and before is not None and request["sampling_params"]["max_new_tokens"] > 1
        return np.resize(before, rows.shape) if wrong else rows


@pytest.mark.parametrize("fault", [Fault, Mixes])
async def test_an_audit_under_load_finds_rows_of_other_requests_and_nothing_else(
    server: str, connect: Any, fault: type[Fault]
) -> None:
    async with proxy(server, fault()) as url, connect(url) as engine:

        async def episode(number: int) -> RouteAudit | None:
            talk = Transcript([number, *PROMPT], max_tokens=500, routes=R3Config())
            for turn in range(3):
                talk.observed([number, turn] * 5)
                session = f"session {number}"
                talk.sampled(await engine.generate(talk.tokens, SAMPLE, routes_from=talk.routes_from, session=session))
            tokens, mask, logprobs, routing = talk.arrays()
            made = replace(trajectory(1.0), tokens=tokens, loss_mask=mask, logprobs=logprobs, routing=routing)
            return (await Auditor(engine, 1.0)(made, session)).audit

        audits = await asyncio.gather(*(episode(number) for number in range(8)))
    found = audit_metrics([replace(trajectory(1.0), audit=audit) for audit in audits])
    assert found["r3/audit_trajectories"] == 8
    if fault is Mixes:
        assert found["r3/audit_mismatch"] > GuardConfig().audit.above
        assert found["r3/audit_cached_mismatch"] > GuardConfig().audit_cached.above
    else:
        assert found["r3/audit_mismatch"] == found["r3/audit_cached_mismatch"] == 0
        assert all(audit.cached >= 0.9 * audit.prefilled for audit in audits)


async def test_a_stop_token_ends_the_turn_and_is_kept(engine: SGLangEngine) -> None:
    greedy = SamplingParams(temperature=0.0, max_new_tokens=12)
    free = await engine.generate(PROMPT, greedy, routes_from=None, session="s")
    assert free.routing is None
    stop = free.tokens[4]
    stopping = replace(greedy, stop_token_ids=(stop,))
    stopped = await engine.generate(PROMPT, stopping, routes_from=0, session="s")
    assert stopped.finish is FinishReason.STOP
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert stopped.routing is not None
    assert stopped.routing.tokens == len(PROMPT) + len(stopped.tokens) - 1


async def test_a_wrong_request_is_rejected_with_the_servers_message(engine: SGLangEngine) -> None:
    with pytest.raises(EngineRejected, match=r"answered 400: .*routed_experts_start_len"):
        await engine.generate(PROMPT, SAMPLE, routes_from=len(PROMPT) + 1, session="s")
    with pytest.raises(EngineRejected, match="0 prompt tokens"):
        await engine.generate([], SAMPLE, routes_from=0, session="s")
    with pytest.raises(EngineRejected, match="2048 prompt tokens, expected between 1 and 2047"):
        await engine.generate([5] * 2048, SAMPLE, routes_from=0, session="s")


async def test_a_turn_is_limited_to_the_context(engine: SGLangEngine) -> None:
    got = await engine.generate([5] * 2030, SamplingParams(max_new_tokens=500), routes_from=2029, session="s")
    assert got.finish is FinishReason.LENGTH
    assert len(got.tokens) <= 18
    assert got.routing is not None
    assert got.routing.tokens == len(got.tokens)


LONG = SamplingParams(max_new_tokens=1900)


@pytest.mark.parametrize("rescoring", [False, True])
async def test_cancelling_the_caller_frees_the_server(engine: SGLangEngine, rescoring: bool) -> None:
    """Sampling 1,900 tokens or rescoring 500 times takes longer than 5 s on any machine without a GPU."""
    if rescoring:
        long = await sampled(engine, SamplingParams(max_new_tokens=300), reward=1.0)
        task = asyncio.create_task(Rescorer(engine, n=500, limiter=Limiter(1))(long))
    else:
        task = asyncio.create_task(engine.generate(PROMPT, LONG, routes_from=0, session="s"))
    await running(engine)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(20 if rescoring else 5):
        await idle(engine)


async def test_an_aborted_turn_continues_from_its_tokens(engine: SGLangEngine) -> None:
    tokens, stitcher, parts = list(PROMPT), RouteStitcher(moe_layers=4, top_k=2, num_experts=8), 0
    async with asyncio.timeout(60):
        while parts < 2:  # aborts that come before the first token leave nothing
            async with asyncio.TaskGroup() as group:
                task = group.create_task(engine.generate(tokens, LONG, routes_from=stitcher.next_row, session="s"))
                await running(engine)
                await tell(engine, "abort_request", abort_all=True)
            got = task.result()
            assert got.finish is FinishReason.ABORT
            assert (got.routing is None) == (not got.tokens)
            if got.tokens:
                tokens += got.tokens
                stitcher.append(got.routing, sequence=len(tokens), partial=True)
                parts += 1
    last = await engine.generate(tokens, SAMPLE, routes_from=stitcher.next_row, session="s")
    tokens += last.tokens
    stitcher.append(last.routing, sequence=len(tokens))
    assert stitcher.turns == 1
    stitched = stitcher.finish(len(tokens))
    validate(stitched)
    same_sets(slice_rows(stitched, 0, len(tokens) - 1), await prefill(engine, tokens))


async def test_info_describes_the_server(engine: SGLangEngine, model: Path) -> None:
    info = await engine.info()
    assert (info.model, info.captures_routes, info.dtype) == (str(model), True, "float32")
    assert info.max_total_tokens == 8192
