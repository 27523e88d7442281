"""One of four ranks that run every case of a transfer, and share pools in every way they can be shared; see
:func:`transfer_worker.launch`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transfer_worker as worker
from torch import Tensor

from agent_rl.errors import ConfigError
from agent_rl.train.host_memory import free_memory
from r3.balance import ExpertLayout

SLOW, SEEDS = 3, (0, 1)
STAGES = (((0,), (1,)), ((2, 1), ()))
"""The layers with experts of a pipeline's two stages."""


def fetched(transfer: Any, layout: ExpertLayout) -> list[tuple[Tensor, Tensor]]:
    """What this rank borrows in each layer by a plan in which each rank borrows as many as it can."""
    return [transfer.fetch(layer, plan) for layer, plan in worker.random_plans(layout, lopsided=True).items()]


def in_another_order(rank: int, kind: str) -> tuple[int, list[tuple[Tensor, Tensor]]]:
    """Three layers of two micro-batches are begun, as a pipeline may, and fetched in another order; and what stays
    begun is forgotten. The bytes fetched, and the weights by micro-batch and layer."""
    layout = ExpertLayout(worker.EXPERTS, 4, worker.SLOTS, placement=worker.HOME)
    transfer = worker.opened(kind, worker.home_experts(layout, rank, torch.float32), layout)
    plans = [worker.random_plans(layout, seed, lopsided=True) for seed in SEEDS]
    steps = [step for plan in plans for step in plan.items()]
    for step in [*steps, *steps]:
        transfer.prefetch(*step)
    found = [transfer.fetch(*step) for step in reversed(steps)]
    transfer.prefetch(*steps[0])
    transfer.close()
    return transfer.take_stats().fetched, found[::-1]


def weights_change(rank: int, node: tuple[int, ...]) -> dict[str, Any]:
    """What a rank borrows before the others' refresh can begin, after it was prefetched, and after the refresh.

    The slow rank comes to the refresh when all others are in it.
    """
    layout = ExpertLayout(worker.EXPERTS, 4, worker.SLOTS, node, worker.HOME)
    layers = worker.home_experts(layout, rank, torch.float32)
    pool, store = worker.opened("pool", layers, layout), dist.distributed_c10d._get_default_store()
    found = {"before": fetched(pool, layout)}
    with torch.no_grad():
        for held in layers.values():
            held.weight1.add_(1)
            held.weight2.add_(1)
    pool.prefetch(0, worker.random_plans(layout, lopsided=True)[0])
    if rank == SLOW:
        store.wait([f"{node} {other}" for other in range(SLOW)])
        found["stale"] = fetched(pool, layout)
    else:
        store.set(f"{node} {rank}", "")
    pool.take_stats()
    pool.refresh()
    found["refresh_ms"] = pool.take_stats().refresh_ms
    found["after"] = fetched(pool, layout)
    pool.close()
    pool.close()
    return found


def two_groups(rank: int, node: tuple[int, ...]) -> dict[str, Any]:
    """Two expert groups with the same layers: what is borrowed, and which memory it is in."""
    layout = ExpertLayout(worker.EXPERTS, 2, worker.SLOTS, node, worker.HOME)
    layers, first = worker.home_experts(layout, rank % 2, torch.bfloat16), rank // 2 * 2
    pool = worker.opened("pool", layers, layout, group=(first, first + 1))
    found = {"fetched": fetched(pool, layout), "memory": pool_memory()}
    pool.close()
    return found | {"left": pool_memory()}


def two_stages(rank: int, stages: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
    """A pipeline of two stages with these layers of experts each."""
    layout, stage = ExpertLayout(worker.EXPERTS, 2, worker.SLOTS, placement=worker.HOME), rank // 2
    held = worker.home_experts(layout, rank % 2, torch.float32)
    layers = {layer: held[layer] for layer in stages[stage]}
    pool = worker.opened("pool", layers, layout, group=(2 * stage, 2 * stage + 1))
    plans = worker.random_plans(layout, lopsided=True)
    found = [pool.fetch(layer, plans[layer]) for layer in layers]
    pool.close()
    return found


def pool_memory() -> set[str]:
    """The inodes of the pools' memory that this process has mapped."""
    return {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:experts" in line}


def too_large(rank: int) -> str:
    """What is answered to a pool three times as large as the memory that is left. Nothing of it is ever there."""
    layout = ExpertLayout(worker.EXPERTS, 4, worker.SLOTS)
    wide = 3 * free_memory() // (2 * worker.EXPERTS * 4)
    weight = torch.empty(1).expand(layout.experts_per_rank, 1, wide)
    try:
        worker.opened("pool", {0: SimpleNamespace(weight1=weight, weight2=weight)}, layout)
    except ConfigError as error:
        return str(error)
    return "not refused"


def main(rank: int, ranks: int, _results: Path) -> dict[str, Any]:
    return {
        "cases": worker.cases(rank, ranks),
        "exchange": in_another_order(rank, "exchange"),
        "pool": in_another_order(rank, "pool"),
        "one machine": weights_change(rank, (0, 0, 0, 0)),
        "two machines": weights_change(rank, (0, 0, 1, 1)),
        "groups": two_groups(rank, (0, 0)),
        "groups over machines": two_groups(rank, (0, 1)),
        "stages": [two_stages(rank, stages) for stages in STAGES],
        "too large": too_large(rank),
    }


if __name__ == "__main__":
    worker.joined(main)
