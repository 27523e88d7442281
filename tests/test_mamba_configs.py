"""The config.json of Nemotron-H: what is read, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.model_sizes import DENSE_SIZES, NEMOTRON_H_SIZES

from agent_rl.config import LoraConfig, ParallelConfig, TrainConfig
from agent_rl.errors import ConfigError
from agent_rl.models.families import parse_config
from agent_rl.models.spec import ModelSpec
from agent_rl.train.parallel_checks import expert_form_problems, model_problems

SIZES = DENSE_SIZES | NEMOTRON_H_SIZES | {"model_type": "nemotron_h", "layer_norm_epsilon": 1e-5}


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec.of(parse_config(SIZES | changes, Path("config.json")))


def test_each_layer_is_a_mixer_or_an_mlp_and_only_moe_layers_have_routes() -> None:
    found = spec()
    assert found.mixers == ("mamba", "none", "grouped", "none", "mamba", "none")
    assert [found.has_mlp(layer) for layer in range(6)] == [False, True] * 3
    assert found.moe_layer_ids == (1, 5)
    assert (found.norm_eps, found.rotary, found.shared_inner, found.gate_scale) == (1e-5, False, 40, 2.5)


def test_layouts_and_adapters_that_the_layers_do_not_allow_are_refused() -> None:
    (context,) = model_problems(ParallelConfig(world_size=2, context=2), spec())
    assert context == (
        "train.parallel.context=2: Mamba layers carry a state from token to token and run whole sequences on a rank; "
        "set it to 1"
    )
    (groups,) = model_problems(ParallelConfig(world_size=2, tensor=2), spec(n_groups=1, mamba_n_groups=1))
    assert groups == "train.parallel.tensor=2 does not divide the model's n_groups=1"
    (lora,) = expert_form_problems(TrainConfig(lora=LoraConfig()), spec())
    assert lora == "train.lora: the experts of nemotron_h have no gate, which it does not support: turn it off"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hybrid_override_pattern": None}, "hybrid_override_pattern is missing; nemotron_h requires it"),
        ({"hybrid_override_pattern": "MX"}, "hybrid_override_pattern='MX' may only have M "),
        ({"layers_block_type": ["moe"]}, "layers_block_type=.* is not supported, only"),
        ({"num_hidden_layers": 5}, "num_hidden_layers=5 is not supported, only 6 is"),
        ({"moe_latent_size": 16}, "moe_latent_size=16 is not supported"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu' is not supported, only 'relu2' is"),
        ({"n_groups": 3}, "mamba_num_heads=4 is not a multiple of n_groups=3"),
        ({"mamba_n_groups": None}, "n_groups=2, but engines read mamba_n_groups, which is 8 .*: set it to 2"),
        ({"mamba_gate": True}, "mamba_gate=True is not supported for nemotron_h"),
    ],
)
def test_other_settings_are_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        spec(**change)
    assert "\n" not in str(error.value)
