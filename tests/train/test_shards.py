"""How the driver shards routes over the ranks of every layout and reassembles them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.errors import TrainerError
from agent_rl.train import route_sharding as sharding
from agent_rl.train.batching.partition import partition_sequences
from agent_rl.train.reports import RouteDifferences, route_differences
from agent_rl.train.route_sharding import WorkerInfo, have_routes, reassemble, shard_routes
from agent_rl.types import Sample
from r3.mismatch.report import differing_experts, route_mismatch
from r3.routing import Routing
from r3.shard import ShardSpec

TOP_K, EXPERTS = 2, 6


def sample_of(length: int, layers: int, seed: int, *, share: float = 0.8) -> Sample:
    """Random routes; of the rows but the last, ``share`` are present."""
    generator = np.random.default_rng(seed)
    experts = generator.random((length, layers, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.uint8)
    present = generator.random(length) < share
    present[-1] = share == 1
    experts[~present] = 0
    tokens = generator.integers(0, 50, length).astype(np.int32)
    zeros = np.zeros(length, np.float32)
    return Sample(tokens, zeros > 0, zeros, 0.0, Routing(experts, present, (), EXPERTS))


def routing_of(sample: Sample) -> Routing:
    assert sample.routing is not None
    return sample.routing


def infos_of(data: int, context: int, tensor: int, stages: list[tuple[int, ...]]) -> list[WorkerInfo]:
    layers = sum(len(columns) for columns in stages)
    places = itertools.product(stages, range(data), range(context), range(tensor))
    return [
        WorkerInfo(rank, d, data, rank == 0, ShardSpec(columns, c, context, t, tensor), layers)
        for rank, (columns, d, c, t) in enumerate(places)
    ]


World = tuple[list[Sample], list[WorkerInfo]]


@st.composite
def worlds(draw: Any) -> World:
    stages = draw(st.sampled_from([[(0,)], [(0, 1, 2)], [(), (0, 1)], [(0, 2), (1, 3)], [(0,), (1,), (2,)]]))
    data, context, tensor = (draw(st.integers(1, most)) for most in (2, 3, 3))
    infos = infos_of(data, context, tensor, stages)
    lengths = draw(st.lists(st.integers(2, 25), min_size=1, max_size=7))
    # The last sample has rows to compare in every case.
    samples = [sample_of(length, infos[0].moe_layers, seed) for seed, length in enumerate(lengths)]
    return [*samples, sample_of(9, infos[0].moe_layers, 77)], infos


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_shards_of_all_ranks_reassemble_to_the_routes_and_their_differences(world: World) -> None:
    samples, infos = world
    layers = infos[0].moe_layers
    others = [sample_of(len(sample.tokens), layers, 99 + at, share=1) for at, sample in enumerate(samples)]
    micro_batches = partition_sequences([len(sample.tokens) for sample in samples], budget=40, ranks=infos[0].data_size)
    total = None
    for data_rank, batches in enumerate(micro_batches):
        peers = [info for info in infos if info.data_rank == data_rank]
        differs = []
        for info in peers:
            given_, used = ([shard_routes(held, ids, info.shard) for ids in batches] for held in (samples, others))
            found = [route_differences(shard, other.experts) for shard, other in zip(given_, used, strict=True)]
            report = RouteDifferences.of(len(info.shard.columns), found, None)
            assert [part.tolist() for part in report.unpacked(report.replayed)] == [part.tolist() for part in found]
            differs.append(report.unpacked(report.replayed))
        for ids in batches:
            whole = reassemble(samples, ids, peers, [shard_routes(samples, ids, info.shard).experts for info in peers])
            for index, experts in sharding.by_sample(samples, ids, whole).items():
                routing = routing_of(samples[index])
                np.testing.assert_array_equal(experts[routing.present], routing.experts[routing.present])
        counts = sharding.count_differing(samples, batches, peers, differs)
        total = counts if total is None else total + counts
    assert total is not None
    whole_routes = [(routing_of(one), routing_of(two)) for one, two in zip(samples, others, strict=True)]
    differ = [differing_experts(*pair) for pair in whole_routes]
    sequences = np.repeat(np.arange(len(differ)), [len(rows) for rows in differ])
    expected = route_mismatch(np.concatenate(differ), sequences, TOP_K)
    assert (total.tokens, total.sequences) == (expected.tokens, expected.sequences)
    assert total.routers_differ / total.routers == pytest.approx(expected.router)
    assert (total.layers_differ / total.tokens).tolist() == pytest.approx(expected.by_layer.tolist())
    assert total.tokens_differ / total.tokens == pytest.approx(expected.token)
    assert total.sequence_layers / total.sequences == pytest.approx(expected.sequence)
    assert total.needed == sum(a.tokens - 1 for a, _ in whole_routes)
    assert total.present == total.tokens
    assert total.stored_bytes == total.stored_tokens * layers * TOP_K


def test_samples_are_sent_without_routes_and_only_where_needed() -> None:
    samples = [sample_of(5 + index, 2, index) for index in range(4)]
    unrouted = sharding.without_routes(samples, [[3], [1]])
    assert sorted(unrouted) == [1, 3]
    assert all(sample.routing is None for sample in unrouted.values())
    assert unrouted[3].tokens is samples[3].tokens
    assert samples[3].routing is not None, "the caller's samples are unchanged"


def test_routes_that_do_not_fit_their_samples_are_refused() -> None:
    good = sample_of(5, 2, 0)
    routing = routing_of(good)
    clipped = replace(routing, experts=routing.experts[:4], present=routing.present[:4])
    assert have_routes([good, good], 2)
    assert not have_routes([replace(good, routing=None)], 2)
    for bad, message in (
        (replace(good, routing=None), "^1 of 2 samples have no routes$"),
        (replace(good, routing=clipped), "^sample 1 has 5 tokens and 4 rows of routes$"),
        (sample_of(5, 3, 0), "^sample 1 has routes of 3 MoE layers, the trainer's model has 2$"),
        (replace(good, routing=replace(routing, num_experts=9)), "different shapes"),
    ):
        with pytest.raises(TrainerError, match=message):
            have_routes([good, bad], 2)
    infos = infos_of(1, 2, 1, [(0, 1)])
    parts = [shard_routes([good], [0], info.shard).experts for info in infos]
    with pytest.raises(TrainerError, match="the ranks' routes do not fit together"):
        reassemble([good], [0], infos[:1], parts[:1])
