"""How evenly micro-batches are dealt out by cost, against by tokens and against first-fit; and what a step gains.

Run: ``python benchmarks/bench_packing.py [--sequences 512] [--no-step]``

Lengths are long-tailed, as agents' are: log-normal with a median of 12,000 tokens (sigma 0.8), at most 65,536. Costs
are those of Qwen3-30B-A3B. *Imbalance* is what a step takes over what it would take if all ranks always worked: the
dearest rank over the mean where ranks are independent, and the sum over rows of the dearest micro-batch over the mean
where they share experts (lockstep). Plans: ``cost`` is the trainer's; ``tokens`` deals the same way with every token
costing the same; ``rows by tokens`` fills all ranks' micro-batches by tokens and deals them out in rows, whatever
shares experts; ``first-fit`` packs in the order of arrival and gives the micro-batches to the ranks in turn.

Then two data ranks, real processes, each run their share of one step (forward and backward) of a small model, with
lengths a 32nd of the above: a step takes as long as the rank that takes longest. Their own processor time is compared,
plan by plan in turns, since a busy machine moves that less than the wall clock. Last, the cost model itself: processor
time of one sequence over its cost, by length, 1 at the first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from one_rank import arguments, free_port, one_rank, policy, world
from timing import timed

from agent_rl.config import ParallelConfig
from agent_rl.models.spec import ModelSpec
from agent_rl.train.batching.cost import TOKENS, SequenceCost, sequence_cost
from agent_rl.train.batching.partition import Partition, partition_sequences

QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "max_position_embeddings": 262_144,
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
"""Attention costs as much as the rest at 514 tokens, in Qwen3-30B-A3B at 15,471: a 30th."""
LONGEST, SHRINK = 65_536, 32
SMALL_FACTS = ModelSpec.of({"model_type": "qwen3_moe", "max_position_embeddings": LONGEST, **SMALL})


def lengths_of(count: int, seed: int) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(np.log(12_000), 0.8, count)
    return [int(n) for n in np.clip(drawn, 512, LONGEST)]


def by_tokens_in_rows(lengths: Sequence[int], budget: int, ranks: int) -> Partition:
    return partition_sequences(lengths, budget=budget, ranks=ranks, lockstep=ranks)


def first_fit(lengths: Sequence[int], budget: int, ranks: int) -> Partition:
    bins: list[list[int]] = []
    for index, length in enumerate(lengths):
        room = (b for b in bins if sum(lengths[i] for i in b) + length <= budget)
        target = next(room, None)
        if target is None:
            bins.append([index])
        else:
            target.append(index)
    return tuple(tuple(tuple(ids) for ids in bins[rank::ranks]) for rank in range(ranks))


def rank_imbalance(dealt: Partition, costs: Sequence[float]) -> float:
    totals = [sum(costs[i] for ids in rank for i in ids) for rank in dealt]
    return max(totals) / statistics.mean(totals)


def row_imbalance(dealt: Partition, costs: Sequence[float]) -> float:
    spent = [[sum(costs[i] for i in ids) for ids in rank] for rank in dealt]
    rows = max(len(rank) for rank in spent)
    dearest = sum(max(rank[row] if row < len(rank) else 0.0 for rank in spent) for row in range(rows))
    return dearest / (sum(map(sum, spent)) / len(spent))


def report_plans(count: int, ranks: int, draws: int = 5) -> None:
    cost = sequence_cost(ModelSpec.of(QWEN3_30B))
    print(f"\n{count} sequences over {ranks} ranks, budget {LONGEST}: imbalance (worst of {draws} draws) and seconds")
    for lockstep, measure in ((1, rank_imbalance), (ranks, row_imbalance)):
        plans: dict[str, Callable[[list[int]], Partition]] = {
            "cost": lambda n, g=lockstep: partition_sequences(n, budget=LONGEST, ranks=ranks, cost=cost, lockstep=g),
            "tokens": lambda n, g=lockstep: partition_sequences(
                n, budget=LONGEST, ranks=ranks, cost=TOKENS, lockstep=g
            ),
            "rows by tokens": lambda n: by_tokens_in_rows(n, LONGEST, ranks),
            "first-fit": lambda n: first_fit(n, LONGEST, ranks),
        }
        print("  " + ("ranks in lockstep" if lockstep > 1 else "independent ranks"))
        for name, make in plans.items():
            found, counts, seconds = [], [], []
            for seed in range(draws):
                lengths = lengths_of(count, seed)
                started = time.perf_counter()
                dealt = make(lengths)
                seconds.append(time.perf_counter() - started)
                found.append(measure(dealt, cost.of(lengths)))
                counts.append(max(map(len, dealt)))
            print(f"    {name:15} {max(found):.3f}   micro-batches a rank {max(counts):3}   {max(seconds):.2f} s")


def batches_of(ids: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Any]:
    from agent_rl.train.megatron.packed_batch import PackedBatch

    draw = torch.Generator().manual_seed(0)
    return [
        PackedBatch.from_sequences([torch.randint(0, 512, (lengths[i],), generator=draw) for i in micro])
        for micro in ids
    ]


def rank_main(rank: int, port: int, plans: dict[str, Partition], lengths: list[int], rounds: int, queue: Any) -> None:
    """One data rank: every plan in turn, ``rounds`` times; its own processor seconds a plan."""
    torch.set_num_threads(1)
    parallel = ParallelConfig(world_size=2)
    with world(parallel, rank, port, "cpu") as device:
        _, model = policy(device, SMALL, parallel)
        work = {name: batches_of(dealt[rank], lengths) for name, dealt in plans.items()}
        spent: dict[str, list[float]] = {name: [] for name in plans}
        for turn in range(rounds + 1):
            for name, batches in work.items():
                used = timed(lambda b=batches: train(model, b), device).processor
                if turn:
                    spent[name].append(used)
        queue.put((rank, spent))


def train(model: Any, batches: list[Any]) -> None:
    model.train_microbatches(batches, None, lambda logprobs, _entropy, _batch: (-logprobs.mean(), {}), entropy=False)


def report_step(rounds: int) -> None:
    cost, budget = (
        sequence_cost(SMALL_FACTS),
        LONGEST // SHRINK,
    )
    lengths = [max(2, n // SHRINK) for n in lengths_of(24, seed=3)]
    plans = {
        "cost": partition_sequences(lengths, budget=budget, ranks=2, cost=cost),
        "rows by tokens": by_tokens_in_rows(lengths, budget, 2),
        "first-fit": first_fit(lengths, budget, 2),
    }
    context = torch.multiprocessing.get_context("spawn")
    queue, port = context.Queue(), free_port()
    ranks = [context.Process(target=rank_main, args=(r, port, plans, lengths, rounds, queue)) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        if process.exitcode:
            raise SystemExit(f"a rank ended with {process.exitcode}")
    spent = dict(queue.get() for _ in ranks)
    size = f"{len(lengths)} sequences, {sum(lengths)} tokens, {rounds} rounds"
    print(f"\ntwo ranks, {size}: the slower rank's processor time")
    steps = {n: [max(pair) for pair in zip(spent[0][n], spent[1][n], strict=True)] for n in plans}
    for name, dealt in plans.items():
        ratio = statistics.median(a / b for a, b in zip(steps[name], steps["cost"], strict=True))
        expected = rank_imbalance(dealt, cost.of(lengths)) / rank_imbalance(plans["cost"], cost.of(lengths))
        print(f"  {name:15} {statistics.median(steps[name]):.2f} s, over cost's {ratio:.3f} (by FLOPs {expected:.3f})")


def report_model(device: torch.device) -> None:
    cost: SequenceCost = sequence_cost(SMALL_FACTS)
    _, model = policy(device, SMALL)
    print("\nprocessor time over cost, by length, 1 at the first:")
    first = None
    for length in (512, 1024, 2048, 4096, 8192):
        batches = batches_of([[0]], [length])
        train(model, batches)
        used = statistics.median(timed(lambda b=batches: train(model, b), device).processor for _ in range(5))
        share = used / cost.of([length])[0]
        first = first or share
        print(f"  {length:6} tokens {used:6.2f} s   {share / first:.2f}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-step", action="store_true", help="only the plans")
    options = parser.parse_args()
    for ranks in (2, 8, 64):
        report_plans(options.sequences, ranks)
    if options.no_step:
        return
    report_step(options.rounds)
    torch.set_num_threads(1)
    with one_rank(options.device) as device:
        report_model(device)


if __name__ == "__main__":
    main()
