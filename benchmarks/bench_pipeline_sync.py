"""A weight sync from a trainer of two pipeline stages over one from a trainer of one, on this CPU.

Run: ``python benchmarks/bench_pipeline_sync.py [rounds]`` (7 rounds)

Both trainers have the same weights and publish them in turns to one real SGLang server, which they have joined before.
Rank 0 sends all of them; the second stage sends its own to rank 0. An engine takes one update request at a time, so
senders in each stage could at best reach the time of one stage: the ratio of the walls bounds what they would gain.
``prepare`` is the part of the wall in which rank 0 waits for the next bucket. Ratios are of medians.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from bench_weight_sync import ROOT, SIZES, make
from one_rank import free_port, world

from agent_rl.config import EngineConfig, ParallelConfig
from agent_rl.engine.launch import EngineServer
from agent_rl.weight_sync.publisher import WeightPublisher

STAGES = (1, 2)


@dataclass
class Trainer:
    """A trainer of some pipeline stages; ``turns`` leads to each of its ranks."""

    turns: list[Connection] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)
    prepares: list[float] = field(default_factory=list)

    def publish(self, version: str) -> tuple[float, float]:
        """Seconds of one sync, and of its stage ``prepare``."""
        for turn in self.turns:
            turn.send(version)
        for turn in self.turns[1:]:
            turn.recv()
        wall, prepare = self.turns[0].recv()
        return wall, prepare


def rank(
    number: int, stages: int, port: int, checkpoint: Path, config: EngineConfig, url: str, turn: Connection
) -> None:
    """One rank: exports its weights whenever it is its trainer's turn; rank 0 publishes them."""
    import torch

    torch.set_num_threads(1)
    parallel = ParallelConfig(world_size=stages, pipeline=stages)
    with world(parallel, number, port, "cpu") as device:
        from agent_rl.train.megatron.model import PolicyModel

        model = PolicyModel.build(checkpoint, parallel, device=device)
        link = WeightPublisher([url], device, model.model_spec, config)
        while version := turn.recv():
            began = time.perf_counter()
            if number:
                for _ in model.export_weights():
                    pass
                turn.send((0.0, 0.0))
                continue
            report = link.publish(model.export_weights(), version)
            assert not report.failures, report.failures
            joined = report.seconds.get("join", 0.0)
            turn.send((time.perf_counter() - began - joined, report.seconds["prepare"]))
        link.close()


def compare(checkpoint: Path, config: EngineConfig, url: str, rounds: int) -> dict[int, Trainer]:
    """The trainers by their number of stages; they take turns. The first sync of each is not counted."""
    context, trainers, processes = multiprocessing.get_context("spawn"), dict[int, Trainer](), []
    for stages in STAGES:
        trainers[stages], port = Trainer(), free_port()
        for number in range(stages):
            ours, theirs = context.Pipe()
            trainers[stages].turns.append(ours)
            arguments = (number, stages, port, checkpoint, config, url, theirs)
            processes.append(context.Process(target=rank, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()  # so that a rank that dies ends this process too
    for round_number in range(rounds + 1):
        for stages, trainer in trainers.items():
            wall, prepare = trainer.publish(f"{round_number}-{stages}")
            if round_number:
                trainer.walls.append(wall)
                trainer.prepares.append(prepare)
    for trainer in trainers.values():
        for turn in trainer.turns:
            turn.send("")
    for process in processes:
        process.join()
    return trainers


def report(name: str, trainers: dict[int, Trainer]) -> None:
    for stages, trainer in trainers.items():
        wall, prepare = statistics.median(trainer.walls), statistics.median(trainer.prepares)
        each = ", ".join(f"{1000 * value:.0f}" for value in trainer.walls)
        print(f"{name}, {stages} stages: {1000 * wall:.0f} ms ({each}), {1000 * prepare:.0f} ms of it prepare")
    one, two = (statistics.median(trainers[stages].walls) for stages in STAGES)
    print(f"{name}: two stages over one: {two / one:.2f}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", type=int, nargs="?", default=7)
    rounds = parser.parse_args(arguments).rounds
    for name, sizes in SIZES.items():
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(measure(name, Path(directory), sizes, rounds))


async def measure(name: str, directory: Path, sizes: dict[str, int], rounds: int) -> None:
    checkpoint = directory / "model"
    make(checkpoint, sizes)
    config = EngineConfig(
        python=str(ROOT / ".venv-engine/bin/python"), device="cpu", max_total_tokens=4096, start_timeout=900
    )
    async with EngineServer(config, checkpoint, directory / "engine.log") as server:
        report(name, await asyncio.to_thread(compare, checkpoint, config, server.url, rounds))


if __name__ == "__main__":
    main()
