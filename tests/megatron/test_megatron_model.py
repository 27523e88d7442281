"""The Megatron model against transformers, alone and packed; checkpoints in and out; refusals in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_tiny as tiny
import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch
from torch import Tensor

from agent_rl.config import ParallelConfig
from agent_rl.errors import ConfigError, TrainerError
from agent_rl.models.spec import read_model_spec
from agent_rl.train.megatron.logprobs import CHUNK_LOGITS
from agent_rl.train.megatron.packed_batch import PackedBatch, PackedRoutes
from agent_rl.train.megatron.parallel import check_parallel

pytestmark = pytest.mark.megatron
Build = Callable[..., Any]


def reference(model: Any, sequences: list[Tensor], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy of packed sequences, each run by itself through transformers."""
    logprobs, entropy = [], []
    for tokens in sequences:
        table = (model(tokens[None]).logits[0].float() / temperature).log_softmax(-1)
        chosen = table[:-1].gather(1, tokens[1:, None])[:, 0]
        logprobs += [chosen.new_zeros(1), chosen]
        entropy += [chosen.new_zeros(1), -(table.exp() * table).sum(-1)[:-1]]
    return torch.cat(logprobs), torch.cat(entropy)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied": False}, {"mlp_only_layers": [1]}, {"kind": "qwen3"}],
    ids=["tied", "untied", "one-dense-layer", "dense"],
)
def test_logprobs_and_gradients_equal_transformers(build: Build, tmp_path: Path, changes: dict[str, Any]) -> None:
    expected = tiny.make(tmp_path / "model", **changes)
    model, sequences = build(tmp_path / "model"), tiny.sequences()
    batch = PackedBatch.from_sequences(sequences)
    logprobs, entropy = reference(expected, sequences)
    output = model.forward_logprobs([batch], None, entropy=True)[0]
    torch.testing.assert_close(output.logprobs, logprobs, rtol=0, atol=1e-4)
    torch.testing.assert_close(output.entropy, entropy, rtol=0, atol=1e-4)

    weights = torch.linspace(-1, 1, len(batch))
    (logprobs * weights + entropy * weights.flip(0)).sum().backward()

    def loss(got: Tensor, spread: Tensor | None, _: PackedBatch) -> tuple[Tensor, dict[str, Any]]:
        assert spread is not None
        return (got * weights + spread * weights.flip(0)).sum(), {}

    model.train_microbatches([batch], None, loss, entropy_gradient=True)
    for parameter in model.modules[0].parameters():
        parameter.data = parameter.main_grad
    wanted = {name: parameter.grad for name, parameter in expected.named_parameters()}
    exported = dict(model.export_weights())
    if changes.get("tied", True):  # exported twice, for engines that do not tie
        assert torch.equal(exported.pop("lm_head.weight"), exported["model.embed_tokens.weight"])
    assert exported.keys() == wanted.keys()
    for name, gradient in exported.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_temperature_and_many_chunks(
    build: Build, checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sequences = build(), tiny.sequences()
    batch = PackedBatch.from_sequences(sequences)
    expected, entropy = reference(checkpoint[1], sequences, temperature=0.7)

    def gradient() -> Tensor:
        model.train_microbatches(
            [batch], None, lambda got, spread, __: ((got - spread).sum(), {}), temperature=0.7, entropy_gradient=True
        )
        return model.modules[0].embedding.word_embeddings.weight.main_grad.clone()

    whole = gradient()
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", 5 * tiny.VOCAB)  # chunks of five tokens
    output = model.forward_logprobs([batch], None, temperature=0.7, entropy=True)[0]
    torch.testing.assert_close(output.logprobs, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(output.entropy, entropy, rtol=0, atol=1e-4)
    torch.testing.assert_close(gradient(), whole, rtol=1e-5, atol=1e-4)


def test_gradient_is_the_sum_over_microbatches(build: Build) -> None:
    model = build()
    parts = [PackedBatch.from_sequences(tiny.sequences(seed, (11, 5))) for seed in range(3)]
    whole = PackedBatch.from_sequences([s for seed in range(3) for s in tiny.sequences(seed, (11, 5))])

    def gradient(batches: list[PackedBatch]) -> Tensor:
        metrics = model.train_microbatches(batches, None, lambda got, _, batch: (got.sum(), {"tokens": len(batch)}))
        assert [metric["tokens"] for metric in metrics] == [len(batch) for batch in batches]
        return model.modules[0].decoder.layers[0].mlp.experts.weight1.main_grad.clone()

    torch.testing.assert_close(gradient(parts), gradient([whole]), rtol=1e-4, atol=1e-4)


def test_gradient_after_an_optimizer_step_starts_from_zero(build: Build) -> None:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model, batch = build(), PackedBatch.from_sequences(tiny.sequences())
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.0, clip_grad=0.0), model.chunks)

    def gradient() -> Tensor:
        model.train_microbatches([batch, batch], None, lambda got, _, __: (got.sum(), {}))
        return model.modules[0].decoder.layers[0].mlp.experts.weight1.main_grad.clone()

    first = gradient()
    optimizer.step()
    torch.testing.assert_close(gradient(), first)


def test_extras_reach_the_loss_and_no_batches_is_no_work(build: Build) -> None:
    model = build()
    batch = PackedBatch.from_sequences([[1, 2, 3]], {"mask": torch.tensor([0.0, 1.0, 0.0])})
    seen: list[float] = []

    def loss(logprobs: Tensor, entropy: Tensor | None, given: PackedBatch) -> tuple[Tensor, dict[str, Any]]:
        seen.append(float(given.extras["mask"].sum()))
        return (logprobs * given.extras["mask"]).sum(), {}

    model.train_microbatches([batch], None, loss)
    assert seen == [1.0]
    assert model.forward_logprobs([], None) == []


def test_bfloat16_stays_close(build: Build) -> None:
    model, exact = build(dtype=torch.bfloat16), build()
    batch = PackedBatch.from_sequences(tiny.sequences())
    routes = exact.forward_logprobs([batch], None, record=True)[0].routes
    given = [PackedRoutes(routes, torch.ones(len(batch), dtype=torch.bool))]
    difference = model.forward_logprobs([batch], given)[0].logprobs - exact.forward_logprobs([batch], given)[0].logprobs
    assert difference.abs().mean() < 0.2
    assert difference.abs().max() > 0  # it really ran in bfloat16


def test_bfloat16_trains_with_float32_master_weights(build: Build) -> None:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model, batch = build(dtype=torch.bfloat16), PackedBatch.from_sequences(tiny.sequences())
    config = OptimizerConfig(optimizer="adam", lr=0.02, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0)
    optimizer = get_megatron_optimizer(config, model.chunks)
    sums = []
    for _ in range(5):
        metrics = model.train_microbatches([batch], None, lambda got, _, __: (-got.mean(), {"mean": got.mean()}))
        taken, grad_norm, _ = optimizer.step()
        assert taken
        assert grad_norm > 0
        sums.append(float(metrics[0]["mean"]))
    assert sums[-1] > sums[0] + 0.5
    assert {parameter.dtype for parameter in model.modules[0].parameters()} == {torch.bfloat16}


def test_checkpoint_round_trip(build: Build, checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    directory = tmp_path / "saved"
    model = build()
    model.modules[0].decoder.final_layernorm.weight.data.mul_(2)
    model.save_hf(directory)
    model.save_hf(directory)  # over an existing one
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {path.name for path in directory.iterdir()}
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    torch.testing.assert_close(loaded.model.norm.weight, checkpoint[1].model.norm.weight * 2)
    other = build(load=False)
    other.load_hf(directory)
    batch = PackedBatch.from_sequences(tiny.sequences())
    torch.testing.assert_close(
        other.forward_logprobs([batch], None)[0].logprobs, model.forward_logprobs([batch], None)[0].logprobs
    )


def test_sharded_checkpoint(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_rl.train.megatron.hf_weights._SHARD_BYTES", 50_000)
    model = build()
    model.save_hf(tmp_path / "saved", dtype=torch.bfloat16)
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    before = dict(model.export_weights())
    assert index["weight_map"].keys() == before.keys()
    other = build(tmp_path / "saved")
    for name, tensor in other.export_weights():
        torch.testing.assert_close(tensor, before[name].bfloat16().float())


def test_layouts_are_refused_where_ranks_and_models_are_made(checkpoint: tuple[Path, Any]) -> None:
    from agent_rl.train.megatron.transformer import transformer_config

    with pytest.raises(ConfigError, match="virtual_pipeline 2 needs pipeline stages"):
        check_parallel(ParallelConfig(virtual_pipeline=2))
    model_spec = read_model_spec(checkpoint[0])
    with pytest.raises(ConfigError, match=r"tensor=3 does not divide the model's num_attention_heads=4"):
        transformer_config(model_spec, ParallelConfig(world_size=24, tensor=3), torch.float32, "none", ())
    with pytest.raises(ConfigError, match="mlp would recompute nothing"):
        transformer_config(model_spec, ParallelConfig(), torch.float32, "selective", ("core_attn", "mlp"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported"),
    ],
)
def test_unsupported_models_are_refused(
    build: Build, checkpoint: tuple[Path, Any], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = json.loads((checkpoint[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=message):
        build(tmp_path)


def test_missing_directory_tensor_and_misfit_are_named(
    build: Build, checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    with pytest.raises(ConfigError, match="nowhere is not a directory"):
        build(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text((checkpoint[0] / "config.json").read_text())
    with pytest.raises(ConfigError, match="holds no"):
        build(tmp_path)
    weights = load_file(checkpoint[0] / "model.safetensors")
    gate = weights.pop("model.layers.2.mlp.gate.weight")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.2\.mlp\.gate\.weight"):
        build(tmp_path)
    save_file(weights | {"model.layers.2.mlp.gate.weight": gate[:4].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"mlp\.gate\.weight is \[4, 32\] in the checkpoint and \[8, 32\] by config"):
        build(tmp_path)


def test_misaligned_batches_are_refused(build: Build) -> None:
    with pytest.raises(ValueError, match="cu_seqlens"):
        PackedBatch(torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64), torch.tensor([0, 4]), (0,))
    with pytest.raises(ValueError, match="2 sample_ids for 1 sequences"):
        PackedBatch(torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64), torch.tensor([0, 5]), (0, 1))
    model, batch = build(), PackedBatch.from_sequences([[1, 2, 3]])
    routes = PackedRoutes(tiny.random_routes(4), torch.ones(4, dtype=torch.bool))
    with pytest.raises(TrainerError, match="3 tokens has 4 rows of routes"):
        model.forward_logprobs([batch], [routes])
    with pytest.raises(TrainerError, match="1 batches and 2 routes"):
        model.forward_logprobs([batch], [None, None])
