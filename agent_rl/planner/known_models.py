"""Shapes of well-known models, for planning a run before its checkpoint is downloaded. An existing directory has
priority.

Source: the ``config.json`` on the Hugging Face hub (https://huggingface.co/Qwen/<name>/blob/main/config.json).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agent_rl.errors import UserError
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
    }
)
KNOWN: Mapping[str, ModelSpec] = MappingProxyType({name: ModelSpec.of(config) for name, config in CONFIGS.items()})


def planned_model(directory: Path) -> ModelSpec:
    """Returns the spec of the checkpoint in ``directory``, or of the known model with its name. Raises UserError."""
    if (directory / "config.json").is_file():
        return read_model_spec(directory)
    if directory.name in KNOWN:
        return KNOWN[directory.name]
    raise UserError(
        f"model: {directory} has no config.json and {directory.name!r} is not a known model; known: " + ", ".join(KNOWN)
    )
