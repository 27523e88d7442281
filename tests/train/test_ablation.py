"""``r3.ablation``: the routes that each experiment removes from a packed micro-batch, and refused settings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError
from support.train_samples import sample_of

from agent_rl.config import Ablation, RunConfig
from agent_rl.train.batching.packing import MicroBatch, pack
from agent_rl.train.route_ablation import ablated_routes
from r3.shard import Packing, RouteShard, ShardSpec, cut_routes

LENGTHS = (4, 5)
SAMPLED = ([0, 0, 1, 1], [0, 1, 0, 1, 1])
LAG = ([0, 0, 1, 0], [0, 2, 0, 0, 0])
"""The first sampled token of each sequence is of older weights than the others."""


@pytest.fixture
def packed() -> tuple[RouteShard, MicroBatch]:
    """Two packed sequences with all rows but the last of each."""
    samples = [
        replace(sample_of(n, seed=n), loss_mask=np.array(mask, bool), lag=np.array(lag, np.int32))
        for n, mask, lag in zip(LENGTHS, SAMPLED, LAG, strict=True)
    ]
    batch = pack(samples, (0, 1))
    routings = [sample.routing for sample in samples if sample.routing is not None]
    return cut_routes(routings, (0, 1), batch.tokens_T, Packing(LENGTHS), ShardSpec((0, 1))), batch


def both(ablation: Ablation, shard: RouteShard, batch: MicroBatch) -> RouteShard:
    """The routes of both passes, which are the same."""
    before, update = ablated_routes(ablation, [shard], [batch])
    assert before is not None
    assert update is before
    return before[0]


def test_without_an_ablation_the_routes_are_untouched(packed: tuple[RouteShard, MicroBatch]) -> None:
    assert both("none", *packed) is packed[0]


def test_one_of_the_passes_can_run_without_routes(packed: tuple[RouteShard, MicroBatch]) -> None:
    shard, batch = packed
    assert ablated_routes("old_logprob_only", [shard], [batch]) == ([shard], None)
    assert ablated_routes("update_only", [shard], [batch]) == (None, [shard])


@pytest.mark.parametrize(
    ("ablation", "rows"),
    [
        ("none", [1, 1, 1, 0, 1, 1, 1, 1, 0]),
        ("sampled_only", [0, 1, 1, 0, 1, 0, 1, 1, 0]),
        ("fresh_only", [1, 0, 1, 0, 0, 1, 1, 1, 0]),
        ("shifted", [0, 1, 1, 1, 0, 1, 1, 1, 1]),
    ],
)
def test_ablations_remove_rows(packed: tuple[RouteShard, MicroBatch], ablation: Ablation, rows: list[int]) -> None:
    assert both(ablation, *packed).present.tolist() == [bool(row) for row in rows]


def test_shifted_rows_are_those_of_the_token_before(packed: tuple[RouteShard, MicroBatch]) -> None:
    shard, batch = packed
    shifted = both("shifted", shard, batch)
    for row in np.flatnonzero(shifted.present):
        assert (shifted.experts[row] == shard.experts[row - 1]).all()


def test_every_second_layer_can_be_removed(packed: tuple[RouteShard, MicroBatch]) -> None:
    shard, batch = packed
    kept = both("alternate_layers", shard, batch)
    assert (kept.present[:, 0] == shard.present).all()
    assert not kept.present[:, 1].any()


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({"train": {"replay": "r2"}}, "requires train.replay r3"),
        ({"train": {"balance": {"enabled": True}}}, "conflicts with train.balance"),
        ({"r3": {"ablation": "shifted", "trace": {"steps": [1]}}}, "remove r3.trace.steps"),
        ({"train": {"parallel": {"world_size": 2, "tensor": 2}}}, "train.parallel.tensor 1 and context 1"),
    ],
)
def test_ablation_rejects_settings_that_rely_on_complete_routes(others: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=f"r3.ablation shifted .*{reason}"):
        RunConfig.model_validate({"name": "test", "model": "there", "r3": {"ablation": "shifted"}, **others})
