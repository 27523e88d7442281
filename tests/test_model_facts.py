"""Reading a model's facts, and one clear line for each error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_rl.errors import ConfigError
from agent_rl.models.spec import ModelSpec, check_same_architecture, read_model_spec, read_moe_spec
from agent_rl.planner.known_models import CONFIGS
from r3.payload import RouteLayout

GOOD = CONFIGS["Qwen3-30B-A3B"] | {"num_hidden_layers": 6, "head_dim": 64}
SHARED = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 1024}
NOT_MIXTRALS = ("num_experts", "moe_intermediate_size", "norm_topk_prob")
DENSE = {"model_type": "qwen3", **dict.fromkeys((*NOT_MIXTRALS, "num_experts_per_tok"))}


def directory(tmp_path: Path, **changes: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(GOOD | changes))
    return tmp_path


def test_a_model_of_moe_layers_only(tmp_path: Path) -> None:
    model_spec = read_model_spec(directory(tmp_path))
    assert model_spec == ModelSpec(
        "qwen3_moe", moe=(True,) * 6, hidden=2048, heads=32, kv_heads=4, head_dim=64, inner=6144, vocab_size=151936,
        max_positions=40960, qk_norm="head", num_experts=128, top_k=8, expert_inner=768,
    )  # fmt: skip
    assert (model_spec.num_layers, model_spec.moe_layer_ids) == (6, tuple(range(6)))
    assert (model_spec.q_width, model_spec.kv_width) == (2048, 256)
    assert model_spec.layout == RouteLayout(6, tuple(range(6)), 128, 8)


def test_values_of_the_config_override_the_defaults(tmp_path: Path) -> None:
    changes = {"head_dim": 128, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 5e6}
    spec = read_model_spec(directory(tmp_path, **SHARED, **changes, initializer_range=1.0))
    assert (spec.head_dim, spec.tied, spec.norm_eps, spec.rope_theta, spec.init_std) == (128, True, 1e-5, 5e6, 1.0)
    assert (spec.shared_inner, spec.qkv_bias, spec.family.shared_gate) == (1024, True, True)


def test_other_names_for_experts_are_read(tmp_path: Path) -> None:
    mixtral = {"model_type": "mixtral", "num_local_experts": 16, **dict.fromkeys(NOT_MIXTRALS)}
    model_spec = read_model_spec(directory(tmp_path, **mixtral))
    assert (model_spec.num_experts, model_spec.expert_inner) == (16, 6144)
    assert read_model_spec(directory(tmp_path, num_experts=None, num_local_experts=16)).num_experts == 16


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"mlp_only_layers": [0, 4]}, (1, 2, 3, 5)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, (5,)),
        ({"mlp_only_layers": None}, (0, 1, 2, 3, 4, 5)),
    ],
)
def test_dense_layers_are_told_apart(tmp_path: Path, changes: dict[str, Any], layers: tuple[int, ...]) -> None:
    model_spec = read_model_spec(directory(tmp_path, **changes))
    assert model_spec.moe_layer_ids == layers
    assert model_spec.layout.moe_layer_ids == layers
    assert model_spec.layout.num_layers == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported; supported: .*glm4_moe, .*minimax_m2"),
        ({"num_experts": 0}, "num_experts must be a positive integer, got 0"),
        ({"num_hidden_layers": "six"}, "num_hidden_layers must be a positive integer, got 'six'"),
        ({"mlp_only_layers": [0, 1, 2, 3, 4, 5]}, "has no MoE layer"),
        ({"decoder_sparse_step": 0}, "has no MoE layer"),
        (DENSE, "has no MoE layer"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok is 129"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok is 1; with normalized gates it must be at least 2"),
    ],
)
def test_a_wrong_config_is_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_moe_spec(directory(tmp_path, **changes))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_directory_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        read_model_spec(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no config.json"):
        read_model_spec(tmp_path)
    for text, message in (("{", "not valid JSON"), ("[]", "contains a list")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_model_spec(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": 5e6}, r"other has rope_theta 5000000\.0, not 1000000\.0 as .*: name a checkpoint of the same"),
        ({"mlp_only_layers": [1]}, "other has layers with experts"),
        (SHARED, "other has model_type 'qwen2_moe', not 'qwen3_moe'"),
    ],
)
def test_a_reference_of_another_architecture_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    model_spec = read_model_spec(directory(tmp_path, initializer_range=0.02))
    other = tmp_path / "other"
    other.mkdir()
    same = directory(other, initializer_range=0.01, head_dim=64)
    check_same_architecture(model_spec, tmp_path, same, "train.kl.reference")
    with pytest.raises(ConfigError, match=f"train.kl.reference: .*{message}"):
        check_same_architecture(model_spec, tmp_path, directory(other, **changes), "train.kl.reference")
