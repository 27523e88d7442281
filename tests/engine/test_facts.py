"""Reading a model's facts, and one clear line for each way it can't be done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_rl.engine.facts import ModelFacts, read_facts
from agent_rl.errors import ConfigError

GOOD: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 6,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


def folder(tmp_path: Path, **changes: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(GOOD | changes))
    return tmp_path


def test_a_model_of_moe_layers_only(tmp_path: Path) -> None:
    assert read_facts(folder(tmp_path)) == ModelFacts(6, (0, 1, 2, 3, 4, 5), 128, 8, 151936, 40960)


def test_a_family_that_names_its_experts_otherwise(tmp_path: Path) -> None:
    facts = read_facts(folder(tmp_path, model_type="mixtral", num_experts=None, num_local_experts=16))
    assert facts.num_experts == 16


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
    facts = read_facts(folder(tmp_path, **changes))
    assert facts.moe_layer_ids == layers
    assert facts.layout.moe_layer_ids == layers
    assert facts.layout.num_layers == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported; supported: mixtral, qwen2"),
        ({"num_experts": 0}, "num_experts must be a positive integer, got 0"),
        ({"num_hidden_layers": "six"}, "num_hidden_layers must be a positive integer, got 'six'"),
        ({"mlp_only_layers": [0, 1, 2, 3, 4, 5]}, "has no MoE layer"),
        ({"decoder_sparse_step": 0}, "has no MoE layer"),
        ({"model_type": "qwen3"}, "has no MoE layer"),
        ({"num_experts_per_tok": 129}, "takes 129 experts a token of 128"),
    ],
)
def test_a_wrong_config_is_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_facts(folder(tmp_path, **changes))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        read_facts(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no config.json"):
        read_facts(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_facts(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds a list"):
        read_facts(tmp_path)
