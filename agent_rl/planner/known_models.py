"""Shapes of well-known models, for planning a run before its checkpoint is downloaded. An existing directory has
priority.

Source: the ``config.json`` on the Hugging Face hub (https://huggingface.co/<organization>/<name>, of Qwen, zai-org,
allenai and nvidia). DeepSeek-V3.2, GLM-5, gpt-oss, MiniMax-M2, Qwen3-Next and Qwen3.5 have the defaults of their
configuration classes in transformers 5.19, which are those of these checkpoints; Qwen's context length is of the
checkpoints. Kimi-K2 is DeepSeek-V3's architecture with the sizes of moonshotai/Kimi-K2-Instruct.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agent_rl.errors import UserError
from agent_rl.models.families import parse_config
from agent_rl.models.spec import ModelSpec, read_model_spec

_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
_30B = _QWEN3_MOE | {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
    "num_attention_heads": 32, "max_position_embeddings": 40960,
}  # fmt: skip
_235B = _QWEN3_MOE | {
    "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
    "num_attention_heads": 64, "max_position_embeddings": 40960,
}  # fmt: skip
_GLM = {
    "model_type": "glm4_moe", "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128,
    "max_position_embeddings": 131072, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "topk_group": 1, "vocab_size": 151552,
}  # fmt: skip
_GLM_AIR = _GLM | {
    "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 46,
    "routed_scaling_factor": 1.0, "use_qk_norm": False,
}  # fmt: skip
_GLM_LARGE = _GLM | {
    "first_k_dense_replace": 3, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "n_routed_experts": 160, "num_hidden_layers": 92, "routed_scaling_factor": 2.5, "use_qk_norm": True,
}  # fmt: skip
_NEMOTRON_3_NANO = {
    "model_type": "nemotron_h", "conv_kernel": 4, "head_dim": 128, "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-5, "mamba_head_dim": 64, "mamba_num_heads": 64, "max_position_embeddings": 262144,
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8,
    "n_routed_experts": 128, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6,
    "num_key_value_heads": 2, "routed_scaling_factor": 2.5, "ssm_state_size": 128, "topk_group": 1,
    "vocab_size": 131072,
}  # fmt: skip
_OLMOE = {
    "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "max_position_embeddings": 4096,
    "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
    "num_hidden_layers": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "vocab_size": 50304,
}  # fmt: skip
_MINIMAX_M2 = {
    "model_type": "minimax_m2", "head_dim": 128, "hidden_size": 3072, "intermediate_size": 1536,
    "max_position_embeddings": 196608, "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62,
    "num_key_value_heads": 8, "num_local_experts": 256, "rms_norm_eps": 1e-6, "rope_theta": 5e6, "rotary_dim": 64,
    "vocab_size": 200064,
}  # fmt: skip
_YARN = {"factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn"}


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2), "max_position_embeddings": 131072,
        "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": layers, "num_key_value_heads": 8,
        "num_local_experts": experts, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "sliding_window": 128,
        "rope_scaling": {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}, "vocab_size": 201088,
    }  # fmt: skip


_LATENT = {
    "hidden_act": "silu", "kv_lora_rank": 512, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_experts_per_tok": 8, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip
_DEEPSEEK_V32 = _LATENT | {
    "model_type": "deepseek_v32", "first_k_dense_replace": 3, "hidden_size": 7168, "index_head_dim": 128,
    "index_n_heads": 64, "index_topk": 2048, "intermediate_size": 18432, "max_position_embeddings": 163840,
    "n_group": 8, "n_routed_experts": 256, "num_attention_heads": 128, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "rope_theta": 1e4,
    "rope_scaling": _YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}, "routed_scaling_factor": 2.5,
    "topk_group": 4, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
_GLM_5 = _LATENT | {
    "model_type": "glm_moe_dsa", "first_k_dense_replace": 3, "hidden_size": 6144, "index_head_dim": 128,
    "index_n_heads": 32, "index_topk": 2048, "indexer_rope_interleave": True, "intermediate_size": 12288,
    "max_position_embeddings": 202752, "n_group": 1, "n_routed_experts": 256, "num_attention_heads": 64,
    "num_hidden_layers": 78, "num_key_value_heads": 64, "q_lora_rank": 2048, "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6, "routed_scaling_factor": 2.5, "topk_group": 1, "v_head_dim": 256,
    "vocab_size": 154880,
}  # fmt: skip
_KIMI_K2 = _LATENT | {
    "model_type": "kimi_k2", "first_k_dense_replace": 1, "hidden_size": 7168, "intermediate_size": 18432,
    "max_position_embeddings": 131072, "n_group": 1, "n_routed_experts": 384, "num_attention_heads": 64,
    "num_hidden_layers": 61, "num_key_value_heads": 64, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "rope_scaling": _YARN | {"beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}, "rope_theta": 5e4,
    "routed_scaling_factor": 2.827, "topk_group": 1, "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip
_DELTA = {
    "full_attention_interval": 4, "head_dim": 256, "hidden_size": 2048, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "max_position_embeddings": 262144, "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "shared_expert_intermediate_size": 512,
    "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1e7, "rope_type": "default"},
}  # fmt: skip
_QWEN3_NEXT = _DELTA | {
    "model_type": "qwen3_next", "decoder_sparse_step": 1, "intermediate_size": 5120, "mlp_only_layers": [],
    "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48, "vocab_size": 151936,
}  # fmt: skip
_QWEN35_35B = _DELTA | {
    "model_type": "qwen3_5_moe_text", "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}, "vocab_size": 248320,
}  # fmt: skip
_LONG = {"max_position_embeddings": 262144}

CONFIGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "Qwen3-30B-A3B": _30B,
        "Qwen3-30B-A3B-Base": _30B | {"max_position_embeddings": 32768},
        "Qwen3-30B-A3B-Instruct-2507": _30B | _LONG,
        "Qwen3-30B-A3B-Thinking-2507": _30B | _LONG,
        "Qwen3-Coder-30B-A3B-Instruct": _30B | _LONG,
        "Qwen3-235B-A22B": _235B,
        "Qwen3-235B-A22B-Instruct-2507": _235B | _LONG,
        "Qwen3-235B-A22B-Thinking-2507": _235B | _LONG,
        "GLM-4.5-Air": _GLM_AIR,
        "GLM-4.5": _GLM_LARGE,
        "GLM-4.6": _GLM_LARGE | {"max_position_embeddings": 202752},
        "GLM-4.7": _GLM_LARGE | {"max_position_embeddings": 202752},
        "GLM-5": _GLM_5,
        "OLMoE-1B-7B-0924": _OLMOE,
        "MiniMax-M2": _MINIMAX_M2,
        "gpt-oss-20b": _gpt_oss(24, 32),
        "gpt-oss-120b": _gpt_oss(36, 128),
        "DeepSeek-V3.2": _DEEPSEEK_V32,
        "Kimi-K2-Instruct": _KIMI_K2,
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _NEMOTRON_3_NANO,
        "Qwen3-Next-80B-A3B-Instruct": _QWEN3_NEXT,
        "Qwen3.5-35B-A3B": _QWEN35_35B,
    }
)
KNOWN: Mapping[str, ModelSpec] = MappingProxyType(
    {name: ModelSpec.of(parse_config(config, Path(name))) for name, config in CONFIGS.items()}
)


def planned_model(directory: Path) -> ModelSpec:
    """Returns the spec of the checkpoint in ``directory``, or of the known model with its name. Raises UserError."""
    if (directory / "config.json").is_file():
        return read_model_spec(directory)
    if directory.name in KNOWN:
        return KNOWN[directory.name]
    raise UserError(
        f"model: {directory} has no config.json and {directory.name!r} is not a known model; known: " + ", ".join(KNOWN)
    )
