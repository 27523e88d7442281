"""Weights on their way to engines: buckets, refusals, and the real SGLang server's log-probs afterwards."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from agent_rl.config import EngineConfig, RunConfig
from agent_rl.engine.facts import read_facts
from agent_rl.engine.launch import EngineServer
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.errors import WeightSyncError
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.types import Sample, SamplingParams

torch = pytest.importorskip("torch", reason="needs the trainer environment")

from agent_rl.train.publish import buckets  # noqa: E402

ENGINE_PYTHON = Path(__file__).resolve().parents[2] / ".venv-engine" / "bin" / "python"
TOKENS = [int(token) for token in np.random.default_rng(5).integers(2, 60, 48)]
Config = Callable[..., RunConfig]
Make = Callable[..., Sample]


def weights() -> list[tuple[str, torch.Tensor]]:
    sizes = {"a": (3, 4), "b": (5,), "c": (2, 2, 2), "d": (40,)}
    tensors: Iterator[torch.Tensor] = iter(torch.arange(100.0).split([12, 5, 8, 40, 35]))
    return [(name, next(tensors).reshape(size)) for name, size in sizes.items()]


@pytest.mark.parametrize("limit", [1, 48, 60, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_hold_every_tensor_once_in_order(limit: int, dtype: torch.dtype) -> None:
    sent = list(buckets(weights(), dtype, limit=limit))
    assert [bucket.last for bucket in sent] == [False] * (len(sent) - 1) + [True]
    received = {}
    for bucket in sent:
        assert bucket.dtype == str(dtype).removeprefix("torch.")
        assert len(bucket.names) == 1 or bucket.data.nbytes <= limit
        offset = 0
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            size = int(np.prod(shape)) * dtype.itemsize
            received[name] = bucket.data[offset : offset + size].view(dtype).reshape(shape)
            offset += size
        assert offset == bucket.data.nbytes
    assert list(received) == [name for name, _ in weights()]
    for name, tensor in weights():
        torch.testing.assert_close(received[name], tensor.to(dtype), rtol=0, atol=0)


def test_no_weights_is_an_error() -> None:
    with pytest.raises(WeightSyncError, match="no weights"):
        list(buckets([], torch.float32))


@pytest.mark.megatron
@pytest.mark.slow
async def test_an_engine_that_is_not_there_is_told_at_once(run_config: Config, make_sample: Make) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    async with RayTrainer(run_config()) as trainer:
        async with asyncio.timeout(60):
            with pytest.raises(WeightSyncError, match=f"127.0.0.1:{free}.*no answer"):
                await trainer.publish([f"http://127.0.0.1:{free}"], "1")
        assert await trainer.logprobs([make_sample(9, 1)], replay=True), "the trainer lives on"


async def sampled(engine: SGLangEngine, session: str, advantage: float) -> Sample:
    """One sampled continuation of a prompt with its routes, as a trainer's sample."""
    prompt = TOKENS[:16]
    answer = await engine.generate(prompt, SamplingParams(max_new_tokens=40), routes_from=0, session=session)
    assert answer.routing is not None
    tokens = np.array([*prompt, *answer.tokens], np.int32)
    routing = answer.routing
    assert routing.tokens == len(tokens) - 1
    experts = np.concatenate([routing.experts, np.zeros_like(routing.experts[:1])])
    present = np.append(routing.present, False)
    return Sample(
        tokens=tokens,
        loss_mask=np.arange(len(tokens)) >= len(prompt),
        logprobs=np.array([*[0.0] * len(prompt), *answer.logprobs], np.float32),
        advantage=advantage,
        routing=type(routing)(experts, present, routing.spans, routing.num_experts),
    )


@pytest.mark.megatron
@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("dtype", "worst", "mean"), [("float32", 2e-4, 2e-5), ("bfloat16", 3.0, 0.3)])
async def test_the_engine_takes_what_the_trainer_learned(
    dtype: str, worst: float, mean: float, run_config: Config, make_sample: Make, tiny_moe: Path, tmp_path: Path
) -> None:
    engine_config = EngineConfig.model_validate(
        {"python": str(ENGINE_PYTHON), "dtype": dtype, "device": "cpu", "max_total_tokens": 4096}
    )
    config = run_config(lr=1e-2, microbatch_tokens=256).model_copy(update={"engine": engine_config})
    fixed = Sample(np.array(TOKENS, np.int32), np.ones(len(TOKENS), bool), np.zeros(len(TOKENS), "f4"), 0.0, None)
    async with (
        RayTrainer(config) as trainer,
        EngineServer(engine_config, tiny_moe, tmp_path / "engine.log") as server,
        SGLangEngine(server.url, read_facts(tiny_moe), engine_config) as engine,
    ):

        async def gap() -> np.ndarray:
            mine = (await trainer.logprobs([fixed], replay=False))[0]
            return np.abs(np.array(mine) - np.array(await engine.score(TOKENS)))

        assert (await gap()).mean() < mean
        for version in ("1", "2"):  # the second goes through the same group
            batch = [await sampled(engine, f"{version}-{i}", (-1.0) ** i) for i in range(6)]
            metrics = await trainer.step(batch, measure_native=True)
            assert metrics["r3/coverage"] == 1
            assert metrics["r3/router_mismatch"] == 0
            assert metrics["mismatch/logprob_abs_diff"] < mean, "routes or log-probs are not where they belong"
            if dtype == "float32":
                assert metrics["mismatch_native/router_mismatch"] == 0
            stale = await gap()
            assert await trainer.publish([server.url], version) > 0
            fresh = await gap()
            assert fresh.mean() < mean
            assert fresh.max() < worst
            assert fresh.mean() < stale.mean() / 2, "the engine still has the weights of before the update"
            answer = await engine.generate(TOKENS, SamplingParams(max_new_tokens=1), routes_from=None, session="v")
            assert answer.weight_version == version
