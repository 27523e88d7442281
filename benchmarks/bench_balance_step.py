"""What balancing saves of the slowest expert rank's processor time, and what it costs where the load is even.

Ranks of one expert group run passes over the same micro-batches with plans and without, in turn. Their routes are made:
rank 0's experts get ``load`` times the mean of the ranks' tokens, the other ranks share the rest evenly. The ideal is
1 / load. Expert products are timed around the experts' modules, forward and backward, with fetching and returning; a
pass and the planning by the processor time of the whole process (all of its threads, waiting excluded). On a GPU the
times are those of the device's stream, and waiting is a part of them: written, and not run on a GPU.

    python benchmarks/bench_balance_step.py                     # EP2 at loads 1.2 and 1.01, EP4 at 1.57 and 1.01
    python benchmarks/bench_balance_step.py --ranks 2 --rounds 15 --tokens 4096
    python benchmarks/bench_balance_step.py --device cuda       # as many GPUs as ranks
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from one_rank import arguments
from torch import Tensor

from agent_rl.config import BalanceConfig, ParallelConfig
from agent_rl.train.batching.packing import MicroBatch
from agent_rl.train.expert_balancing.worker import (
    RankBalancer,
    balancing_spec,
    count_experts,
    expert_group,
    expert_layout,
)
from agent_rl.train.megatron.packed_batch import PackedBatch
from agent_rl.train.megatron.parallel import destroy_parallel, init_parallel
from agent_rl.train.step import packed
from r3.shard import Packing, RouteShard, own_routes

EXPERTS, TOP_K, LAYERS = 16, 4, 2
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 384,
}
CASES = ((2, 1.2), (2, 1.01), (4, 1.57), (4, 1.01))
"""Expert ranks, and the fullest rank's load over the mean."""
SEQUENCE, MICROBATCHES = 256, 2
FIGURES = ("products", "pass")


def made_routes(tokens: int, ranks: int, load: float, seed: int) -> NDArray[np.uint8]:
    """``[tokens, LAYERS, TOP_K]``: rank 0 gets ``load`` / ``ranks`` of all pairs, rounded down, each other rank as
    much as the next; within a rank experts are drawn."""
    rng, pairs, each = np.random.default_rng(seed), tokens * TOP_K, EXPERTS // ranks
    first = int(pairs * load / ranks)
    holders = np.concatenate([np.zeros(first, int), 1 + np.arange(pairs - first) % (ranks - 1)])
    layers = []
    for _ in range(LAYERS):
        rank_TK = np.sort(rng.permutation(holders).reshape(tokens, TOP_K), axis=1)
        place_TK = np.arange(TOP_K) - (rank_TK[:, :, None] > rank_TK[:, None, :]).sum(axis=2)
        order_TRE = rng.random((tokens, ranks, each)).argsort(axis=2)
        experts_TK = np.take_along_axis(order_TRE[np.arange(tokens)[:, None], rank_TK], place_TK[:, :, None], 2)[..., 0]
        layers.append(rank_TK * each + experts_TK)
    return np.stack(layers, axis=1).astype(np.uint8)


def made_batch(tokens: int, seed: int) -> MicroBatch:
    """Random tokens in sequences of :data:`SEQUENCE`."""
    ids = np.random.default_rng(seed).integers(0, SHAPE["vocab_size"], tokens).astype(np.int32)
    bounds = np.arange(0, tokens + 1, SEQUENCE, dtype=np.int32)
    zeros = np.zeros(tokens, np.float32)
    return MicroBatch(
        sample_ids=tuple(range(len(bounds) - 1)),
        tokens_T=ids,
        cu_seqlens=bounds,
        mask_T=np.ones(tokens, bool),
        logprobs_T=zeros,
        advantages_T=zeros,
        weights_T=zeros + 1,
        lag_T=np.zeros(tokens, np.int32),
    )


@dataclass
class ProductClock:
    """Seconds that the experts' modules take: processor time of this thread, or on a GPU those of its stream."""

    cuda: bool
    seconds: float = 0.0
    _begun: Any = None
    _events: list[tuple[Any, Any]] = field(default_factory=list)

    def watch(self, experts: torch.nn.Module) -> None:
        experts.register_forward_pre_hook(lambda *_: self._begin())
        experts.register_forward_hook(lambda *_: self._end())
        experts.register_full_backward_pre_hook(lambda *_: self._begin())
        experts.register_full_backward_hook(lambda *_: self._end())

    def _now(self) -> Any:
        if not self.cuda:
            return time.thread_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _begin(self) -> None:
        self._begun = self._now()

    def _end(self) -> None:
        if self.cuda:
            self._events.append((self._begun, self._now()))
        else:
            self.seconds += self._now() - self._begun

    def take(self) -> float:
        for begun, ended in self._events:
            ended.synchronize()
            self.seconds += begun.elapsed_time(ended) / 1e3
        self._events.clear()
        found, self.seconds = self.seconds, 0.0
        return found


@dataclass(frozen=True)
class Bench:
    """One rank's model and data."""

    model: Any
    balance: RankBalancer
    clock: ProductClock
    batches: Sequence[MicroBatch]
    shares: Sequence[RouteShard]

    def timed(self, *, update: bool, plans: bool) -> dict[str, float]:
        """One pass over all micro-batches: seconds of its products, of all of it, and of planning."""
        torch.distributed.barrier()
        self.clock.take()
        started = self._now()
        self._run(update=update, plans=plans)
        seconds = self._now() - started
        return {"products": self.clock.take(), "pass": seconds, "planning": self.balance.report().planning_ms / 1e3}

    def _now(self) -> float:
        if self.clock.cuda:
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def _run(self, *, update: bool, plans: bool) -> None:
        inputs = [packed(batch) for batch in self.batches]
        kind = "update" if update else "recompute"
        made: Any = nullcontext()
        if plans:
            made = self.balance.planned(kind, self.balance.count_foreseen(self.batches, self.shares))
        with made as coming:
            if update:
                self.model.train_microbatches(inputs, self.shares, _loss, entropy=False, plans=coming)
            else:
                self.model.forward_logprobs(inputs, self.shares, plans=coming)


def _loss(logprobs: Tensor, _entropy: Tensor | None, _batch: PackedBatch) -> tuple[Tensor, dict[str, Any]]:
    return -logprobs.mean(), {}


def bench_of(ranks: int, rank: int, load: float, tokens: int, directory: Path, device: torch.device) -> Bench:
    from agent_rl.train.megatron.model import PolicyModel
    from agent_rl.train.megatron.moe import Experts

    config = BalanceConfig(enabled=True)
    group = expert_group()
    layout = expert_layout(config, group, EXPERTS)
    model = PolicyModel.build(
        directory,
        ParallelConfig(world_size=ranks, expert=ranks),
        device=device,
        balance=balancing_spec(config, group, layout),
    )
    clock = ProductClock(device.type == "cuda")
    for module in (module for chunk in model.modules for module in chunk.modules() if isinstance(module, Experts)):
        clock.watch(module)
    batches = [made_batch(tokens, 10 * rank + at) for at in range(MICROBATCHES)]
    packing = Packing((SEQUENCE,) * (tokens // SEQUENCE))
    shares = [
        own_routes(
            made_routes(tokens, ranks, load, 10 * rank + at), batch.sample_ids, batch.tokens_T, packing, model.shard
        )
        for at, batch in enumerate(batches)
    ]
    return Bench(model, RankBalancer.for_model(config, group, layout, model), clock, batches, shares)


def one_rank_of(plan: dict[str, Any], rank: int) -> None:
    """Every case of one world size; the times of each call go to ``<load>-<rank>.json``."""
    torch.set_num_threads(1)
    ranks, device = plan["ranks"], plan["device"]
    where = torch.device(f"cuda:{rank}" if device == "cuda" else device)
    port, listener = plan["place"]
    init_parallel(
        ParallelConfig(world_size=ranks, expert=ranks),
        rank,
        master_addr="127.0.0.1",
        master_port=port,
        device=where,
        listener=None if rank else listener,
    )
    benches = []  # a world gives the name of a group that was closed to the next one, with its old addresses
    for load in plan["loads"]:
        bench = bench_of(ranks, rank, load, plan["tokens"], Path(plan["model"]), where)
        calls = {
            f"{kind} {name}": partial(bench.timed, update=kind == "update", plans=name == "balanced")
            for kind in ("recompute", "update")
            for name in ("balanced", "plain", "plain again")
        }
        for call in calls.values():
            call()
        found = [{name: calls[name]() for name in order} for order in _orders(list(calls), plan["rounds"])]
        (Path(plan["results"]) / f"{load}-{rank}.json").write_text(json.dumps(found))
        benches.append(bench)
    for bench in benches:
        bench.balance.close()
    destroy_parallel()


def _orders(names: list[str], rounds: int) -> list[list[str]]:
    """The same on every rank: a new order every round, so that other load on the machine falls on all alike."""
    rng = np.random.default_rng(0)
    return [[names[at] for at in rng.permutation(len(names))] for _ in range(rounds)]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=2048, help="Tokens of a micro-batch on a rank.")
    parser.add_argument("--ranks", type=int, choices=(2, 4), nargs="*", default=(2, 4))
    given = parser.parse_args()
    print(f"counting the experts of 16,384 x 48 x 8 routes: {1e3 * counting():.1f} ms of processor time (goal 7)\n")
    print("| expert ranks | load | pass | figure | balanced / plain, quartiles | noise: plain / plain | ideal | goal |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        model = _model(Path(scratch) / "model")
        for ranks in given.ranks:
            loads = [load for of, load in CASES if of == ranks]
            plan = {"ranks": ranks, "loads": loads, "results": scratch, "model": str(model)}
            _launch(plan | {"device": given.device, "rounds": given.rounds, "tokens": given.tokens})
            for load in loads:
                parts = [json.loads((Path(scratch) / f"{load}-{rank}.json").read_text()) for rank in range(ranks)]
                _print(ranks, load, parts)


def counting() -> float:
    """Seconds in which one core counts the experts of a large micro-batch, the median of nine times."""
    torch.set_num_threads(1)
    some = np.random.default_rng(0).random((2048, 48, 128)).argsort(axis=-1)[..., :8].astype(np.uint8)
    routes, times = np.tile(some, (8, 1, 1)), []
    for _ in range(9):
        started = time.thread_time()
        count_experts(routes, 128)
        times.append(time.thread_time() - started)
    return statistics.median(times)


def _model(directory: Path) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    more = {"norm_topk_prob": True, "tie_word_embeddings": True, "max_position_embeddings": 4096}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**more, **SHAPE)).save_pretrained(directory)
    return directory


def _launch(plan: dict[str, Any]) -> None:
    """Run the ranks; the port that they meet at is held open until they do."""
    command = [sys.executable, "-W", "ignore", __file__, "--rank"]
    with socket.create_server(("127.0.0.1", 0)) as held:
        plan["place"] = (held.getsockname()[1], held.fileno())
        environment = os.environ | {"BENCH_PLAN": json.dumps(plan), "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen([*command, str(rank)], env=environment, pass_fds=[] if rank else [held.fileno()])
            for rank in range(plan["ranks"])
        ]
        if any([rank.wait() for rank in ranks]):
            sys.exit("a rank failed")


@dataclass(frozen=True)
class Times:
    """``[rank, round]`` seconds of each call's figures.

    The slowest rank is the one with the largest median: the largest of a round's times would be that of whichever rank
    the machine had just held up.
    """

    parts: list[list[dict[str, dict[str, float]]]]

    def seconds(self, call: str, figure: str) -> NDArray[np.float64]:
        return np.array([[of_round[call][figure] for of_round in of_rank] for of_rank in self.parts])

    def ratio(self, over: str, under: str, figure: str) -> str:
        """The slowest rank's time in ``over`` to that in ``under``, and quartiles of it over rounds drawn again."""
        pair = self.seconds(over, figure), self.seconds(under, figure)
        rounds = pair[0].shape[1]
        draws = np.random.default_rng(0).integers(0, rounds, (1000, rounds))
        low, high = np.quantile([slowest(pair[0][:, d]) / slowest(pair[1][:, d]) for d in draws], [0.25, 0.75])
        return f"{slowest(pair[0]) / slowest(pair[1]):.3f} [{low:.3f}, {high:.3f}]"


def slowest(seconds: NDArray[np.float64]) -> float:
    """``[rank, round]``: the largest of the ranks' medians."""
    return float(np.median(seconds, axis=1).max())


def _print(ranks: int, load: float, parts: list[list[dict[str, dict[str, float]]]]) -> None:
    """``parts[rank][round][call][figure]``, in seconds."""
    times, even = Times(parts), load <= 1.01
    for kind in ("recompute", "update"):
        for figure in FIGURES:
            ideal = f"{1 / load:.3f}" if figure == "products" else ""
            goal = f"{1.05 / load:.3f}" if figure == "products" and not even else "1.02" if even else ""
            row = (times.ratio(f"{kind} {a}", f"{kind} plain", figure) for a in ("balanced", "plain again"))
            print(f"| {ranks} | {load:g} | {kind} | {figure} | {' | '.join(row)} | {ideal} | {goal} |", flush=True)
    planning, whole = (
        sum(slowest(times.seconds(f"{kind} balanced", figure)) for kind in ("recompute", "update"))
        for figure in ("planning", "pass")
    )
    print(f"| {ranks} | {load:g} | both | planning over the passes | {planning / whole:.2%} | | | 1 % |", flush=True)


if __name__ == "__main__":
    if "--rank" in sys.argv:
        one_rank_of(json.loads(os.environ["BENCH_PLAN"]), int(sys.argv[sys.argv.index("--rank") + 1]))
    else:
        main()
