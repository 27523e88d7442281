"""Every family that SGLang serves on a CPU: real server and real trainer agree, and the server takes its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_rl.config import EngineConfig, RunConfig
from agent_rl.engine.launch import EngineServer
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.models.spec import ModelSpec, read_model_spec
from agent_rl.train.hf_index import expected_shapes
from agent_rl.types import Sample, SamplingParams
from r3.stitch import RouteStitcher

torch = pytest.importorskip("torch", reason="needs the trainer environment")
from agent_rl.train.ray_trainer import RayTrainer  # noqa: E402
from agent_rl.weight_sync.sync import WeightSync  # noqa: E402

pytestmark = [pytest.mark.megatron, pytest.mark.sglang, pytest.mark.slow]

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
    "torch_dtype": "float32",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
    "minimax_m2": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "head_dim": 32,
        "rotary_dim": 16,
        "num_local_experts": 8,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "num_mtp_modules": 0,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "norm_topk_prob": False,
    },
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"],
        "num_key_value_heads": 4,
        "num_experts": 8,
        "norm_topk_prob": False,
    },
}
LIMITS = {"olmoe": 1e-4}
"""SGLang norms OLMoE's queries and keys with a fixed epsilon."""


def write_model(directory: Path, kind: str, seed: int) -> Path:
    """A checkpoint of random weights, large enough that sampling and routing are not near-ties."""
    from safetensors.numpy import save_file

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": kind, **COMMON, **FAMILIES[kind]}))
    generator = np.random.default_rng(seed)
    weights = {}
    for name, shape in expected_shapes(read_model_spec(directory)).items():
        wide = ("embed_tokens", "lm_head", "gate.weight")
        scale = 0.3 if name.endswith(wide) or any(part in name for part in wide) else 0.08
        draw = generator.standard_normal(shape).astype(np.float32) * scale
        weights[name] = draw + 1 if "norm" in name else draw
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


async def two_turns(engine: SGLangEngine, spec: ModelSpec, seed: int) -> Sample:
    """A conversation of two turns; the second one's prefix comes from the engine's cache."""
    assert spec.layout is not None
    generator = np.random.default_rng(seed)
    stitcher = RouteStitcher(
        moe_layers=len(spec.moe_layer_ids), top_k=spec.top_k, num_experts=spec.num_experts, capacity=128
    )
    tokens, logprobs = generator.integers(2, 250, 24).tolist(), [0.0] * 24
    sampled = np.zeros(0, bool)
    for observed in (8, 0):
        answer = await engine.generate(
            tokens, SamplingParams(max_new_tokens=24), routes_from=stitcher.next_row, session=f"{spec.kind}-{seed}"
        )
        stitcher.append(answer.routing, sequence=len(tokens) + len(answer.tokens))
        sampled = np.append(np.pad(sampled, (0, len(tokens) - len(sampled))), np.ones(len(answer.tokens), bool))
        tokens = [*tokens, *answer.tokens, *generator.integers(2, 250, observed).tolist()]
        logprobs = [*logprobs, *answer.logprobs, *[0.0] * observed]
    routing = stitcher.finish(len(tokens))
    return Sample(np.array(tokens, np.int32), sampled, np.array(logprobs, "f4"), (-1.0) ** seed, routing)


@pytest.mark.usefixtures("megatron_shim", "one_ray")
@pytest.mark.parametrize("kind", FAMILIES)
async def test_engine_and_trainer_agree_before_and_after_an_update(
    kind: str, engine_config: EngineConfig, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", kind, seed=0)
    spec, server = read_model_spec(model), EngineServer(engine_config, model, tmp_path / "engine.log")
    await server.start()
    try:
        train = {"device": "cpu", "microbatch_tokens": 256, "lr": 1e-3}
        config = RunConfig.model_validate(
            {"name": "test", "model": model, "engine": engine_config.model_dump(), "train": train}
        )
        async with SGLangEngine(server.url, spec, engine_config) as engine, RayTrainer(config) as trainer:
            sync = WeightSync(config.engine, model, engine, trainer, tmp_path / "weights", pytest.fail)
            for version in (1, 2):
                batch = [await two_turns(engine, spec, 10 * version + number) for number in range(4)]
                metrics = await trainer.step(batch, measure_without_replay=True)
                assert metrics["r3/coverage"] == 1
                assert metrics["mismatch_without_replay/router_mismatch"] == 0, "another choice of experts"
                assert metrics["mismatch/logprob_abs_diff"] < LIMITS.get(kind, 2e-5)
                assert (await sync.publish(version))["weight_sync/verified"] == 1
            await trainer.export(tmp_path / "export")
    finally:
        await server.stop()
    assert json.loads((tmp_path / "export/config.json").read_text()) == json.loads((model / "config.json").read_text())
