"""Modules that ``train.freeze`` keeps as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch
from support.megatron_world import world_of_one

from agent_rl.config import ParallelConfig
from agent_rl.models.spec import read_model_spec
from agent_rl.models.tensors import belongs_to
from agent_rl.train.megatron.packed_batch import PackedBatch
from agent_rl.train.parallel_checks import freeze_problems
from agent_rl.train.requests import OptimizerSpec

pytestmark = pytest.mark.megatron
FROZEN = ("embeddings", "lm_head", "attention", "router")
BATCH = PackedBatch.from_sequences([[5, 9, 2, 7], [3, 8]])


@pytest.fixture(scope="module")
def world(megatron_shim: None) -> Iterator[Any]:
    """The ranks of a world of one."""
    with world_of_one() as ranks:
        yield ranks


def begin(directory: Path, *freeze: str) -> tuple[Any, Any]:
    """A model and its optimizer. Layers are recomputed, so that their input must require a gradient."""
    from agent_rl.train.megatron.model import PolicyModel
    from agent_rl.train.optimizer import PolicyOptimizer

    options: dict[str, Any] = {"device": torch.device("cpu"), "recompute": "full", "freeze": freeze}
    model = PolicyModel.build(directory, ParallelConfig(), **options)
    return model, PolicyOptimizer(model.chunks, OptimizerSpec(lr=1e-2, weight_decay=0.1), torch.float32)


def update(model: Any, optimizer: Any) -> None:
    model.train_microbatches([BATCH], None, lambda logprobs, _entropy, _batch: (-logprobs.sum(), {}))
    assert optimizer.step().taken


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.modules[0].named_parameters()}


@pytest.mark.parametrize("freeze", [FROZEN, ("experts",)])
def test_frozen_weights_keep_every_bit_and_have_no_state(tiny_moe: Path, world: Any, freeze: tuple[str, ...]) -> None:
    model, optimizer = begin(tiny_moe, *freeze)
    before = weights(model)
    update(model, optimizer)
    kept = {name for name, value in weights(model).items() if torch.equal(value, before[name])}
    assert kept == {name for name in before if belongs_to(name, freeze)}
    assert {shard.name for shard in optimizer.shards()} == {f"0.{name}" for name in before.keys() - kept}


def test_the_rest_learns_as_without_freezing(tiny_moe: Path, world: Any) -> None:
    """In the first update, in which every gradient is that of the starting weights."""
    gradients = []
    for freeze in ((), FROZEN):
        model, _ = begin(tiny_moe, *freeze)
        model.train_microbatches([BATCH], None, lambda logprobs, _entropy, _batch: (-logprobs.sum(), {}))
        named = model.modules[0].named_parameters()
        gradients.append({name: each.main_grad.clone() for name, each in named if each.requires_grad})
    assert gradients[1]
    assert all(torch.equal(gradient, gradients[0][name]) for name, gradient in gradients[1].items())


def test_a_checkpoint_has_the_trained_weights_only_and_resumes_exactly(
    tiny_moe: Path, world: Any, tmp_path: Path
) -> None:
    from agent_rl.train.checkpoint.piece_files import PieceReader, write_pieces
    from agent_rl.train.checkpoint.rank_state import StatePieces

    model, optimizer = begin(tiny_moe, *FROZEN)
    update(model, optimizer)
    snapshot, path = StatePieces(model, optimizer).snapshot(), tmp_path / "rank.safetensors"
    assert len(snapshot.values) == 3 * sum(p.numel() for p in model.modules[0].parameters() if p.requires_grad)
    with path.open("wb") as file:
        write_pieces(file, snapshot.pieces, snapshot.values)
    update(model, optimizer)
    other, resumed = begin(tiny_moe, *FROZEN)
    StatePieces(other, resumed).load(PieceReader([path]), snapshot.counts)
    update(other, resumed)
    expected = weights(model)
    assert all(torch.equal(value, expected[name]) for name, value in weights(other).items())


@pytest.mark.parametrize(
    ("train", "line"),
    [
        ({"freeze": ["mlp"]}, "train.freeze: this model has no mlp"),
        ({"freeze": ["router"], "lora": {}}, "train.freeze: train.lora trains adapters only; remove one of them"),
        (
            {"freeze": ["experts"], "balance": {"enabled": True}, "parallel": {"world_size": 2, "expert": 2}},
            "train.freeze: train.balance borrows experts with their gradients; turn it off or train the experts",
        ),
    ],
)
def test_what_cannot_be_frozen_is_refused(run_config: Any, tiny_moe: Path, train: dict[str, Any], line: str) -> None:
    assert freeze_problems(run_config(**train).train, read_model_spec(tiny_moe)) == [line]


def test_one_weight_for_embeddings_and_output_is_frozen_as_one(run_config: Any, tiny_moe: Path) -> None:
    tied = replace(read_model_spec(tiny_moe), tied=True)
    (line,) = freeze_problems(run_config(freeze=["embeddings"]).train, tied)
    assert line.endswith("has one weight for embeddings and lm_head; freeze both or neither")
    assert freeze_problems(run_config(freeze=["embeddings", "lm_head"]).train, tied) == []
