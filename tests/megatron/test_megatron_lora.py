"""Adapters on attention and experts: values, gradients, updates, and the written adapter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_tiny as tiny
import pytest
from support.model_sizes import DEEPSEEK_V3_SIZES, DELTA_SIZES, DENSE_SIZES

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch
from safetensors.torch import load_file
from torch import Tensor

from agent_rl.config import LoraConfig
from agent_rl.train.megatron.packed_batch import PackedBatch, PackedRoutes

pytestmark = pytest.mark.megatron
Build = Callable[..., Any]
LORA = LoraConfig(rank=8, alpha=4.0)


def given() -> list[PackedRoutes]:
    experts = tiny.random_routes(len(tiny.packed()))
    return [PackedRoutes(experts, torch.arange(len(experts)) % 5 != 0)]


def loss(logprobs: Tensor, entropy: Tensor | None, _: PackedBatch) -> tuple[Tensor, dict[str, Any]]:
    assert entropy is not None
    return (logprobs * torch.linspace(-1, 1, len(logprobs))).sum() + entropy.sum(), {}


def train(model: Any, routes: list[PackedRoutes] | None = None) -> None:
    model.train_microbatches([tiny.packed()], routes, loss, entropy_gradient=True)


def logprobs(model: Any, routes: list[PackedRoutes] | None = None) -> Tensor:
    found: Tensor = model.forward_logprobs([tiny.packed()], routes)[0].logprobs
    return found


def learned(build: Build, **options: Any) -> Any:
    """A model with changed adapters."""
    model = build(lora=LORA, **options)
    generator = torch.Generator().manual_seed(3)
    for parameter in (p for p in model.modules[0].parameters() if p.requires_grad):
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def gradients(model: Any) -> dict[str, Tensor]:
    """Of trained parameters, by Megatron's names."""
    return {n: p.main_grad.clone() for n, p in model.modules[0].named_parameters() if p.requires_grad}


def adapters(model: Any) -> dict[str, tuple[Tensor, Tensor]]:
    from agent_rl.train.megatron import hf_weights as hf

    return {name: (a, b) for name, a, b in hf.export_adapters(model.param_mappings(), model.ranks)}


@pytest.mark.parametrize("changes", [{}, {"mlp_only_layers": [1]}], ids=["moe", "one-dense-layer"])
def test_new_adapters_change_no_bit(build: Build, tmp_path: Path, changes: dict[str, Any]) -> None:
    tiny.make(tmp_path / "model", **changes)
    plain, adapted = build(tmp_path / "model"), build(tmp_path / "model", lora=LORA)
    for routes in (None, given() if not changes else None):
        assert torch.equal(logprobs(adapted, routes), logprobs(plain, routes))
    weights = dict(plain.export_weights())
    assert all(torch.equal(weight, weights.pop(name)) for name, weight in adapted.export_weights())
    assert not weights
    trained = {name for name, p in adapted.modules[0].named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in adapted.modules[0].named_parameters() if ".lora." in name}
    layers, moe = tiny.LAYERS, tiny.LAYERS - len(changes)
    assert len(adapters(adapted)) == layers * 4 + moe * 3 * tiny.EXPERTS


def test_hybrids_have_adapters_on_grouped_attention_and_experts(build: Build, tmp_path: Path) -> None:
    """Layers of the gated delta rule have none."""
    sizes = DENSE_SIZES | DELTA_SIZES | {"tie_word_embeddings": False, "initializer_range": 0.1}
    tiny.write_model(tmp_path / "model", "qwen3_next", sizes, published=tiny.DELTA_KEYS)
    plain, adapted = build(tmp_path / "model"), build(tmp_path / "model", lora=LORA)
    assert torch.equal(logprobs(adapted, given()), logprobs(plain, given()))
    names = adapters(adapted).keys()
    assert len(names) == 2 * 4 + tiny.LAYERS * 3 * tiny.EXPERTS
    assert not any("linear_attn" in name for name in names)
    train(adapted, given())
    assert any(gradient.abs().max() > 0 for gradient in gradients(adapted).values())


def test_latent_attention_is_adapted_and_merged(build: Build, tmp_path: Path) -> None:
    tiny.make(tmp_path / "model", kind="deepseek_v3", tied=False, **DEEPSEEK_V3_SIZES)
    plain, model = build(tmp_path / "model"), build(tmp_path / "model", lora=LORA)
    assert torch.equal(logprobs(model), logprobs(plain))
    model = learned(build, directory=tmp_path / "model")
    attention = {name.rsplit(".", 2)[1] for name in adapters(model) if ".self_attn." in name}
    assert attention == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    model.save_hf(tmp_path / "merged")
    changed = logprobs(model)
    assert not torch.allclose(changed, logprobs(plain), atol=1e-2)
    torch.testing.assert_close(logprobs(build(tmp_path / "merged")), changed, rtol=0, atol=1e-4)


def test_adapters_depend_on_the_seed_and_all_differ(build: Build) -> None:
    def drawn(seed: int) -> list[Tensor]:
        parameters = build(lora=LORA, seed=seed, load=False).modules[0].named_parameters()
        return [p for name, p in parameters if name.endswith(".lora.weight1.a")]

    one, again, other = drawn(0), drawn(0), drawn(1)
    assert all(map(torch.equal, one, again))
    assert not any(map(torch.equal, one, other))
    matrices = [expert for layer in one for expert in layer]
    assert len({expert.data[0, 0].item() for expert in matrices}) == len(matrices)
    assert all(expert.abs().max() <= expert.shape[1] ** -0.5 for expert in matrices)


@pytest.mark.parametrize("routed", [False, True], ids=["native", "replayed"])
def test_gradients_are_those_of_the_merged_weights(build: Build, tmp_path: Path, routed: bool) -> None:
    """The chain rule, from the gradients of a model without adapters that has W + scale B A for its weights."""
    model, routes = learned(build), given() if routed else None
    model.save_hf(tmp_path / "merged")
    merged = build(tmp_path / "merged")
    torch.testing.assert_close(logprobs(model, routes), logprobs(merged, routes), rtol=0, atol=1e-5)
    assert not torch.allclose(logprobs(model, routes), logprobs(build(), routes), atol=1e-2)
    train(model, routes)
    train(merged, routes)
    pairs = adapters(model)
    for parameter in (*merged.modules[0].parameters(), *model.modules[0].parameters()):
        if parameter.requires_grad:
            parameter.data = parameter.main_grad.clone()
    whole, found = dict(merged.export_weights()), adapters(model)
    sharing: dict[str, Tensor] = {}  # query, key and value share an A, as do gate and up
    for name, (a, b) in pairs.items():
        torch.testing.assert_close(found[name][1], LORA.scale * whole[name] @ a.T, rtol=1e-4, atol=1e-4)
        key = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
        sharing[key] = sharing.get(key, torch.zeros(())) + LORA.scale * b.T @ whole[name]
    for name, expected in sharing.items():
        torch.testing.assert_close(found[name][0], expected, rtol=1e-4, atol=1e-4)
        assert bool(expected.any())


@pytest.mark.parametrize("options", [{"recompute": "full"}, {"recompute": "selective", "recompute_modules": ["moe"]}])
def test_recomputed_layers_learn_the_same(build: Build, options: dict[str, Any]) -> None:
    plain, again = learned(build), learned(build, **options)
    train(plain, given())
    train(again, given())
    expected, found = gradients(plain), gradients(again)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)
        assert bool(gradient.any()), name


def test_an_update_changes_only_adapters(build: Build) -> None:
    from megatron_worker import optimizer

    model = build(lora=LORA)
    before = {name: p.detach().clone() for name, p in model.modules[0].named_parameters()}
    steps = optimizer(model, torch.float32)
    for _ in range(2):  # A has no gradient while B is zero
        train(model)
        steps.step()
    after = dict(model.modules[0].named_parameters())
    for name, weight in before.items():
        assert torch.equal(after[name], weight) == (".lora." not in name), name
    kept = {shard.name for shard in steps.shards()}
    assert kept == {f"0.{name}" for name in before if ".lora." in name}


def test_a_reference_of_a_model_with_adapters_holds_only_adapters(build: Build, checkpoint: tuple[Path, Any]) -> None:
    """And gives the log-probs of the base model bit for bit."""
    from agent_rl.train.reference import Reference

    model, base = build(lora=LORA), logprobs(build())
    reference = Reference.load(model, checkpoint[0])
    trained = [parameter for parameter in model.modules[0].parameters() if parameter.requires_grad]
    assert reference.nbytes == sum(parameter.nbytes for parameter in trained)
    for parameter in trained:
        parameter.data += 0.1
    learned = logprobs(model)
    with reference.swapped_in():
        assert torch.equal(logprobs(model), base)
    assert torch.equal(logprobs(model), learned)
    assert not torch.allclose(learned, base, atol=1e-2)


def test_the_adapter_is_written_as_peft_reads_it(build: Build, checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    """Base and adapter, put together by PEFT's formula, are the merged checkpoint."""
    model = learned(build)
    model.save_hf(tmp_path / "merged")
    model.save_adapter(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["base_model_name_or_path"] == str(checkpoint[0])
    saved = load_file(tmp_path / "adapter/adapter_model.safetensors")
    base = load_file(checkpoint[0] / "model.safetensors")
    changed = 0
    for name, merged in load_file(tmp_path / "merged/model.safetensors").items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = (saved.pop(f"{module}.lora_{half}.weight", None) for half in "AB")
        if a is None or b is None:
            if name in base:
                assert torch.equal(merged, base[name])
            continue
        changed += 1
        torch.testing.assert_close(merged, base[name] + config["lora_alpha"] / config["r"] * b @ a)
    assert not saved
    assert changed == tiny.LAYERS * (4 + 3 * tiny.EXPERTS)


def test_changes_merged_by_an_engine_equal_the_export_bit_for_bit(build: Build, checkpoint: tuple[Path, Any]) -> None:
    from agent_rl.weight_sync.adapters import BaseWeights

    model = learned(build)
    changes = dict(model.export_changes())
    merged = dict(model.export_weights())
    made = dict(BaseWeights(checkpoint[0]).merged(changes.items()))
    assert len(made) == tiny.LAYERS * (4 + 3 * tiny.EXPERTS)
    for name, weight in made.items():
        assert torch.equal(weight, merged[name]), name


def test_the_plan_counts_the_adapters_parameters_and_bytes(build: Build) -> None:
    from agent_rl.config import ParallelConfig, TrainConfig
    from agent_rl.planner.memory_model import adapter_bytes, trained_parameters

    model, config = build(lora=LORA), TrainConfig(lora=LORA)
    trained = sum(p.numel() for p in model.modules[0].parameters() if p.requires_grad)
    assert trained == sum(trained_parameters(model.model_spec, config, ParallelConfig()))
    assert adapter_bytes(model.model_spec, config) == sum(change.nbytes for _, change in model.export_changes())
