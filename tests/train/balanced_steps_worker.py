"""One rank of the trainer, which does the same GRPO steps with balanced experts and without, on captured trajectories.

Arguments: rank, directory for results, file of the plan: ``{world_size, model, cases: [{name, place, parallel,
train}]}``, ``place`` a port and rank 0's open socket on it. Results of a case are ``<name>-<rank>.pt``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from agent_rl.config import ParallelConfig, RunConfig
from agent_rl.controller.advantages import build_samples
from agent_rl.models.spec import read_model_spec
from agent_rl.rollout.records import read_trajectories
from agent_rl.train.batching.partition import MiniStepShare, lockstep_ranks, split_step
from agent_rl.train.expert_balancing.report import BalanceReport
from agent_rl.train.reports import RankReport, RouteDifferences
from agent_rl.train.requests import OptimizerSpec, StepRequest, WorkerRequest
from agent_rl.train.route_sharding import shard_routes, without_routes
from agent_rl.train.worker import TrainerWorker
from agent_rl.types import Sample
from r3.balance.time_model import ExpertShape

CAPTURED = Path(__file__).resolve().parents[1] / "captured"
"""Two steps of 16 quickstart trajectories each, as the engine sampled them, with their routes."""


def captured(step: int) -> tuple[Sample, ...]:
    return build_samples(read_trajectories(CAPTURED, step)).samples


def run(case: dict[str, Any], model: Path, world_size: int, rank: int) -> dict[str, Any]:
    """Two global steps of two mini steps each. In the second, data ranks are left without a micro-batch."""
    parallel = ParallelConfig(world_size=world_size, **case["parallel"])
    settings = {"microbatch_tokens": 384, "mini_steps": 2, "lr": 3e-4, "device": "cpu", **case["train"]}
    config = RunConfig.model_validate({"name": "test", "model": model, "train": {**settings, "parallel": parallel}})
    port, listener = case["place"]
    order = WorkerRequest(config, read_model_spec(model), model, config.reference_dir, device="cpu", threads=1)
    meeting = {"master_addr": "127.0.0.1", "master_port": port, "listener": listener if rank == 0 else None}
    trainer = TrainerWorker(order, OptimizerSpec.of(config.train), rank, **meeting)
    steps = [one_step(trainer, config, data) for data in (captured(1), captured(2)[:5])]
    weights = {name: tensor.clone() for name, tensor in trainer.model.export_weights()}
    trainer.model.load_hf(model)
    reloaded = {name: tensor.clone() for name, tensor in trainer.model.export_weights()}
    trainer.close()
    return {"steps": steps, "weights": weights, "reloaded": reloaded}


def step_of_rank(
    trainer: TrainerWorker, config: RunConfig, data: tuple[Sample, ...], *, unreplayed: bool
) -> tuple[RankReport | None, RouteDifferences | None, BalanceReport | None, Sequence[MiniStepShare]]:
    """What :class:`agent_rl.train.ray_trainer.RayTrainer` does, for this rank; its share comes last. ``unreplayed``:
    with a pass without replay."""
    info, train = trainer.info(), config.train
    shares = split_step(
        data,
        mini_steps=train.mini_steps,
        budget=train.microbatch_tokens,
        ranks=info.data_size,
        lockstep=lockstep_ranks(train.parallel),
        expert_ranks=train.parallel.expert,
    )[info.data_rank]
    batches = [ids for share in shares for ids in share.micro_batches]
    routes = [shard_routes(data, ids, info.shard) for ids in batches]
    request = StepRequest(config, measure_without_replay=unreplayed)
    return *trainer.grpo(without_routes(data, batches), shares, request, routes), shares


def one_step(trainer: TrainerWorker, config: RunConfig, data: tuple[Sample, ...]) -> dict[str, Any]:
    report, differs, balanced, shares = step_of_rank(trainer, config, data, unreplayed=True)
    return {
        "old": None if report is None else report.trainer_logprobs,
        "without_replay": None if report is None else report.logprobs_without_replay,
        "norms": [] if report is None else [done.update.grad_norm for done in report.updates],
        "differing": 0 if differs is None else sum(int(part.sum()) for part in differs.unpacked(differs.replayed)),
        "microbatches": [len(share.micro_batches) for share in shares],
        "balance": balanced,
    }


def main() -> None:
    ExpertShape.state_time = lambda *_: 0  # type: ignore[method-assign]
    rank, results, plan = int(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    for case in plan["cases"]:
        torch.save(run(case, Path(plan["model"]), plan["world_size"], rank), results / f"{case['name']}-{rank}.pt")


if __name__ == "__main__":
    main()
