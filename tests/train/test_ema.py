"""The average of the weights: against loops over floats, saved and resumed bit for bit, in every kind of optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch
from support.megatron_world import world_of_one
from test_offload import optimizer_of, policy, same, state_of, update

pytestmark = pytest.mark.megatron

DECAY = 0.75
KINDS = [("float32", False, False), ("bfloat16", False, False), ("bfloat16", True, True), ("float32", True, False)]


@pytest.fixture(scope="module")
def world(megatron_shim: None) -> Iterator[Any]:
    """The ranks of a world of one."""
    with world_of_one() as ranks:
        yield ranks


def slot_of(optimizer: Any, slot: str) -> dict[str, torch.Tensor]:
    return {name: tensor for (name, kind), tensor in state_of(optimizer).items() if kind == slot}


@pytest.mark.parametrize(("dtype", "distributed", "offload"), KINDS)
def test_average_equals_loops_over_floats_and_resumes_bit_for_bit(
    tiny_moe: Path, tmp_path: Path, world: Any, dtype: str, distributed: bool, offload: bool
) -> None:
    from agent_rl.train.checkpoint.piece_files import PieceReader, write_pieces
    from agent_rl.train.checkpoint.rank_state import StatePieces

    models = [policy(tiny_moe, world, dtype, distributed) for _ in range(3)]
    plain = optimizer_of(models[0], dtype, offload=offload)
    averaged, resumed = (optimizer_of(model, dtype, offload=offload, ema=DECAY) for model in models[1:])
    start = slot_of(averaged, "master")
    assert same(list(start.values()), list(slot_of(averaged, "ema").values()))
    seen = {name: [float(value[3])] for name, value in start.items()}
    for seed in range(2):
        assert update(models[0], plain, seed) == update(models[1], averaged, seed)
        for name, value in slot_of(averaged, "master").items():
            seen[name].append(float(value[3]))
    for name, value in slot_of(averaged, "ema").items():
        first, *rest = seen[name]
        for weight in rest:
            first = DECAY * first + (1 - DECAY) * weight
        assert float(value[3]) == pytest.approx(first, rel=1e-5, abs=1e-8)
    snapshot, path = StatePieces(models[1], averaged).snapshot(), tmp_path / "rank.safetensors"
    assert len(snapshot.values) == 4 * sum(value.numel() for value in start.values())
    with path.open("wb") as file:
        write_pieces(file, snapshot.pieces, snapshot.values)
    StatePieces(models[2], resumed).load(PieceReader([path]), snapshot.counts)
    for model, optimizer in zip(models, (plain, averaged, resumed), strict=True):
        update(model, optimizer, 2)
    assert same(list(state_of(averaged).values()), list(state_of(resumed).values()))
    assert same(list(slot_of(plain, "master").values()), list(slot_of(averaged, "master").values())), "training changed"


def test_a_skipped_update_leaves_the_average(tiny_moe: Path, world: Any) -> None:
    model = policy(tiny_moe, world, "float32", False)
    optimizer = optimizer_of(model, "float32", offload=False, ema=DECAY)
    update(model, optimizer, 0)
    before = slot_of(optimizer, "ema")
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
        for parameter in chunk.module.parameters():
            parameter.main_grad.fill_(torch.nan)
    assert not optimizer.step().taken
    assert same(list(before.values()), list(slot_of(optimizer, "ema").values()))
