"""Shapes of well-known models, for planning a run before its checkpoint is downloaded. An existing directory has
priority.

Source: the ``config.json`` on the Hugging Face hub (https://huggingface.co/<organization>/<name>, of Qwen, zai-org and
allenai).
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
_OLMOE = {
    "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "max_position_embeddings": 4096,
    "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
    "num_hidden_layers": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "vocab_size": 50304,
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
        "OLMoE-1B-7B-0924": _OLMOE,
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
