"""Tiny random checkpoints of the model families that SGLang serves on a CPU: one entry per ``model_type``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from agent_rl.models.spec import read_model_spec
from agent_rl.train.hf_index import expected_shapes

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
DELTA: dict[str, Any] = {
    "head_dim": 32,
    "partial_rotary_factor": 0.25,
    "num_experts": 8,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
QWEN3_5: dict[str, Any] = DELTA | {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "v_head_dim": 16,
}
_YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 256, "mscale": 1.0, "mscale_all_dim": 0.7}
_INDEXER = {"index_head_dim": 16, "index_n_heads": 32, "index_topk": 32}
"""A conversation has more than twice 32 tokens. With fewer heads many keys would have the same score, 0."""
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3 | _INDEXER | {"architectures": ["DeepseekV32ForCausalLM"], "rope_scaling": _YARN},
    "glm_moe_dsa": _DEEPSEEK_V3
    | _INDEXER
    | {"architectures": ["GlmMoeDsaForCausalLM"], "indexer_rope_interleave": True},
    "kimi_k2": _DEEPSEEK_V3 | {"n_group": 1, "q_lora_rank": None, "rope_scaling": _YARN, "topk_group": 1},
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
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "head_dim": 16,
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 16,
        "num_local_experts": 8,
        "swiglu_limit": 7.0,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 32,
            "truncate": False,
        },
    },
    "ernie4_5_moe": {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "num_experts_per_tok": None,
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
        "moe_layer_interval": 1,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 32,
        "use_bias": False,
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
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "ME*-ME",
        "num_hidden_layers": 6,
        "hidden_act": None,
        "mlp_hidden_act": "relu2",
        "rms_norm_eps": None,
        "layer_norm_epsilon": 1e-5,
        "rope_theta": None,
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 24,
        "n_groups": 2,
        "mamba_n_groups": 2,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 64,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "norm_topk_prob": False,
    },
    "qwen3_next": DELTA | {"architectures": ["Qwen3NextForCausalLM"]},
    "qwen3_5_moe_text": QWEN3_5 | {"architectures": ["Qwen3_5MoeForCausalLM"]},
    "qwen3_5_moe": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": COMMON | QWEN3_5 | {"model_type": "qwen3_5_moe_text"},
        "vision_config": {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 64},
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 8,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 16,
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"],
        "num_key_value_heads": 4,
        "num_experts": 8,
        "norm_topk_prob": False,
    },
}
_WIDE = ("embed_tokens", "embeddings", "lm_head", "gate.weight", "mixer.conv1d.weight", "mixer.D")
"""Parts of the names of tensors with larger weights."""


def changes_of_sizes(kind: str) -> dict[str, Any]:
    """Changes of ``kind``'s config that no other model here has: more experts, of which each token has three, wider
    layers, and one layer more where layers have no list."""
    config = COMMON | FAMILIES[kind]
    config |= config.get("text_config", {})
    larger = {
        "hidden_size": 96,
        "intermediate_size": 80,
        "num_attention_heads": 6,
        "shared_expert_intermediate_size": 64,
    }
    larger |= {"num_experts": 12, "num_local_experts": 12, "n_routed_experts": 12, "moe_num_experts": 12}
    larger |= {"num_experts_per_tok": 3, "moe_k": 3, "moe_intermediate_size": 64, "head_dim": 32, "sliding_window": 24}
    larger |= {"kv_lora_rank": 48, "v_head_dim": 24, "ssm_state_size": 32, "moe_shared_expert_intermediate_size": 48}
    larger |= {"linear_value_head_dim": 16, "index_topk": 24, "rotary_dim": 24}
    found = {key: size for key, size in larger.items() if config.get(key) is not None}
    if config["num_key_value_heads"] == config["num_attention_heads"]:
        found["num_key_value_heads"] = 6
    if "layer_types" not in config and "hybrid_override_pattern" not in config:
        found["num_hidden_layers"] = 4
    return found | ({"moe_layer_end_index": 3} if "moe_layer_end_index" in config else {})


def write_model(directory: Path, kind: str, seed: int, **changes: Any) -> Path:
    """A checkpoint in ``directory`` of random weights, large enough that sampling and routing are not near-ties.
    ``changes``: other values of its config. A value of None is left out, but for ``q_lora_rank``, which is required."""
    directory.mkdir(exist_ok=True)
    config = {"model_type": kind, **FAMILIES[kind]}
    if "text_config" in config:
        config["text_config"] = config["text_config"] | changes
    else:
        config = {**COMMON, **config, **changes}
    (directory / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v is not None or k == "q_lora_rank"})
    )
    generator = np.random.default_rng(seed)
    spec, weights = read_model_spec(directory), {}
    for name, shape in expected_shapes(spec).items():
        scale = 0.3 if any(part in name for part in _WIDE) else 0.08
        draw = generator.standard_normal(shape).astype(np.float32) * scale
        if ("norm" in name and not spec.zero_centered_norms) or name.endswith("linear_attn.norm.weight"):
            draw += 1
        weights[name] = draw
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
