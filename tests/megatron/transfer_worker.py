"""Ranks of an expert group that lends experts, without Megatron: the experts are bare parameters with a ``main_grad``
of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support.rank_processes import run_ranks
from torch import Tensor

from agent_rl.train.expert_balancing.exchange import Exchange
from agent_rl.train.expert_balancing.host_pool import HostPool
from agent_rl.train.expert_balancing.transfer import Transfer
from r3.balance import ExpertLayout, LayerPlan

EXPERTS, SLOTS, LAYERS, HIDDEN, INNER = 8, 2, 3, 32, 20
HOME = np.array([[5, 0, 3, 6, 1, 7, 2, 4], [0, 1, 2, 3, 4, 5, 6, 7], [7, 2, 6, 4, 0, 3, 1, 5]], np.int32)
"""Each layer has a home order of its own."""
MACHINES = {"exchange": (), "pool": (), "pool-machines": (0, 0, 1, 1)}
"""The machine of every rank, by the kind of transfer."""
CASES = list(product(MACHINES, ("float32", "bfloat16"), (False, True), (False, True)))
"""Kind of transfer, type of the weights, whether they are prefetched, whether everybody borrows of one rank."""


def every_weight(layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The layer's experts in logical order, the same on all ranks: ``[E, 2 I, H]`` and ``[E, H, I]``."""
    generator = torch.Generator().manual_seed(layer)
    shapes = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    first, second = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return first, second


def home_experts(layout: ExpertLayout, rank: int, dtype: torch.dtype) -> dict[int, Any]:
    """This rank's home experts of every layer, with a ``main_grad`` of ones."""
    layers = {}
    for layer in range(LAYERS):
        own = layout.placement[layer].reshape(layout.ranks, -1)[rank]
        mine = torch.from_numpy(own.astype(np.int64))
        weights = [torch.nn.Parameter(weight[mine].clone()) for weight in every_weight(layer, dtype)]
        for weight in weights:
            weight.main_grad = torch.ones(weight.shape)
        layers[layer] = SimpleNamespace(weight1=weights[0], weight2=weights[1])
    return layers


def random_plan(layout: ExpertLayout, seed: int, *, lopsided: bool) -> LayerPlan:
    """Random borrowed slots, some of them empty. ``lopsided``: all ranks want the experts of the first home rank."""
    random = np.random.default_rng(seed)
    borrowed = np.full((layout.ranks, layout.slots), -1, np.int32)
    for rank in range(layout.ranks):
        foreign = np.flatnonzero(layout.owner_rank == 0 if lopsided and rank else layout.owner_rank != rank)
        count = layout.slots if lopsided else int(random.integers(0, layout.slots + 1))
        places = random.permutation(layout.slots)[:count]
        borrowed[rank, places] = random.permutation(foreign)[:count]
    identity = LayerPlan.identity(layout)
    return LayerPlan(layout, borrowed, identity.load, identity.counts)


def random_plans(layout: ExpertLayout, seed: int = 0, *, lopsided: bool) -> dict[int, LayerPlan]:
    """A micro-batch's plans, by layer."""
    return {layer: random_plan(layout.layer(layer), 10 * seed + layer, lopsided=lopsided) for layer in range(LAYERS)}


def gradient(layer: int, rank: int, experts: Tensor, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """What ``rank`` makes of its borrowed experts' gradients: small integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * layer + rank)
    shapes = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    first, second = (torch.randint(-8, 8, shape, generator=generator).to(dtype)[experts] for shape in shapes)
    return first, second


def live(plan: LayerPlan, rank: int) -> Tensor:
    """The experts that a rank borrows, in the order of its slots."""
    slots = plan.borrowed[rank]
    return torch.from_numpy(slots[slots >= 0].astype(np.int64))


def one_pass(
    transfer: Transfer, plans: Mapping[int, LayerPlan], rank: int, dtype: torch.dtype, seed: int, *, prefetch: bool
) -> list[tuple[Tensor, Tensor]]:
    """A micro-batch forward and backward: what was fetched, in the order of the layers, twice."""
    fetched, order = [], [*range(LAYERS), *reversed(range(LAYERS))]
    for step, layer in enumerate(order):
        backward = step >= LAYERS
        fetched.append(transfer.fetch(layer, plans[layer]))
        following = layer - 1 if backward else layer + 1
        if prefetch and following in plans:
            transfer.prefetch(following, plans[following])
        if backward:
            gradients = gradient(layer, rank, live(plans[layer], rank), dtype, seed)
            transfer.return_gradients(layer, plans[layer], *gradients)
    return fetched


def opened(kind: str, layers: Any, layout: ExpertLayout, group: Sequence[int] = (), **options: Any) -> Transfer:
    """A transfer of the expert group of these global ranks, or of all."""
    ranks, options = group or range(layout.ranks), {"prefetch": True, "timeout": 120, **options}
    exchange = Exchange(layers, layout, ranks, **options)
    return exchange if kind == "exchange" else HostPool(layers, layout, ranks, exchange, **options)


def case(rank: int, ranks: int, kind: str, dtype: str, prefetch: bool, lopsided: bool) -> dict[str, Any]:
    """Two micro-batches: what was fetched, the gradients at home, and the counters."""
    layout = ExpertLayout(EXPERTS, ranks, SLOTS, placement=HOME, node_of_rank=MACHINES[kind])
    layers = home_experts(layout, rank, getattr(torch, dtype))
    transfer, fetched = opened(kind.split("-")[0], layers, layout, prefetch=prefetch), []
    for seed in range(2):
        plans = random_plans(layout, seed, lopsided=lopsided)
        fetched.append(one_pass(transfer, plans, rank, getattr(torch, dtype), seed, prefetch=prefetch))
    grads = {layer: (held.weight1.main_grad, held.weight2.main_grad) for layer, held in layers.items()}
    stats = transfer.take_stats()
    transfer.close()
    return {"fetched": fetched, "grads": grads, "stats": astuple(stats)}


def cases(rank: int, ranks: int) -> dict[tuple[str, str, bool, bool], dict[str, Any]]:
    return {each: case(rank, ranks, *each) for each in CASES}


def joined(main: Callable[[int, int, Path], Any]) -> None:
    """Run ``main`` with the arguments of :func:`launch` in a world of its ranks, and save its result."""
    rank, ranks, results = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    store = dist.FileStore(str(results / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.save(main(rank, ranks, results), results / f"{rank}.pt")
    dist.destroy_process_group()


def launch(worker: str, ranks: int, results: Path, *, inside: Sequence[str] = ()) -> list[Any]:
    """The results of every rank of ``worker``; ``inside``: a command that runs them."""
    run_ranks(worker, ranks, (ranks, results), inside=inside, seconds=250.0)
    return [torch.load(results / f"{rank}.pt") for rank in range(ranks)]
