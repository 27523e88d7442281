"""One rank of a trainer with a critic: two global steps of two mini steps on captured trajectories, in every case of a
plan; then a checkpoint, or the second step from the first case's checkpoint.

Arguments: rank, directory for results, file of the plan: ``{model, cases: [{name, place, world, parallel, train}]}``.
Ranks beyond a case's ``world`` skip it. Results are ``<name>-<rank>.pt``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from balanced_steps_worker import step_of_rank

from agent_rl.config import ParallelConfig, RunConfig
from agent_rl.controller.advantages import build_samples
from agent_rl.models.spec import read_model_spec
from agent_rl.rollout.records import read_trajectories
from agent_rl.train.checkpoint import directory as checkpoint
from agent_rl.train.requests import OptimizerSpec, WorkerRequest
from agent_rl.train.worker import TrainerWorker
from agent_rl.types import Sample

CAPTURED = Path(__file__).resolve().parents[1] / "captured"
TRAIN = {
    "microbatch_tokens": 384, "mini_steps": 2, "lr": 3e-4, "device": "cpu", "baseline": "critic",
    "advantage_scale": "batch", "critic": {"coefficient": 0.5, "gae_lambda": 0.9, "lr": 0.01},
}  # fmt: skip


def captured(step: int) -> tuple[Sample, ...]:
    return build_samples(read_trajectories(CAPTURED, step), baseline="critic", scale="none").samples


def run(case: dict[str, Any], model: Path, results: Path, rank: int) -> dict[str, Any]:
    parallel = ParallelConfig(world_size=case["world"], **case["parallel"])
    train = {**TRAIN, **case["train"], "parallel": parallel}
    config = RunConfig.model_validate({"name": "test", "model": model, "train": train})
    port, listener = case["place"]
    order = WorkerRequest(config, read_model_spec(model), model, None, device="cpu", threads=1)
    meeting = {"master_addr": "127.0.0.1", "master_port": port, "listener": listener if rank == 0 else None}
    optimizer = OptimizerSpec(lr=3e-4, eps=1e-3)  # nearly linear in the gradient, so small differences stay small
    trainer, steps = TrainerWorker(order, optimizer, rank, **meeting), []
    if "resumes" in case:
        directory = results / case["resumes"]
        trainer.load(directory, checkpoint.read_manifest(directory))
    else:
        head = trainer._critic.slots()["master"]  # values of 0, as at the start, would give the trunk no gradient
        head.copy_(torch.randn(len(head), generator=torch.Generator().manual_seed(0)))
        steps.append(one_step(trainer, config, captured(1)))
        save(trainer, results / case["name"], rank, parallel)
    loaded = {slot: tensor.clone() for slot, tensor in trainer._critic.slots().items()}
    steps.append(one_step(trainer, config, captured(2)[:5]))
    head = {slot: tensor.clone() for slot, tensor in trainer._critic.slots().items()}
    weights = {name: tensor.clone() for name, tensor in trainer.model.export_weights()}
    trainer.close()
    return {"steps": steps, "weights": weights, "loaded": loaded, "head": head}


def one_step(trainer: TrainerWorker, config: RunConfig, data: tuple[Sample, ...]) -> dict[str, Any]:
    report, differs, _, _ = step_of_rank(trainer, config, data, unreplayed=False)
    return {"report": report, "differing": sum(int(part.sum()) for part in differs.unpacked(differs.replayed))}


def save(trainer: TrainerWorker, directory: Path, rank: int, parallel: ParallelConfig) -> None:
    """Write a checkpoint of all ranks as the driver does."""
    if rank == 0:
        checkpoint.begin(directory)
    torch.distributed.barrier()
    updates, counts = trainer.save(checkpoint.partial_dir(directory))
    checksums: list[Any] = [None] * parallel.world_size
    torch.distributed.all_gather_object(checksums, trainer.written())
    layout = parallel.model_dump()
    if rank == 0:
        manifest = checkpoint.Manifest(checkpoint.FORMAT, updates, counts, layout, "float32", tuple(checksums))
        checkpoint.commit(directory, manifest)
    torch.distributed.barrier()


def main() -> None:
    rank, results, plan = int(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    for case in plan["cases"]:
        if rank < case["world"]:
            torch.save(run(case, Path(plan["model"]), results, rank), results / f"{case['name']}-{rank}.pt")


if __name__ == "__main__":
    main()
