"""Shards of routes: used like whole routes, and refused if they belong to other tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_tiny as tiny
import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch

from agent_rl.config import RunConfig
from agent_rl.errors import TrainerError
from agent_rl.train.batching.partition import split_step
from agent_rl.train.megatron.packed_batch import PackedBatch, PackedRoutes
from agent_rl.train.reports import route_differences
from agent_rl.train.requests import OptimizerSpec, StepRequest
from agent_rl.train.route_sharding import shard_routes
from agent_rl.types import Sample
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
def test_a_shard_is_used_like_whole_routes(build: Callable[..., Any], dtype: type) -> None:
    model, batch = build(), replace(tiny.packed(), sample_ids=SAMPLES)
    experts, present = tiny.random_routes(len(batch)), torch.arange(len(batch)) % 3 != 0
    whole = model.forward_logprobs([batch], [PackedRoutes(experts, present)], record=True)[0]
    shard = shard_of(batch, experts.numpy().astype(dtype), present.numpy(), model.shard)
    for part in (shard.experts, shard.present, shard.identity):
        part.flags.writeable = False  # as they come out of Ray's object store
    shard_routes = model.forward_logprobs([batch], [shard], record=True)[0]
    assert torch.equal(shard_routes.logprobs, whole.logprobs)
    assert torch.equal(shard_routes.routes, whole.routes)
    assert torch.equal(shard_routes.routes[present], experts[present])


def test_routes_of_other_tokens_are_refused(build: Callable[..., Any]) -> None:
    model, batch = build(), replace(tiny.packed(), sample_ids=SAMPLES)
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
    model.forward_logprobs([batch], [shard])  # works after the refusals


def step(model: Any, samples: list[Sample], shards: list[RouteShard], replay: str) -> Any:
    from agent_rl.train.optimizer import PolicyOptimizer
    from agent_rl.train.step import grpo_step

    settings = {"replay": replay, "device": "cpu"}
    config = RunConfig.model_validate({"name": "test", "model": model.directory, "train": settings})
    optimizer = PolicyOptimizer(model.chunks, OptimizerSpec(lr=1e-3), torch.float32)
    (shares,) = split_step(samples, mini_steps=1, budget=1000, ranks=1)
    order = StepRequest(config, measure_without_replay=True, detail=True)
    return grpo_step(model, optimizer, dict(enumerate(samples)), shares, shards, order)


def build_samples(routes: bool) -> list[Sample]:
    samples = []
    for tokens in tiny.sequences(lengths=(17, 30)):
        mask, zeros = np.arange(len(tokens)) > 3, np.zeros(len(tokens), np.float32)
        experts = tiny.random_routes(len(tokens), seed=len(tokens)).numpy()
        routing = Routing(experts, np.arange(len(tokens)) % 4 != 3, (), tiny.EXPERTS)
        samples.append(Sample(tokens.numpy().astype(np.int32), mask, zeros, 1.0, routing if routes else None))
    return samples


@pytest.mark.parametrize("replay", ["r3", "r2"])
def test_a_step_replays_its_own_share(build: Callable[..., Any], replay: str) -> None:
    """R3: the rollout's rows, in both passes. R2: the rows of the old-log-prob pass, in the update."""
    model, samples = build(), build_samples(routes=True)
    ((share,),) = split_step(samples, mini_steps=1, budget=1000, ranks=1)
    (ids,) = share.micro_batches
    shard = shard_routes(samples, ids, model.shard)
    batch = PackedBatch.from_sequences([torch.from_numpy(samples[index].tokens) for index in ids])
    own = model.forward_logprobs([batch], None, record=True)[0].routes.numpy()
    model.replayer.observer = events = tiny.RouterEvents()
    report, differs = step(model, samples, [shard], replay)
    sampled, (sums,) = report.sampled, report.updates
    assert len(sampled.entropy) == len(sampled.flags) == sums.tokens
    assert sampled.entropy.astype(float).sum() == pytest.approx(sums.entropy, rel=1e-3)
    assert (sampled.flags == 0).all(), "nothing is clipped in a first update, and no correction is configured"
    for column, number in enumerate(model.layer_numbers):
        given = shard.experts if replay == "r3" else own
        passes = events.of("assigned", number)
        assert len(passes) == (2 if replay == "r3" else 1)
        for _, experts in passes:
            np.testing.assert_array_equal(experts.numpy(), given[:, column])
    (replayed,), (native,) = differs.unpacked(differs.replayed), differs.unpacked(differs.without_replay)
    np.testing.assert_array_equal(native, route_differences(shard, own))
    np.testing.assert_array_equal(replayed, native if replay == "r2" else np.zeros_like(native))
    assert native.any()


@pytest.mark.parametrize("replay", ["r3", "r2", "off"])
def test_a_dense_model_has_nothing_to_replay(build: Callable[..., Any], tmp_path: Path, replay: str) -> None:
    tiny.make(tmp_path / "dense", kind="qwen3")
    model = build(tmp_path / "dense")
    report, differs = step(model, build_samples(routes=False), [], replay)
    assert differs is None
    np.testing.assert_array_equal(report.trainer_logprobs, report.logprobs_without_replay)
    assert report.updates[0].update.grad_norm > 0
