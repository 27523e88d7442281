"""Constrained replies of an agent program in the real server and the real trainer: whole, interrupted and trained."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_control import tell
from support.endpoint_sessions import CHAT, MODEL, served

from agent_rl.config import EngineConfig, RunConfig
from agent_rl.engine.launch import EngineServer
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.models.spec import read_model_spec
from agent_rl.render import ChatRenderer
from agent_rl.rollout.episode import MAX_ABORTS
from agent_rl.types import Sample, drawn_mask

torch = pytest.importorskip("torch", reason="needs the trainer environment")
from agent_rl.train.ray_trainer import RayTrainer  # noqa: E402

pytestmark = [pytest.mark.megatron, pytest.mark.sglang, pytest.mark.exhaustive, pytest.mark.timeout(1200)]
TEXT = {"type": "string", "minLength": 200, "maxLength": 300}
PARAMETERS = {
    "type": "object",
    "properties": {"note": TEXT, "seconds": {"type": "integer"}},
    "required": ["note", "seconds"],
}
TOOL = {"type": "function", "function": {"name": "bash", "parameters": PARAMETERS, "strict": True}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": PARAMETERS}}
REQUESTS: list[dict[str, Any]] = [
    {"tools": [TOOL], "tool_choice": "required"},
    {"response_format": FORMAT},
    {"tools": [TOOL], "response_format": FORMAT},
    {"max_tokens": 60},
]
FREE = len(REQUESTS) - 1


@pytest.fixture(scope="module")
def model() -> Path:
    return MODEL


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


@pytest.mark.usefixtures("megatron_shim", "one_ray")
async def test_constrained_replies_are_trained_with_the_engines_log_probs(
    engine: SGLangEngine, engine_config: EngineConfig
) -> None:
    renderer = ChatRenderer(MODEL)
    kinds = [0, 1, 2, 0, *[FREE] * 8]
    whole = [await replied(engine, renderer, number, kind, interrupted=False) for number, kind in enumerate(kinds)]
    parts = [await replied(engine, renderer, number, number, interrupted=True) for number in range(FREE)]
    train = {"device": "cpu", "microbatch_tokens": 512, "lr": 1e-3}
    config = RunConfig.model_validate(
        {"name": "test", "model": MODEL, "engine": engine_config.model_dump(), "train": train}
    )
    gaps: dict[str, list[float]] = {}
    async with RayTrainer(config) as trainer:
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
