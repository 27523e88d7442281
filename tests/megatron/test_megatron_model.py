"""The Megatron model: chunks, micro-batches, bfloat16, saved checkpoints, refusals. test_model_families.py compares it
with transformers."""

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


def test_temperature_and_chunks_give_the_log_probs_and_gradients_of_the_whole(
    build: Build, checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sequences = build(), tiny.sequences()
    batch = PackedBatch.from_sequences(sequences)
    expected, entropy = tiny.reference(checkpoint[1], sequences, temperature=0.7)

    def gradient() -> Tensor:
        options = {"temperature": 0.7, "entropy_gradient": True}
        model.train_microbatches([batch], None, lambda got, spread, _: ((got - spread).sum(), {}), **options)
        return model.modules[0].embedding.word_embeddings.weight.main_grad.clone()

    whole = gradient()
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", 5 * tiny.VOCAB)  # chunks of five tokens
    output = model.forward_logprobs([batch], None, temperature=0.7, entropy=True)[0]
    torch.testing.assert_close(output.logprobs, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(output.entropy, entropy, rtol=0, atol=1e-4)
    torch.testing.assert_close(gradient(), whole, rtol=1e-5, atol=1e-4)


def test_gradient_is_the_sum_over_microbatches(build: Build) -> None:
    model = build()
    parts = [tiny.packed(seed, (11, 5)) for seed in range(3)]
    whole = PackedBatch.from_sequences([s for seed in range(3) for s in tiny.sequences(seed, (11, 5))])

    def gradient(batches: list[PackedBatch]) -> Tensor:
        metrics = model.train_microbatches(batches, None, lambda got, _, batch: (got.sum(), {"tokens": len(batch)}))
        assert [metric["tokens"] for metric in metrics] == [len(batch) for batch in batches]
        return model.modules[0].decoder.layers[0].mlp.experts.weight1.main_grad.clone()

    torch.testing.assert_close(gradient(parts), gradient([whole]), rtol=1e-4, atol=1e-4)


def test_bfloat16_log_probs_are_close_to_float32(build: Build) -> None:
    model, exact = build(dtype=torch.bfloat16), build()
    batch = tiny.packed()
    routes = exact.forward_logprobs([batch], None, record=True)[0].routes
    given = [tiny.everywhere(routes)]
    difference = model.forward_logprobs([batch], given)[0].logprobs - exact.forward_logprobs([batch], given)[0].logprobs
    assert difference.abs().mean() < 0.2
    assert difference.abs().max() > 0  # it really ran in bfloat16


def test_a_sharded_checkpoint_replaces_another(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    model.save_hf(tmp_path / "saved")
    monkeypatch.setattr("agent_rl.train.hf_writer._SHARD_BYTES", 50_000)
    model.save_hf(tmp_path / "saved", dtype=torch.bfloat16)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert {"config.json", "tokenizer.json"} <= {path.name for path in (tmp_path / "saved").iterdir()}
    assert not (tmp_path / "saved/model.safetensors").exists()
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    before = dict(model.export_weights())
    assert index["weight_map"].keys() == before.keys()
    other = build(tmp_path / "saved")
    for name, tensor in other.export_weights():
        torch.testing.assert_close(tensor, before[name].bfloat16().float())


def test_impossible_layouts_are_refused_by_ranks_and_model(checkpoint: tuple[Path, Any]) -> None:
    from agent_rl.train.megatron.transformer import transformer_config

    with pytest.raises(ConfigError, match="virtual_pipeline 2 needs pipeline stages"):
        check_parallel(ParallelConfig(virtual_pipeline=2))
    model_spec = read_model_spec(checkpoint[0])
    with pytest.raises(ConfigError, match=r"tensor=3 does not divide the model's num_attention_heads=4"):
        transformer_config(model_spec, ParallelConfig(world_size=24, tensor=3), torch.float32, "none", ())
    with pytest.raises(ConfigError, match="mlp would recompute nothing"):
        transformer_config(model_spec, ParallelConfig(), torch.float32, "selective", ("core_attn", "mlp"))


def test_a_missing_directory_is_named(build: Build, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is not a directory"):
        build(tmp_path / "nowhere")


def test_misaligned_batches_are_refused(build: Build) -> None:
    tokens = torch.zeros(5, dtype=torch.int64)
    for stop, ids, message in ((4, (0,), "cu_seqlens"), (5, (0, 1), "2 sample_ids for 1 sequences")):
        with pytest.raises(ValueError, match=message):
            PackedBatch(tokens, tokens, torch.tensor([0, stop]), ids)
    model, batch = build(), PackedBatch.from_sequences([[1, 2, 3]])
    routes = PackedRoutes(tiny.random_routes(4), torch.ones(4, dtype=torch.bool))
    for given, message in (([routes], "3 tokens has 4 rows of routes"), ([None, None], "1 batches and 2 routes")):
        with pytest.raises(TrainerError, match=message):
            model.forward_logprobs([batch], given)
