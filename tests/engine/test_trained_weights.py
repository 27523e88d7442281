"""The real trainer's weights in the real server: by process group, and from a Hugging Face export."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from server_control import load, running, tell

from agent_rl.config import EngineConfig, R3Config, RunConfig
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.rollout.transcript import Transcript
from agent_rl.types import Completion, FinishReason, Sample, SamplingParams
from agent_rl.weight_sync.receivers import WeightReceivers

torch = pytest.importorskip("torch", reason="needs the trainer environment")
from agent_rl.train.ray_trainer import RayTrainer  # noqa: E402
from agent_rl.weight_sync.logprob_gate import LIMITS  # noqa: E402
from agent_rl.weight_sync.sync import WeightSync  # noqa: E402

pytestmark = [pytest.mark.megatron, pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]
TOKENS = [int(token) for token in np.random.default_rng(5).integers(2, 250, 48)]


TEMPERATURE = 1.5
SAMPLINGS = [{}, {"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.2, "top_p": 0.95}]


async def sampled(engine: SGLangEngine, number: int) -> Sample:
    """Two turns after one prompt with their routes, as a trainer's sample. Samples differ in what sampling excludes.
    The second turn of every fifth is aborted and continues, and a prefix of each is cached."""
    truncation = SAMPLINGS[number % len(SAMPLINGS)]
    sampling = SamplingParams(temperature=TEMPERATURE, max_new_tokens=20, keep_mask=bool(truncation), **truncation)
    talk = Transcript(TOKENS[:16], max_tokens=1000, routes=R3Config())
    session = f"session {number}"

    async def request(sampling: SamplingParams) -> Completion:
        got = await engine.generate(talk.tokens, sampling, routes_from=talk.routes_from, session=session)
        talk.sampled(got)
        return got

    await request(sampling)
    talk.observed(TOKENS[16:24])
    while number % 5 == 1:
        async with asyncio.TaskGroup() as scope:
            task = scope.create_task(request(replace(sampling, max_new_tokens=600)))
            await running(engine)
            await tell(engine, "abort_request", abort_all=True)
        if task.result().tokens:
            assert task.result().finish is FinishReason.ABORT
            break
    assert (await request(sampling)).cached_tokens > 0
    tokens, loss_mask, logprobs, routing = talk.arrays()
    kept = talk.kept_tokens
    assert (kept is not None) == bool(truncation)
    if kept is not None:
        assert 2 < kept.counts.mean() < 230, "it would not matter"
    return Sample(tokens, loss_mask, logprobs, (-1.0) ** number, routing, kept=kept)


@pytest.fixture(scope="module")
def one_ray(ray_connection_is_closed: None) -> Iterator[None]:
    """A local Ray for the trainers of this module, which have up to four ranks."""
    from agent_rl.train.ray_session import ray_cluster

    with ray_cluster(None, cpus=4):
        yield


RANK = 8
LAYOUTS = {
    "tensor": {"world_size": 2, "tensor": 2},
    "pipeline": {"world_size": 2, "pipeline": 2},
    "context": {"world_size": 2, "context": 2},
    "tensor and pipeline": {"world_size": 4, "tensor": 2, "pipeline": 2},
    "data and pipeline": {"world_size": 4, "pipeline": 2},
    "experts and pipeline": {"world_size": 4, "pipeline": 2, "expert": 2},
}


def sent_bytes(model: Path, kind: str) -> int:
    """What an update brings, in float32: adapters of attention and experts, or everything."""
    from safetensors.numpy import load_file

    weights = load_file(model / "model.safetensors")
    if kind == "adapters":
        adapted = (weight.shape for name, weight in weights.items() if "_proj." in name)
        return 4 * sum(RANK * (outer + inner) for outer, inner in adapted)
    return sum(weight.nbytes for weight in weights.values())


@pytest.mark.usefixtures("megatron_shim", "restored", "one_ray")
@pytest.mark.parametrize(
    "kind",
    [
        "weights",
        pytest.param("deltas", marks=pytest.mark.long),
        pytest.param("adapters", marks=pytest.mark.long),
        pytest.param("adapters, merged for a server of others", marks=pytest.mark.exhaustive),
        pytest.param("pipeline", marks=pytest.mark.long),
        *(pytest.param(layout, marks=pytest.mark.exhaustive) for layout in LAYOUTS if layout != "pipeline"),
    ],
)
async def test_the_engine_takes_what_the_trainer_learned(
    kind: str, engine: SGLangEngine, model: Path, engine_config: EngineConfig, tmp_path: Path
) -> None:
    train = {
        "device": "cpu",
        "microbatch_tokens": 256,
        "lr": 1e-2,
        "lora": {"rank": RANK} if kind.startswith("adapters") else None,
        "parallel": LAYOUTS.get(kind, {}),
    }
    others = {"urls": engine.urls} if "others" in kind else {"weight_sync": "delta"} if kind == "deltas" else {}
    config = RunConfig.model_validate(
        {
            "name": "test",
            "model": model,
            "engine": engine_config.model_dump() | others,
            "train": train,
            "rollout": {"temperature": TEMPERATURE, "top_p": 0.9},
        }
    )
    fixed = Sample(np.array(TOKENS, np.int32), np.ones(len(TOKENS), bool), np.zeros(len(TOKENS), "f4"), 0.0, None)
    async with RayTrainer(config) as trainer:
        weights = tmp_path / "weights"
        sync = WeightSync(config.engine, config.model, engine, trainer, weights, pytest.fail, lambda: TOKENS)

        async def gap() -> np.ndarray:
            mine = (await trainer.logprobs([fixed], replay=False))[0]
            return np.abs(np.array(mine) - np.array(await engine.score(TOKENS)))

        assert (await gap()).mean() < 2e-5
        for version in (1, 2):  # the second goes through the same group, or through memory that both share
            batch = [await sampled(engine, number) for number in range(6)]
            for sample, (mine, _) in zip(
                batch, await trainer.routes(batch, replay=True, temperature=TEMPERATURE), strict=True
            ):
                np.testing.assert_allclose(mine[sample.loss_mask], sample.logprobs[sample.loss_mask], atol=2e-5)
            metrics = await trainer.step(batch, measure_without_replay=True)
            assert metrics["r3/coverage"] == 1
            assert metrics["r3/router_mismatch"] == metrics["mismatch_without_replay/router_mismatch"] == 0
            assert metrics["mismatch/logprob_abs_diff"] < 2e-5, "routes or log-probs are not where they belong"
            stale = await gap()
            if kind == "deltas":
                await sync.stage(version)
            if kind == "weights" and version > 1:  # as on GPUs that trainer and engine share; a CPU has no name
                sync._shares, engine.sleep.gpus = True, lambda urls: [[""]]  # type: ignore[method-assign]
            published = await sync.publish(version)
            assert published["weight_sync/verified"] == 1
            assert published["weight_sync/logprob_abs_diff"] < 2e-5, "the engine's experts are replayed"
            assert published["weight_sync/logprob_limit"] == LIMITS["float32"].least
            if kind == "deltas" and version > 1:
                assert 0 < published["weight_sync/delta_ratio"] < 1
            else:
                assert published["weight_sync/bytes"] == sent_bytes(model, kind)
            fresh = await gap()
            assert fresh.max() < 2e-4
            assert fresh.mean() < min(2e-5, stale.mean() / 2), "the engine still has the weights of before the update"
            answer = await engine.generate(TOKENS, SamplingParams(max_new_tokens=1), routes_from=None, session="v")
            assert answer.weight_version == str(version)

        await trainer.export(tmp_path / "export")
        held = await engine.score(TOKENS)
        with WeightReceivers(engine.urls) as receivers:
            load(receivers, tmp_path / "export", "export")
        assert (await sync.publish(3))["weight_sync/retries"] == 0, (
            "changes are of the model that the server began with"
        )
        assert await engine.score(TOKENS) == held
    assert (tmp_path / "export/adapter/adapter_model.safetensors").exists() == kind.startswith("adapters")
    with WeightReceivers(engine.urls) as receivers:
        for directory in (tmp_path / "export", in_shards(tmp_path / "export", tmp_path / "shards")):
            load(receivers, model, "default")
            load(receivers, directory, "export")
            np.testing.assert_allclose(await engine.score(TOKENS), held, atol=1e-6)


def in_shards(export: Path, directory: Path) -> Path:
    """The same checkpoint in several files with an index, as a large model's is written."""
    from safetensors.torch import load_file

    from agent_rl.train import hf_writer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_writer, "_SHARD_BYTES", 300_000)
        hf_writer.write_checkpoint(load_file(export / "model.safetensors").items(), export, directory, torch.float32)
    assert len(list(directory.glob("*.safetensors"))) > 1
    assert (directory / "model.safetensors.index.json").exists()
    return directory
