"""Reading the configs of gpt-oss and ERNIE 4.5 as published, and one line for what would change their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_rl.errors import ConfigError
from agent_rl.models.families import parse_config
from agent_rl.models.spec import ModelSpec

GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}
ERNIE: dict[str, Any] = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "model_type": "ernie4_5_moe",
    "moe_capacity": [64, 64, 64],
    "moe_gate": "topk",
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_end_index": 27,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_use_aux_free": True,
    "num_attention_heads": 20,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_rmsnorm": True,
    "vocab_size": 103424,
}


def spec_of(config: dict[str, Any], **changes: Any) -> ModelSpec:
    return ModelSpec.of(parse_config(config | changes, Path("config.json")))


def test_gpt_oss_is_read_as_published() -> None:
    yarn = {"factor": 32.0, "original_max_position_embeddings": 4096.0, "beta_fast": 32.0, "beta_slow": 1.0}
    assert spec_of(GPT_OSS) == ModelSpec(
        "gpt_oss", moe=(True,) * 24, hidden=2880, heads=64, kv_heads=8, head_dim=64, inner=2880, vocab_size=201088,
        max_positions=131072, num_experts=32, top_k=4, expert_inner=2880, qkv_bias=True, out_bias=True, sinks=True,
        windows=(128, 0) * 12, router_bias=True, expert_form="clamped", norm_eps=1e-5, rope_theta=150000.0,
        rope_scaling=yarn | {"truncate": 0.0},
    )  # fmt: skip


def test_ernie_is_read_as_published() -> None:
    assert spec_of(ERNIE) == ModelSpec(
        "ernie4_5_moe", moe=(False,) + (True,) * 27, hidden=2560, heads=20, kv_heads=4, head_dim=128, inner=12288,
        vocab_size=103424, max_positions=131072, num_experts=64, top_k=6, expert_inner=1536, shared_inner=3072,
        tied=True, rotary_interleaved=True, norm_eps=1e-5, rope_theta=500000.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (GPT_OSS, {"swiglu_limit": 5.0}, r"swiglu_limit=5\.0 is not supported, only 7\.0 is"),
        (GPT_OSS, {"experts_per_token": 2}, "experts_per_token=2 is not supported, only 4 is"),
        (GPT_OSS, {"layer_types": None}, "layer_types is missing; gpt_oss requires it"),
        (GPT_OSS, {"layer_types": ["full_attention"]}, "layer_types must name one of .* for each of the 24 layers"),
        (GPT_OSS, {"sliding_window": None}, "sliding_window be a number of tokens"),
        (GPT_OSS, {"num_experts_per_tok": 33, "experts_per_token": 33}, "num_experts_per_tok is 33"),
        (GPT_OSS, {"use_qk_norm": True}, "use_qk_norm=True is not supported for gpt_oss"),
        (ERNIE, {"use_bias": True}, "use_bias=True is not supported, only False is"),
        (ERNIE, {"moe_layer_interval": 2}, "moe_layer_interval=2 is not supported, only 1 is"),
        (ERNIE, {"moe_layer_end_index": -1}, "moe_layer_end_index=-1 is not supported, only 27 is"),
        (ERNIE, {"tie_word_embeddings": None}, "tie_word_embeddings is missing"),
        (ERNIE, {"moe_k": 65}, r"num_experts_per_tok is 65; it must be at most num_experts \(64\)"),
        (ERNIE, {"rope_ratio": 2.0}, r"rope_ratio=2\.0 is not supported for ernie4_5_moe"),
    ],
)
def test_a_setting_that_changes_the_logits_is_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        spec_of(config, **changes)
    assert "\n" not in str(error.value)
