"""Constrained replies of the real SGLang server with the shipped model: calls in every format that follow their schema
and end, and replies with the engine's log-probs in the real trainer: whole, interrupted and trained."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from server_control import tell
from support.endpoint_sessions import CHAT, MODEL, served

from agent_rl.config import EngineConfig, RunConfig
from agent_rl.engine.launch import EngineServer
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.models.spec import read_model_spec
from agent_rl.render import ChatRenderer
from agent_rl.rollout.episode import MAX_ABORTS
from agent_rl.types import Sample, drawn_mask
from tools.formats import TOOL_FORMATS

pytestmark = [pytest.mark.sglang, pytest.mark.exhaustive, pytest.mark.timeout(1800)]
CALLS = 200
SUBMIT = {"type": "function", "function": {"name": "submit", "parameters": {"type": "object", "properties": {}}}}
PARAMETERS = {
    "type": "object",
    "properties": {
        "command": {"enum": ["ls", "pwd -P", "cat a b"]},
        "lines": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "options": {"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"]},
        "seconds": {"type": "integer"},
    },
    "required": ["command", "lines", "options"],
}
"""No text of its own, so that only white space between tokens could take a call to the length limit. A call has up to
270 tokens of the shipped tokenizer, in the format deepseek-dsml."""
RUN = {"type": "function", "function": {"name": "bash", "parameters": PARAMETERS, "strict": True}}


TEXT = {"type": "string", "minLength": 200, "maxLength": 300}
NOTE_PARAMETERS = {
    "type": "object",
    "properties": {"note": TEXT, "seconds": {"type": "integer"}},
    "required": ["note", "seconds"],
}
NOTE = {"type": "function", "function": {"name": "bash", "parameters": NOTE_PARAMETERS, "strict": True}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": NOTE_PARAMETERS}}
REQUESTS: list[dict[str, Any]] = [
    {"tools": [NOTE], "tool_choice": "required"},
    {"response_format": FORMAT},
    {"tools": [NOTE], "response_format": FORMAT},
    {"max_tokens": 60},
]
FREE = len(REQUESTS) - 1


@pytest.fixture(scope="module")
def engine_config(engine_config: EngineConfig) -> EngineConfig:
    return engine_config.model_copy(
        update={"max_total_tokens": 16384, "threads": 1, "request_timeout": 120.0, "start_timeout": 600.0}
    )


@pytest.fixture(scope="module")
def server(engine_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EngineServer(engine_config, MODEL, tmp_path_factory.mktemp("engine") / "engine.log")
    asyncio.run(server.start())
    yield server.url
    asyncio.run(server.stop())


@pytest.fixture
async def engine(server: str, engine_config: EngineConfig) -> AsyncIterator[SGLangEngine]:
    async with SGLangEngine([server], read_model_spec(MODEL), engine_config, masks=True) as client:
        yield client


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return ChatRenderer(MODEL)


@pytest.mark.parametrize("fmt", [name for name in TOOL_FORMATS.built_in if name != "mini-swe-agent"])
async def test_forced_calls_follow_their_schema_and_end(engine: SGLangEngine, renderer: ChatRenderer, fmt: str) -> None:
    def valid(name: str, arguments: dict[str, Any]) -> bool:
        schema = PARAMETERS if name == "bash" else SUBMIT["function"]["parameters"]
        return Draft202012Validator({**schema, "additionalProperties": False}).is_valid(arguments)

    replies, texts = await forced_replies(engine, renderer, fmt, [RUN, SUBMIT])
    ended = Counter(reply["finish_reason"] for reply in replies)
    space = max((run for text in texts for run in re.findall(r"\s+", text)), key=len, default="")
    print(f"| `{fmt}` | {ended['tool_calls']} of {CALLS} | {space!r} |")
    assert ended == {"tool_calls": CALLS}
    assert len(space) <= 3, "what the format writes between two values"
    calls = [call["function"] for reply in replies for call in reply["message"]["tool_calls"]]
    assert all(valid(call["name"], json.loads(call["arguments"])) for call in calls)
    assert {call["name"] for call in calls} == {"bash", "submit"}


async def test_a_call_of_a_strict_tool_follows_its_schema_whenever_it_is_called(
    engine: SGLangEngine, renderer: ChatRenderer
) -> None:
    """The shipped model calls the tool by itself, with other arguments than the schema allows."""
    pages = {"type": "object", "properties": {"page": {"enum": ["one", "two"]}}, "required": ["page"]}
    editor = {"type": "function", "function": {"name": "file_editor", "parameters": pages}}
    strict = {"type": "function", "function": {**editor["function"], "strict": True}}
    valid, counts = Draft202012Validator({**pages, "additionalProperties": False}).is_valid, Counter[str]()
    async with served(renderer, engine=engine, fmt="xml", max_new_tokens=64, max_turns=2 * CALLS) as opened:
        opened.client.timeout = 600
        for kind, tool in (("free", editor), ("strict", strict)):

            async def ask(number: int, kind: str = kind, tool: Any = tool) -> None:
                asked = f"Cancel the fee of `item({number})` in stock.py."
                messages = [{"role": "system", "content": f"Fix the {kind} order."}, {"role": "user", "content": asked}]
                message = await opened.reply(messages, tools=[tool])
                calls = [call["function"] for call in message.get("tool_calls", ())]
                counts.update(
                    f"{kind}, {valid(json.loads(call['arguments']))}"
                    for call in calls
                    if call["name"] == "file_editor"  # it also calls a tool that is not offered
                )

            await asyncio.gather(*map(ask, range(64)))
        kept = [node.kept for node in opened.session.tree.nodes]
    print(counts)
    assert counts["free, False"] > 32
    assert counts["strict, True"] > 32
    assert counts["strict, False"] == 0
    assert any(parts[0][1] is None and parts[-1][1] is not None for parts in kept), "only the call has a mask"


async def forced_replies(
    engine: SGLangEngine, renderer: ChatRenderer, fmt: str, tools: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The choices of :data:`CALLS` requests that force a call, 16 at a time, and the sampled texts."""
    slots = asyncio.Semaphore(16)
    async with served(renderer, engine=engine, fmt=fmt, max_new_tokens=512, max_turns=CALLS) as opened:

        async def one(number: int) -> dict[str, Any]:
            messages = [{"role": "user", "content": f"Say {number}."}]
            body = {"messages": messages, "tools": tools, "tool_choice": "required"}
            async with slots:
                response = await opened.client.post(CHAT, json=body, timeout=600)
            (choice,) = response.json()["choices"]
            return choice

        choices = await asyncio.gather(*(one(number) for number in range(CALLS)))
        return choices, [turn.text for turn in opened.session.turns()]


async def replied(engine: SGLangEngine, renderer: ChatRenderer, number: int, kind: int, *, interrupted: bool) -> Sample:
    """The branch of a conversation with one reply. An interrupted one is aborted by the engine and continues."""
    body = REQUESTS[kind]
    async with served(renderer, engine=engine, max_new_tokens=600) as opened:
        messages = [{"role": "user", "content": f"Say {number}."}]
        request = asyncio.create_task(opened.client.post(CHAT, json={"messages": messages, **body}, timeout=300))
        for _ in range(MAX_ABORTS if interrupted else 0):
            nodes = opened.session.tree.nodes
            if request.done() or (nodes and len(nodes[0].route_rows) > 1):
                break
            await asyncio.sleep(0.3)
            await tell(engine, "abort_request", abort_all=True)
        (choice,) = (await request).json()["choices"]
        (node,) = opened.session.tree.nodes
        if interrupted:
            assert len(node.route_rows) > 1, "it was not interrupted after its first token"
        message = choice["message"]
        if kind != FREE:
            assert choice["finish_reason"] != "length"
            calls = message.get("tool_calls")
            value = json.loads(calls[0]["function"]["arguments"] if calls else message["content"])
            assert list(value) == ["note", "seconds"]
            assert len(value["note"]) >= 200
        (branch,) = opened.session.tree.branches()
    return Sample(branch.tokens, branch.loss_mask, branch.logprobs, (-1.0) ** number, branch.routing, kept=branch.kept)


@pytest.mark.megatron
@pytest.mark.usefixtures("megatron_shim", "one_ray")
async def test_constrained_replies_are_trained_with_the_engines_log_probs(
    engine: SGLangEngine, engine_config: EngineConfig, renderer: ChatRenderer
) -> None:
    ray_trainer = pytest.importorskip(
        "agent_rl.train.ray_trainer", reason="needs the trainer environment", exc_type=ImportError
    )
    kinds = [0, 1, 2, 0, *[FREE] * 8]
    whole = [await replied(engine, renderer, number, kind, interrupted=False) for number, kind in enumerate(kinds)]
    parts = [await replied(engine, renderer, number, number, interrupted=True) for number in range(FREE)]
    train = {"device": "cpu", "microbatch_tokens": 512, "lr": 1e-3}
    config = RunConfig.model_validate(
        {"name": "test", "model": MODEL, "engine": engine_config.model_dump(), "train": train}
    )
    gaps: dict[str, list[float]] = {}
    async with ray_trainer.RayTrainer(config) as trainer:
        samples = [*whole, *parts]
        for index, (sample, (mine, _)) in enumerate(
            zip(samples, await trainer.routes(samples, replay=True, temperature=1.0), strict=True)
        ):
            mask, drawn = np.array(sample.loss_mask), drawn_mask(sample)
            assert (mine[mask & ~drawn] == 0).all()
            assert (sample.logprobs[mask & ~drawn] == 0).all()
            kind = "free" if sample.kept is None else "constrained" if index < len(whole) else "interrupted"
            gaps.setdefault(kind, []).extend(np.abs(mine[drawn] - sample.logprobs[drawn]).tolist())
        print({kind: (len(gap), float(np.mean(gap)), max(gap)) for kind, gap in gaps.items()})
        assert set(gaps) == {"free", "constrained", "interrupted"}
        assert all(np.mean(gap) < 5e-6 and max(gap) < 2e-4 for gap in gaps.values())
        metrics = await trainer.step(samples, measure_without_replay=True)
    print({name: metrics[name] for name in sorted(metrics) if "mismatch" in name or "sampled" in name})
    assert metrics["train/updates"] == 1
    assert metrics["train/sampled_tokens"] == sum(drawn_mask(sample).sum() for sample in samples)
    assert metrics["r3/coverage"] == 1
    assert metrics["r3/router_mismatch"] == 0
    assert metrics["mismatch/logprob_abs_diff"] < 5e-6
    assert metrics["mismatch/k3_kl"] < 1e-8
