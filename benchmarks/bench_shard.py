"""Bytes of routes that every trainer rank receives, over those its routers need. Goal: 1.0 and padding.

Run: ``python benchmarks/bench_shard.py``

24 trajectories of 2,000 to 8,000 tokens, 48 MoE layers of top-8 of 128 experts (Qwen3-30B-A3B's), packed into
micro-batches of 16,384 tokens, for several parallel layouts. A rank's shards are cut as the driver cuts them and
pickled as Ray does; ``needed`` are one byte an expert id of the tokens and layers of a rank's routers, without padding.
``routes`` counts the expert ids alone, ``pickled`` all of it: presence, identity, pickle's own. ``before`` is what
every rank received when all samples were put once with all their routes. Also timed: cutting (the bytes of all ranks a
second, in processor time) and checking the identities (a rank, all micro-batches).
"""

from __future__ import annotations

import argparse
import pickle
import time

import numpy as np

from agent_rl.train.batching.partition import partition_sequences
from agent_rl.train.route_sharding import shard_routes
from agent_rl.types import Sample
from r3.routing import Routing
from r3.shard import Packing, ShardSpec, check_identity, moe_columns, router_places, stage_layers

LAYERS, TOP_K, EXPERTS, BUDGET = 48, 8, 128, 16_384

# data, context, tensor, pipeline, virtual stages
LAYOUTS = [
    (1, 1, 1, 1, 1), (8, 1, 1, 1, 1), (1, 1, 4, 1, 1), (1, 1, 1, 4, 1), (1, 1, 1, 4, 3), (1, 2, 1, 1, 1),
    (1, 4, 1, 1, 1), (2, 2, 2, 2, 1), (1, 4, 4, 4, 3),
]  # fmt: skip


def trajectories() -> list[Sample]:
    generator = np.random.default_rng(0)
    return [trajectory(int(generator.integers(2_000, 8_000)), generator) for _ in range(24)]


def trajectory(tokens: int, generator: np.random.Generator) -> Sample:
    start = generator.integers(0, EXPERTS, (tokens, LAYERS, 1))
    experts = ((start + np.arange(TOP_K) * 15) % EXPERTS).astype(np.uint8)
    present = np.arange(tokens) < tokens - 1
    zeros = np.zeros(tokens, np.float32)
    routing = Routing(experts, present, (), EXPERTS)
    return Sample(generator.integers(0, 1 << 17, tokens).astype(np.int32), zeros > 0, zeros, 0.0, routing)


def specs_of(context: int, tensor: int, pipeline: int, virtual: int) -> list[ShardSpec]:
    stages = stage_layers(LAYERS, pipeline, virtual)
    return [
        ShardSpec(moe_columns(sum(stage, ()), range(1, LAYERS + 1)), c, context, t, tensor)
        for stage in stages
        for c in range(context)
        for t in range(tensor)
    ]


def measure(samples: list[Sample], data: int, context: int, tensor: int, pipeline: int, virtual: int) -> None:
    needed, routes, pickled, cutting, checking = 0, 0, 0, 0.0, 0.0
    specs = specs_of(context, tensor, pipeline, virtual)
    lengths = [len(sample.tokens) for sample in samples]
    for batches in partition_sequences(lengths, budget=BUDGET, ranks=data):
        for ids in batches:
            packing = Packing(tuple(lengths[index] for index in ids), specs[0].multiple)
            tokens = np.concatenate([samples[index].tokens for index in ids])
            for spec in specs:
                started = time.process_time()
                shard = shard_routes(samples, ids, spec)
                cutting += time.process_time() - started
                started = time.process_time()
                check_identity(shard, ids, tokens, packing, spec)
                checking += time.process_time() - started
                real = int((packing.source[router_places(packing, spec)] >= 0).sum())
                needed += real * len(spec.columns) * TOP_K
                routes += shard.experts.nbytes
                pickled += len(pickle.dumps(shard, protocol=5))
    ranks = data * len(specs)
    before = ranks * sum(sample.routing.experts.nbytes for sample in samples if sample.routing is not None)
    name = f"data {data} context {context} tensor {tensor} pipeline {pipeline}x{virtual}"
    print(
        f"{name:<42} {ranks:>4} {needed / ranks / 1e6:>9.2f} {routes / needed:>8.5f} {pickled / needed:>8.4f} "
        f"{before / needed:>7.2f} {routes / cutting / 1e9:>8.2f} {1e3 * checking / ranks:>9.1f}"
    )


def main() -> None:
    samples = trajectories()
    print(f"{sum(len(sample.tokens) for sample in samples):,} tokens, {LAYERS} layers, top-{TOP_K}; over needed bytes:")
    print(
        f"{'layout':<42} {'rank':>4} {'needed MB':>9} {'routes':>8} {'pickled':>8} {'before':>7} "
        f"{'cut GB/s':>8} {'check ms':>9}"
    )
    for layout in LAYOUTS:
        measure(samples, *layout)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
