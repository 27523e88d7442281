"""The tensors of a checkpoint of every family: those of the description, and those that the family declares."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file
from support.family_models import FAMILIES, write_model

from agent_rl.errors import ConfigError
from agent_rl.models.spec import read_model_spec
from agent_rl.models.tensors import fill_buckets, joined_tensors, model_parameters
from agent_rl.train.hf_index import check_checkpoint, expected_shapes


@pytest.mark.parametrize("kind", FAMILIES)
def test_only_declared_tensors_may_be_beside_those_of_the_model(kind: str, tmp_path: Path) -> None:
    spec, file = read_model_spec(write_model(tmp_path, kind, seed=0)), tmp_path / "model.safetensors"
    tensors = load_file(file)
    some = next(iter(tensors.values()))
    prefixes = [prefix.format(layers=spec.num_layers + last) for prefix in spec.family.untrained for last in (0, 2)]
    declared = [f"{prefix}x.weight" for prefix in prefixes]
    save_file(tensors | dict.fromkeys(declared, some), file)
    check_checkpoint(tmp_path, spec)
    save_file(tensors | dict.fromkeys([*declared, "model.layers.0.x.weight"], some), file)
    message = rf"has 1 tensors that a {kind} model .* first 'model\.layers\.0\.x\.weight'$"
    with pytest.raises(ConfigError, match=message):
        check_checkpoint(tmp_path, spec)


def test_minimax_m2_may_have_the_three_layers_of_its_config(tmp_path: Path) -> None:
    spec = read_model_spec(write_model(tmp_path, "minimax_m2", seed=0, num_mtp_modules=3))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    layers = [f"model.layers.{spec.num_layers + number}.self_attn.q_proj.weight" for number in range(4)]
    some = next(iter(tensors.values()))
    save_file(tensors | dict.fromkeys(layers[:3], some), file)
    check_checkpoint(tmp_path, spec)
    save_file(tensors | dict.fromkeys(layers, some), file)
    with pytest.raises(ConfigError, match=rf"first '{layers[3]}'"):
        check_checkpoint(tmp_path, spec)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_tensor_belongs_to_one_parameter(kind: str, tmp_path: Path) -> None:
    described = list(model_parameters(read_model_spec(write_model(tmp_path, kind, seed=0))))
    tensors = Counter(tensor.name for _, parameter in described for tensor in parameter.tensors)
    parameters = Counter((layer, parameter.name) for layer, parameter in described)
    assert set(tensors.values()) == set(parameters.values()) == {1}


def test_projections_that_an_engine_joins_share_a_bucket(tmp_path: Path) -> None:
    spec = read_model_spec(write_model(tmp_path, "deepseek_v3", seed=0))
    parts = ("q_a_proj", "kv_a_proj_with_mqa")
    pairs = [{f"model.layers.{layer}.self_attn.{part}.weight" for part in parts} for layer in range(3)]
    items, joined = list(expected_shapes(spec).items()), joined_tensors(spec)
    for limit in (1, 2000, 5000, 1 << 20):
        filled = fill_buckets(items, itemgetter(0), lambda item: item[1][0], limit=limit, joined=joined)
        buckets = [{name for name, _ in bucket} for bucket, _ in filled]
        assert all(any(pair <= bucket for bucket in buckets) for pair in pairs)
    assert spec.latent is not None
    plain = replace(spec, latent=replace(spec.latent, q_rank=0))
    assert joined_tensors(plain) == frozenset(), "without compressed queries there is nothing to join"
