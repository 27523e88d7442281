"""The configs of Qwen3-Next and Qwen3.5: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.model_sizes import DELTA_SIZES, DENSE_SIZES

from agent_rl.config import LoraConfig, ParallelConfig, TrainConfig
from agent_rl.errors import ConfigError
from agent_rl.models.families import parse_config
from agent_rl.models.parts import Delta
from agent_rl.models.spec import ModelSpec
from agent_rl.train.parallel_checks import adapter_problems, model_problems

ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
MROPE = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
NEXT: dict[str, Any] = {"model_type": "qwen3_next", **DENSE_SIZES, **DELTA_SIZES, "rms_norm_eps": 1e-6}
NEXT |= {"norm_topk_prob": True, "rope_theta": 1e7}
TEXT: dict[str, Any] = {
    **{key: value for key, value in NEXT.items() if key not in ("rope_theta", "intermediate_size")},
    "model_type": "qwen3_5_moe_text",
    "attn_output_gate": True,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": ROPE | MROPE,
}
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5_moe",
    "text_config": TEXT,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 248057,
    "vision_config": {"depth": 27},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}


def spec(config: dict[str, Any]) -> ModelSpec:
    return ModelSpec.of(parse_config(config, Path("config.json")))


def test_hybrid_layers_and_sizes_are_read() -> None:
    model = spec(NEXT)
    assert model.mixers == ("delta", "grouped", "delta", "grouped")
    assert model.delta == Delta(key_heads=2, value_heads=4, key_dim=8, value_dim=6, kernel=4, fused=True)
    assert (model.rotary_dim, model.output_gate, model.zero_centered_norms) == (8, True, True)


def test_text_config_of_a_published_model_is_read_like_the_text_model() -> None:
    text, published = spec(TEXT), spec(PUBLISHED)
    assert published.kind == "qwen3_5_moe"
    assert published.delta == text.delta == Delta(2, 4, 8, 6, 4, fused=False)
    assert (published.rotary_dim, published.rope_theta) == (text.rotary_dim, text.rope_theta) == (4, 1e7)


def test_layouts_and_adapters_that_the_layers_do_not_allow_are_refused() -> None:
    layout = ParallelConfig(world_size=4, tensor=4)
    odd = spec(NEXT | {"num_key_value_heads": 4, "linear_num_key_heads": 2})
    assert model_problems(layout, odd) == ["train.parallel.tensor=4 does not divide the model's linear_num_key_heads=2"]
    train = TrainConfig(lora=LoraConfig())
    assert adapter_problems(train, odd) == []
    assert adapter_problems(train, spec(PUBLISHED)) == [
        "train.lora: qwen3_5_moe has one tensor of all experts, which adapters do not support: turn it off"
    ]


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (NEXT, {"full_attention_interval": None}, "full_attention_interval is missing; qwen3_next requires it"),
        (NEXT, {"layer_types": ["full_attention"] * 4}, "layer_types=.* is not supported, only"),
        (NEXT, {"linear_num_value_heads": 3}, "3 is not a multiple of linear_num_key_heads=2"),
        (NEXT, {"linear_key_head_dim": 0}, "linear_key_head_dim must be positive"),
        (NEXT, {"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid' is not supported, only 'swish'"),
        (NEXT, {"rope_parameters": ROPE | MROPE}, "rope_scaling of type default is not supported"),
        (NEXT, {"linear_new_key": 1}, "linear_new_key=1 is not supported for qwen3_next"),
        (TEXT, {"attn_output_gate": False}, "attn_output_gate=False is not supported, only True is"),
        (TEXT, {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\] is not supported"),
        (TEXT, {"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
        (TEXT, {"rope_parameters": None}, "rope_parameters is missing; qwen3_5_moe_text requires it"),
        (PUBLISHED, {"text_config": NEXT}, "text_config must be a config of model_type qwen3_5_moe_text"),
        (PUBLISHED, {"audio_config": {}}, r"audio_config=\{\} is not supported for qwen3_5_moe"),
        (PUBLISHED, {"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
    ],
)
def test_other_settings_are_refused_in_one_line(config: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        spec(config | change)
    assert "\n" not in str(error.value)
