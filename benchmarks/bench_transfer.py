"""Time to bring a layer's borrowed experts, and their gradients home, over a plain all-to-all of the same bytes.

Run: ``python benchmarks/bench_transfer.py`` (``--device cuda``: a GPU for each rank, over NCCL; not yet run on one).

Experts of Qwen3-30B-A3B (9.4 MB in bfloat16), four borrowed a rank, by a plan that draws them evenly. The plain
all-to-all (``all_to_all_single``) moves as many bytes from buffers that are packed already. ``refresh`` is that of a
layer of the pool. On a CPU the processor time of all ranks, as other work on the machine does not count in it; on GPUs
the time of the slowest rank, without prefetch, as it would wait. Medians, and quartiles of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from timing import timed

from agent_rl.train.expert_balancing.exchange import Exchange
from agent_rl.train.expert_balancing.host_pool import HostPool
from r3.balance import ExpertLayout, LayerPlan


def experts(layout: ExpertLayout, hidden: int, inner: int, device: torch.device) -> SimpleNamespace:
    """A rank's home experts, with gradients in float32."""
    shapes = (layout.experts_per_rank, 2 * inner, hidden), (layout.experts_per_rank, hidden, inner)
    weights = [torch.nn.Parameter(torch.randn(shape, device=device, dtype=torch.bfloat16)) for shape in shapes]
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape, device=device)
    return SimpleNamespace(weight1=weights[0], weight2=weights[1])


def even_plan(layout: ExpertLayout) -> LayerPlan:
    """Every rank borrows of the ranks after it in turn, and lends as many."""
    borrowed = np.empty((layout.ranks, layout.slots), np.int32)
    for rank in range(layout.ranks):
        for slot in range(layout.slots):
            lender = (rank + 1 + slot % (layout.ranks - 1)) % layout.ranks
            borrowed[rank, slot] = lender * layout.experts_per_rank + (slot + rank) % layout.experts_per_rank
    identity = LayerPlan.identity(layout)
    return LayerPlan(layout, borrowed, identity.load, identity.counts)


def plain(plan: LayerPlan, each: int, device: torch.device) -> Callable[[], object]:
    """An all-to-all of what ``plan`` fetches, ``each`` bytes an expert."""
    layout, rank = plan.layout, dist.get_rank()
    homes = layout.owner_rank[plan.borrowed]
    sent = [int((homes[other] == rank).sum()) * each for other in range(layout.ranks)]
    received = [int((homes[rank] == other).sum()) * each for other in range(layout.ranks)]
    source, target = (torch.zeros(sum(sizes), dtype=torch.uint8, device=device) for sizes in (sent, received))
    return lambda: dist.all_to_all_single(target, source, received, sent)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Processor time of all ranks; on GPUs the time of the slowest."""
    cuda = device.type == "cuda"
    dist.barrier()
    times = timed(run, device)
    taken = torch.tensor(times.wall if cuda else times.processor, device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX if cuda else dist.ReduceOp.SUM)
    return float(taken)


def rank_main(rank: int, options: argparse.Namespace, directory: str) -> None:
    device = torch.device(options.device, rank) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(directory, "store"), options.ranks)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=options.ranks)
    layout = ExpertLayout(options.experts_per_rank * options.ranks, options.ranks, options.slots)
    plan, layers = even_plan(layout), {0: experts(layout, options.hidden, options.inner, device)}
    exchange = Exchange(layers, layout, range(layout.ranks), prefetch=False)
    pool = HostPool(layers, layout, range(layout.ranks), exchange, prefetch=False)
    gradients = exchange.fetch(0, plan)
    runs: dict[str, Callable[[], object]] = {
        "plain all-to-all": plain(plan, sum(gradient[0].nbytes for gradient in gradients), device),
        "exchange": lambda: exchange.fetch(0, plan),
        "pool": lambda: pool.fetch(0, plan),
        "gradients home": lambda: exchange.return_gradients(0, plan, *gradients),
        "refresh": pool.refresh,
    }
    taken = np.array([[seconds(run, device) for run in runs.values()] for _ in range(options.rounds + 1)])[1:]
    if rank == 0:
        print(f"{options.ranks} ranks, {sum(gradient.nbytes for gradient in gradients) / 1e6:.1f} MB borrowed by each")
        for name, times in zip(runs, taken.T, strict=True):
            low, middle, high = np.quantile(times / taken[:, 0], (0.25, 0.5, 0.75))
            print(
                f"{name:18} {1e3 * np.median(times):8.2f} ms   {middle:6.2f} [{low:.2f}, {high:.2f}] of the plain one"
            )
    pool.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sizes = {"ranks": 2, "homes": 8, "slots": 4, "hidden": 2048, "inner": 768, "rounds": 21}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(rank_main, (options, str(Path(directory))), options.ranks)


if __name__ == "__main__":
    main()
