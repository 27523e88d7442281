"""A weight sync from a trainer of two pipeline stages over one from a trainer of one, on this CPU.

Run: ``python benchmarks/bench_pipeline_sync.py [rounds]`` (7 rounds)

Both trainers have the same weights and publish them in turns to one real SGLang server, which they have joined before.
The trainer of two publishes in two ways: ``by rank 0``, to which the second stage has sent its weights, and ``by
stages``, each of which sends its own. ``prepare`` is the part of the wall in which a sender waits for the next bucket.
Ratios are of medians.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench_weight_sync import ROOT, SIZES, make
from one_rank import free_port, world

from agent_rl.config import EngineConfig, ParallelConfig
from agent_rl.engine.launch import EngineServer
from agent_rl.weight_sync.publisher import WeightPublisher
from agent_rl.weight_sync.stage_sender import StageSender
from agent_rl.weight_sync.stage_turns import ALONE, StageTurns

BY_RANK_0, BY_STAGES = "by rank 0", "by stages"
WAYS = {"one stage": (1, BY_RANK_0), "two stages, by rank 0": (2, BY_RANK_0), "two stages, by stages": (2, BY_STAGES)}
"""The number of stages, and who sends."""


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


def rank(number: int, way: str, port: int, checkpoint: Path, config: EngineConfig, url: str, turn: Connection) -> None:
    """One rank: exports its weights whenever it is its trainer's turn; rank 0 publishes them."""
    import torch

    torch.set_num_threads(1)
    stages, senders = WAYS[way]
    parallel = ParallelConfig(world_size=stages, pipeline=stages)
    with world(parallel, number, port, "cpu") as device:
        from agent_rl.train.megatron.model import PolicyModel

        def gather(item: Any) -> list[Any]:
            items: list[Any] = [None] * stages
            torch.distributed.all_gather_object(items, item)
            return items

        model = PolicyModel.build(checkpoint, parallel, device=device)
        turns = StageTurns(gather, number, stages) if senders == BY_STAGES else ALONE
        link = (WeightPublisher if number == 0 else StageSender)([url], device, model.model_spec, config)
        while version := turn.recv():
            began = time.perf_counter()
            weights = model.export_weights("stage leaders" if senders == BY_STAGES else "rank 0")
            if isinstance(link, WeightPublisher):
                report = link.publish(weights, version, turns=turns)
                assert not report.failures, report.failures
                joined = report.seconds.get("join", 0.0)
                turn.send((time.perf_counter() - began - joined, report.seconds["prepare"]))
                continue
            if senders == BY_STAGES:
                assert not link.publish(weights, version, turns)
            else:
                deque(weights, maxlen=0)
            turn.send((0.0, 0.0))
        link.close()


def compare(checkpoint: Path, config: EngineConfig, url: str, rounds: int) -> dict[str, Trainer]:
    """The trainers by their way; they take turns. The first sync of each is not counted."""
    context, trainers, processes = multiprocessing.get_context("spawn"), dict[str, Trainer](), []
    for way, (stages, _) in WAYS.items():
        trainers[way], port = Trainer(), free_port()
        for number in range(stages):
            ours, theirs = context.Pipe()
            trainers[way].turns.append(ours)
            arguments = (number, way, port, checkpoint, config, url, theirs)
            processes.append(context.Process(target=rank, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()  # so that a rank that dies ends this process too
    for round_number in range(rounds + 1):
        for way, trainer in trainers.items():
            wall, prepare = trainer.publish(f"{round_number} {way}")
            if round_number:
                trainer.walls.append(wall)
                trainer.prepares.append(prepare)
    for trainer in trainers.values():
        for turn in trainer.turns:
            turn.send("")
    for process in processes:
        process.join()
    return trainers


def report(name: str, trainers: dict[str, Trainer]) -> None:
    for way, trainer in trainers.items():
        wall, prepare = statistics.median(trainer.walls), statistics.median(trainer.prepares)
        each = ", ".join(f"{1000 * value:.0f}" for value in trainer.walls)
        print(f"{name}, {way}: {1000 * wall:.0f} ms ({each}), {1000 * prepare:.0f} ms of it prepare")
    one, *two = (statistics.median(trainer.walls) for trainer in trainers.values())
    for way, wall in zip([*WAYS][1:], two, strict=True):
        print(f"{name}: {way}, over one stage: {wall / one:.2f}")


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
