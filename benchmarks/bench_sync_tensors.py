"""What a weight update of Qwen3-30B-A3B's 18,867 tensors costs the hosts, on one real SGLang server on this CPU.

Run: ``python benchmarks/bench_sync_tensors.py [rounds]`` (default 3)

The tensors are tiny (hidden size 32), so that only the costs of tensors and buckets remain. A Megatron model of one
rank exports them. The publisher sends them in buckets that hold as many experts' tensors as 512 MiB do of the real
model, the default for a trainer on GPUs, and as 30 MiB do, the baseline. ``shared`` buckets have the first size and
lie in memory that trainer and engine share, as those of colocated engines on GPUs. Printed are medians: the wall time
without joining and its share of the limit of 10 s, which is for free cores; the processor time of trainer and engine,
which other load on the machine changes less; and the parts of the wall time:

- ``export``: a pass over the exported tensors alone, which is also part of ``prepare``;
- ``prepare``: export and copying into buckets; ``broadcast``: announcing buckets, broadcasting and loading them, as far
  as it exceeds preparing the next one; ``load``: loading the last one; ``check``: checksums and resume.

Seconds a tensor and a bucket are of the line through both numbers of buckets that are broadcast.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_weight_sync import ROOT, STAGES
from one_rank import one_rank
from support.moe_checkpoint import write_moe

from agent_rl.config import EngineConfig, ParallelConfig
from agent_rl.engine.launch import EngineServer, group_members
from agent_rl.weight_sync.buckets import buckets
from agent_rl.weight_sync.publisher import WeightPublisher
from agent_rl.weight_sync.shared_buckets import SharedBuckets

LIMIT_SECONDS = 10.0
BUCKET_MB = (512, 30)
SMALLER = 2048 * 768 // 32**2
"""An expert's matrix of the real model over one of this model, in bytes."""
SIZES = {"layers": 48, "experts": 128, "hidden": 32, "heads": 2, "kv": 1, "head_dim": 16, "inter": 32, "vocab": 256}


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one update: of the wall clock by stage and in all, and of the processor by side."""

    wall: float
    trainer: float
    engine: float
    stages: dict[str, float]


def processor_seconds(group: int) -> float:
    """Processor time of all processes of a process group so far."""
    ticks = 0
    for process in group_members(group):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def update(link: WeightPublisher, model: Any, group: int, version: int, *, shares: bool) -> Cost:
    """Publish the model's export as a step of training does, in memory that the engine ``shares`` or by broadcast."""
    began, trainer, engine = time.perf_counter(), time.process_time(), processor_seconds(group)
    shared = SharedBuckets(lambda item: [item], "0") if shares else None
    report = link.publish(model.export_weights(), str(version), shared=shared, gpus=[["0"]])
    if shared is not None:
        shared.close()
    wall = time.perf_counter() - began - report.seconds.get("join", 0.0)
    assert not report.failures, report.failures
    assert report.verified == 1
    return Cost(wall, time.process_time() - trainer, processor_seconds(group) - engine, dict(report.seconds))


def costs(server: EngineServer, model: Any, config: EngineConfig, rounds: int) -> dict[int, list[Cost]]:
    """The costs by number of buckets, those of shared ones under 0. The ways take turns."""
    links: dict[int, WeightPublisher] = {}
    for megabytes in BUCKET_MB:
        own = config.model_copy(update={"weight_bucket_mb": megabytes / SMALLER})
        limit = int(own.bucket_mb(cuda=False) * 2**20)
        number = sum(1 for _ in buckets(model.export_weights(), torch.bfloat16, limit=limit))
        links[number] = WeightPublisher([server.url], torch.device("cpu"), model.model_spec, own)
    assert server.pid is not None
    links[0] = WeightPublisher(
        [server.url], torch.device("cpu"), model.model_spec,
        config.model_copy(update={"weight_bucket_mb": BUCKET_MB[0] / SMALLER}),
    )  # fmt: skip
    measured: dict[int, list[Cost]] = {number: [] for number in links}
    for version in range(rounds):
        for number, link in links.items():
            measured[number].append(update(link, model, server.pid, version, shares=number == 0))
    for link in links.values():
        link.close()
    return measured


def export_seconds(model: Any) -> float:
    """Seconds of a pass over the exported tensors."""
    began = time.perf_counter()
    deque(model.export_weights(), maxlen=0)
    return time.perf_counter() - began


async def measure(directory: Path, rounds: int) -> None:
    checkpoint = write_moe(directory / "model", **SIZES)
    config = EngineConfig(
        python=str(ROOT / ".venv-engine/bin/python"), device="cpu", max_total_tokens=4096, start_timeout=900
    )
    with one_rank("cpu") as device:
        from agent_rl.train.megatron.model import PolicyModel  # imports Megatron, which the world must precede on a CPU

        model = PolicyModel.build(checkpoint, ParallelConfig(), device=device)
        tensors = sum(1 for _ in model.export_weights())
        exporting = statistics.median(export_seconds(model) for _ in range(rounds))
        async with EngineServer(config, checkpoint, directory / "engine.log") as server:
            measured = await asyncio.to_thread(costs, server, model, config, rounds)
    report(tensors, exporting, measured)


def report(tensors: int, exporting: float, measured: dict[int, list[Cost]]) -> None:
    print(f"{tensors:,} tensors; load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    walls = {number: statistics.median(cost.wall for cost in each) for number, each in measured.items()}
    for number, each in measured.items():
        trainer, engine = (statistics.median(getattr(cost, side) for cost in each) for side in ("trainer", "engine"))
        print(
            f"{number or 'shared'} buckets: {walls[number]:.2f} s, {walls[number] / LIMIT_SECONDS:.2f} of the limit of "
            f"{LIMIT_SECONDS:g} s; processor: trainer {trainer:.2f} s, engine {engine:.2f} s, together "
            f"{(trainer + engine) / LIMIT_SECONDS:.2f} of it"
        )
        stages = {stage: statistics.median(cost.stages[stage] for cost in each) for stage in STAGES}
        parts = ", ".join(f"{stage} {value:.2f}" for stage, value in {"export": exporting, **stages}.items())
        print(f"  s: {parts}")
    few, many, shared = measured
    print(f"shared buckets take {walls[shared] / walls[few]:.2f} of the time of {few:,} by broadcast")
    bucket = (walls[many] - walls[few]) / (many - few)
    print(
        f"{few:,} buckets take {walls[few] / walls[many]:.2f} of the time of {many:,}: {1e3 * bucket:.1f} ms a bucket, "
        f"{1e6 * (walls[few] - few * bucket) / tensors:.0f} us a tensor"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)  # beside other work OpenMP's waiting threads would be what is measured
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        asyncio.run(measure(Path(place), options.rounds))
