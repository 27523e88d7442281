"""Published configs of families with latent attention are read; settings that change the computation are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_rl.errors import ConfigError
from agent_rl.models.families import parse_config
from agent_rl.models.parts import Indexer, Latent
from agent_rl.models.spec import ModelSpec

PATH = Path("model/config.json")
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 0, "eos_token_id": 1,
    "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000, "routed_scaling_factor": 2.5,
    "rope_scaling": {**YARN, "original_max_position_embeddings": 4096, "type": "yarn"},
    "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128,
    "vocab_size": 129280,
}  # fmt: skip
"""As published, without the description of its fp8 weights."""
KIMI_K2 = DEEPSEEK_V3 | {
    "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "max_position_embeddings": 131072, "model_type": "kimi_k2",
    "n_group": 1, "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0, "pretraining_tp": 1, "rope_theta": 50000.0, "routed_scaling_factor": 2.827,
    "rope_scaling": YARN | {"beta_fast": 1, "factor": 32, "original_max_position_embeddings": 4096, "type": "yarn"},
    "seq_aux": True, "topk_group": 1, "vocab_size": 163840,
}  # fmt: skip
INDEXED = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
DEEPSEEK_V32 = DEEPSEEK_V3 | INDEXED | {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]}
GLM_5 = DEEPSEEK_V3 | INDEXED | {
    "architectures": ["GlmMoeDsaForCausalLM"], "head_dim": 64, "hidden_size": 6144, "index_n_heads": 32,
    "indexer_rope_interleave": True, "intermediate_size": 12288, "max_position_embeddings": 202752,
    "model_type": "glm_moe_dsa", "n_group": 1, "num_attention_heads": 64, "num_hidden_layers": 78,
    "num_key_value_heads": 64, "q_lora_rank": 2048, "qk_head_dim": 256, "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-5, "rope_interleave": True, "rope_scaling": None, "rope_theta": None,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "topk_group": 1, "v_head_dim": 256,
    "vocab_size": 154880,
}  # fmt: skip


def spec(config: dict[str, Any]) -> ModelSpec:
    return ModelSpec.of(parse_config(config, PATH))


def test_deepseek_v3_as_published_is_read() -> None:
    found = spec(DEEPSEEK_V3)
    assert found.latent == Latent(1536, 512, 128, 64, 128)
    assert found.latent.cache_width == 576
    assert (found.head_dim, found.kv_heads, found.rotary_dim, found.shared_inner) == (192, 128, 64, 2048)
    assert (found.expert_groups, found.top_groups, found.gate_scale, found.scoring) == (8, 4, 2.5, "sigmoid")
    assert found.moe_layer_ids == tuple(range(3, 61))
    assert set(found.mixers) == {"latent"}
    assert found.indexer is None
    assert found.rope_scaling is not None
    assert found.rope_scaling["mscale_all_dim"] == 1


def test_other_families_as_published_are_read() -> None:
    assert spec(KIMI_K2).num_experts == 384
    assert spec(DEEPSEEK_V32).indexer == Indexer(64, 128, 2048, interleaved=False)
    glm = spec(GLM_5)
    assert glm.indexer == Indexer(32, 128, 2048, interleaved=True)
    assert (glm.latent, glm.head_dim, glm.rope_theta) == (Latent(2048, 512, 192, 64, 256), 256, 1e6)


def test_null_is_a_value_and_a_missing_key_is_not() -> None:
    latent = spec(DEEPSEEK_V3 | {"q_lora_rank": None}).latent
    assert latent is not None
    assert latent.q_rank == 0
    with pytest.raises(ConfigError, match="q_lora_rank is missing; deepseek_v3 requires it"):
        spec({key: value for key, value in DEEPSEEK_V3.items() if key != "q_lora_rank"})


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (
            DEEPSEEK_V3,
            {"quantization_config": {"quant_method": "awq"}},
            "quant_method 'awq' is not supported; supported: fp8",
        ),
        (DEEPSEEK_V3, {"index_topk": 2048}, "index_topk=2048 is not supported for deepseek_v3"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported, only 'sigmoid' is"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method='greedy' is not supported"),
        (DEEPSEEK_V3, {"attention_bias": True}, "attention_bias=True is not supported"),
        (DEEPSEEK_V3, {"kv_lora_rank": None}, "kv_lora_rank is missing; deepseek_v3 requires it"),
        (DEEPSEEK_V3, {"v_head_dim": 0}, "v_head_dim must be positive"),
        (DEEPSEEK_V3, {"rope_interleave": "yes"}, "rope_interleave must be true or false"),
        (DEEPSEEK_V3, {"mlp_layer_types": ["dense"] * 61}, "mlp_layer_types differs from first_k_dense_replace=3"),
        (
            DEEPSEEK_V3,
            {"rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0}},
            "rope_scaling has mscale and lacks mscale_all_dim",
        ),
        (DEEPSEEK_V32, {"index_topk": None}, "index_topk is missing; deepseek_v32 requires it"),
        (DEEPSEEK_V32, {"q_lora_rank": None}, "q_lora_rank is missing"),
        (DEEPSEEK_V32, {"layer_types": ["full_attention"]}, "layer_types has 'full_attention'"),
        (GLM_5, {"indexer_rope_interleave": None}, "indexer_rope_interleave is missing"),
        (GLM_5, {"indexer_types": ["full", "shared"]}, "indexer_types has 'shared', only 'full' is supported"),
        (GLM_5, {"index_topk_freq": 4}, "index_topk_freq=4 is not supported, only 1 is"),
    ],
)
def test_other_computations_are_refused_in_one_line(
    config: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        parse_config(config | change, PATH)
    assert "\n" not in str(error.value)
