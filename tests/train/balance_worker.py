"""One rank of an expert group that plans, without Megatron and experts: runs every case and saves the results.

Arguments: rank, number of ranks, directory for the results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from agent_rl.config import BalanceConfig
from agent_rl.errors import TrainerError
from agent_rl.train.expert_balancing.report import BalancedPass
from agent_rl.train.expert_balancing.transfer import TransferStats
from agent_rl.train.expert_balancing.worker import Counts, ExpertGroup, ForeseenLoads, RankBalancer
from r3.balance import ExpertLayout, LayerPlan, PlanArrays, TimeModel
from r3.balance.planners import PlannerOptions, plan_pass
from r3.shard import ShardSpec

EXPERTS, LAYERS = 8, (3, 5)
TIMES: dict[BalancedPass, TimeModel] = {"update": TimeModel()}


def counts_of(rank: int) -> Counts:
    """A rank's counts ``[M, C, E]``: rank 0 has 3 micro-batches, the others one fewer each."""
    return np.random.default_rng(rank).integers(0, 50, (3 - rank, len(LAYERS), EXPERTS)).astype(np.int32)


class NullTransfer:
    """Transfers nothing and counts its refreshes."""

    refreshes = 0

    def prefetch(self, layer: int, plan: LayerPlan) -> None: ...

    def fetch(self, layer: int, plan: LayerPlan) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty(0), torch.empty(0)

    def return_gradients(self, layer: int, plan: LayerPlan, grad1: torch.Tensor, grad2: torch.Tensor) -> None: ...

    def close(self) -> None: ...

    def refresh(self) -> None:
        self.refreshes += 1

    def take_stats(self) -> TransferStats:
        return TransferStats(fetched=7)


class Case:
    """A rank's balancer with a planner that can fail."""

    def __init__(self, group: ExpertGroup, rank: int) -> None:
        self.rank, self.layout, self.experts = rank, ExpertLayout(EXPERTS, len(group.ranks), 2), NullTransfer()
        self.spoil: Callable[[PlanArrays], PlanArrays] = lambda plans: plans
        spec = ShardSpec(tuple(range(len(LAYERS))))
        transfers, config = [self.experts, self.experts], BalanceConfig()
        self.balance = RankBalancer(group, self.layout, config, transfers, spec, LAYERS, TIMES, self._plan)

    def _plan(self, counts: Counts, layout: ExpertLayout, options: PlannerOptions) -> PlanArrays:
        return self.spoil(plan_pass(counts, layout, options))

    def run(self, spoil: Callable[[PlanArrays], PlanArrays] = lambda plans: plans) -> dict[str, Any]:
        """A pass that takes the plans of every micro-batch; returns them and the report, or the error."""
        self.spoil = spoil
        counts = counts_of(self.rank)
        rows = np.full(len(counts), 10)
        try:
            with self.balance.planned("update", ForeseenLoads(counts, rows, np.ones(len(counts), np.int64))) as plans:
                found = list(plans)
            report = self.balance.report()
        except TrainerError as error:
            return {"error": str(error)}
        return {
            "counts": [{column: plan.counts.tolist() for column, plan in one.items()} for one in found],
            "passes": [(one.kind, one.layers, one.imbalance_before.tolist()) for one in report.passes],
            "figures": (report.rows, report.unforeseen, report.bytes_fetched, self.experts.refreshes),
        }


def other_plan(rank: int, microbatches: int) -> Callable[[PlanArrays], PlanArrays]:
    """On the last rank, one token more of layer 5, in calls that plan so many micro-batches."""

    def spoil(plans: PlanArrays) -> PlanArrays:
        if rank and len(plans.load) == microbatches:
            plans.load[-1, 1, 0, 0] += 1
        return plans

    return spoil


def failing(rank: int, microbatches: int) -> Callable[[PlanArrays], PlanArrays]:
    def spoil(plans: PlanArrays) -> PlanArrays:
        if rank and len(plans.load) == microbatches:
            raise ArithmeticError("no plan today")
        return plans

    return spoil


def main(rank: int, ranks: int, results: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(results / "store"), ranks), rank=rank, world_size=ranks)
    group = ExpertGroup(range(ranks))
    case = Case(group, rank)
    found = {
        "sound": case.run(),
        "other first": case.run(other_plan(rank, 1)),
        "other later": case.run(other_plan(rank, 2)),
        "failing first": case.run(failing(rank, 1)),
        "failing later": case.run(failing(rank, 2)),
    }
    case.balance.weights_changed()
    found["sound again"] = case.run()
    dense = RankBalancer(group, case.layout, BalanceConfig(), [NullTransfer()], ShardSpec(()), (), TIMES)
    with dense.planned("update", ForeseenLoads(counts_of(rank)[:, :0], np.ones(3 - rank), np.zeros(3 - rank))) as plans:
        found["dense stage"] = list(plans)
    case.balance.close()
    (results / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
