"""The real trainer's weights in the real server: by process group, and from a Hugging Face export."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from server_control import load

from agent_rl.config import EngineConfig, RunConfig
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.types import Sample, SamplingParams
from agent_rl.weight_sync.receivers import WeightReceivers

torch = pytest.importorskip("torch", reason="needs the trainer environment")
from agent_rl.train.ray_trainer import RayTrainer  # noqa: E402
from agent_rl.weight_sync.sync import WeightSync  # noqa: E402

pytestmark = [pytest.mark.megatron, pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]
TOKENS = [int(token) for token in np.random.default_rng(5).integers(2, 250, 48)]


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


RANK = 8


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
        "deltas",
        "adapters",
        pytest.param("adapters, merged for a server of others", marks=pytest.mark.exhaustive),
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
    }
    others = {"urls": engine.urls} if "others" in kind else {"weight_sync": "delta"} if kind == "deltas" else {}
    config = RunConfig.model_validate(
        {"name": "test", "model": model, "engine": engine_config.model_dump() | others, "train": train}
    )
    fixed = Sample(np.array(TOKENS, np.int32), np.ones(len(TOKENS), bool), np.zeros(len(TOKENS), "f4"), 0.0, None)
    async with RayTrainer(config) as trainer:
        sync = WeightSync(config.engine, config.model, engine, trainer, tmp_path / "weights", pytest.fail)

        async def gap() -> np.ndarray:
            mine = (await trainer.logprobs([fixed], replay=False))[0]
            return np.abs(np.array(mine) - np.array(await engine.score(TOKENS)))

        assert (await gap()).mean() < 2e-5
        for version in (1, 2):  # the second goes through the same group
            batch = [await sampled(engine, f"{version}-{i}", (-1.0) ** i) for i in range(6)]
            metrics = await trainer.step(batch, measure_without_replay=True)
            assert metrics["r3/coverage"] == 1
            assert metrics["r3/router_mismatch"] == metrics["mismatch_without_replay/router_mismatch"] == 0
            assert metrics["mismatch/logprob_abs_diff"] < 2e-5, "routes or log-probs are not where they belong"
            stale = await gap()
            if kind == "deltas":
                await sync.stage(version)
            published = await sync.publish(version)
            assert published["weight_sync/verified"] == 1
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
