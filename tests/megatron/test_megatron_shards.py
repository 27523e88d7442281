"""Routes that come already cut: used as whole ones are, and refused where they are another token's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import megatron_tiny as tiny
import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch

from agent_rl.errors import TrainerError
from agent_rl.train.megatron.batch import PackedBatch, PackedRoutes
from r3.routing import Routing
from r3.shard import Packing, RouteShard, ShardSpec, cut_routes

pytestmark = pytest.mark.megatron
SAMPLES = (4, 0, 9, 2)


def shard_of(batch: PackedBatch, experts: np.ndarray, present: np.ndarray, spec: ShardSpec) -> RouteShard:
    bounds = batch.cu_seqlens.numpy()[1:-1]
    parts = zip(np.split(experts, bounds), np.split(present, bounds), strict=True)
    routings = [Routing(rows, mask, (), tiny.EXPERTS) for rows, mask in parts]
    packing = Packing(tuple(batch.cu_seqlens.diff().tolist()), spec.multiple)
    return cut_routes(routings, batch.sample_ids, batch.tokens.numpy(), packing, spec)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_shard_is_used_as_whole_routes_are(build: Callable[..., Any], dtype: type) -> None:
    model, batch = build(), replace(PackedBatch.from_sequences(tiny.sequences()), sample_ids=SAMPLES)
    experts, present = tiny.random_routes(len(batch)), torch.arange(len(batch)) % 3 != 0
    whole = model.forward_logprobs([batch], [PackedRoutes(experts, present)], record=True)[0]
    shard = shard_of(batch, experts.numpy().astype(dtype), present.numpy(), model.shard)
    for part in (shard.experts, shard.present, shard.identity):
        part.flags.writeable = False  # as they come out of Ray's object store
    cut = model.forward_logprobs([batch], [shard], record=True)[0]
    assert torch.equal(cut.logprobs, whole.logprobs)
    assert torch.equal(cut.routes, whole.routes)
    assert torch.equal(cut.routes[present], experts[present].to(torch.int16))


def test_routes_of_other_tokens_are_refused(build: Callable[..., Any]) -> None:
    model, batch = build(), replace(PackedBatch.from_sequences(tiny.sequences()), sample_ids=SAMPLES)
    experts, present = tiny.random_routes(len(batch)).numpy(), np.ones(len(batch), np.bool_)
    shard = shard_of(batch, experts, present, model.shard)
    swapped = shard.identity.copy()
    swapped[[18, 20]] = swapped[[20, 18]]  # rows of the third sequence, which begins at 17 + 1
    with pytest.raises(TrainerError, match=r"sample 9, token 0 \(id \d+\): the routes .* \(2 of 57 rows do\)"):
        model.forward_logprobs([batch], [replace(shard, identity=swapped)])
    with pytest.raises(TrainerError, match="sample 5, token 0"):
        model.forward_logprobs([replace(batch, sample_ids=(5, 0, 9, 2))], [shard])
    with pytest.raises(TrainerError, match=r"routes came for the MoE layers \[1\], this rank has \[0, 1, 2, 3\]"):
        model.forward_logprobs([batch], [shard_of(batch, experts, present, ShardSpec((1,)))])
    model.forward_logprobs([batch], [shard])  # a refusal leaves nothing behind
