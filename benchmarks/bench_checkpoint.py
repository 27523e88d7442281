"""How long a step is held up by a checkpoint: written in the background, over written while training waits.

    python benchmarks/bench_checkpoint.py [--rounds 9] [--experts 32]

One trainer rank, in this process. Turn by turn it saves and waits for the copy alone, and saves and waits until the
directory is complete; and it trains a step while one is being written, and one while none is. Medians; ratios of one
run.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import statistics
import tempfile
from pathlib import Path

import checkout  # noqa: F401
import numpy as np
from support.moe_checkpoint import write_moe
from timing import time_call

from agent_rl.config import ParallelConfig, RunConfig
from agent_rl.models.spec import read_model_spec
from agent_rl.train.checkpoint import directory as checkpoint
from agent_rl.train.requests import OptimizerSpec, WorkerRequest
from agent_rl.train.worker import TrainerWorker

VOCAB, SEQUENCES, LENGTH = 4096, 4, 256


class Bench:
    """A rank, and the directory that it saves into."""

    def __init__(self, directory: Path, experts: int) -> None:
        model = write_moe(
            directory / "model",
            layers=4,
            hidden=256,
            heads=4,
            kv=2,
            head_dim=64,
            experts=experts,
            inter=256,
            vocab=VOCAB,
        )
        order = WorkerRequest(
            RunConfig(name="bench", model=model), read_model_spec(model), model, None, device="cpu", threads=1
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.rank = TrainerWorker(order, OptimizerSpec(lr=1e-5), 0, master_addr="127.0.0.1", master_port=port)
        self.directory = directory / "step-000001"
        tokens = np.random.default_rng(0).integers(0, VOCAB, (SEQUENCES, LENGTH)).astype(np.int32)
        self._sequences = [(row, np.ones(LENGTH, np.float32)) for row in tokens]

    def step(self) -> None:
        self.rank.supervise(self._sequences, [[list(range(SEQUENCES))]], float(SEQUENCES * LENGTH))

    def begin(self) -> None:
        """What training waits for when a checkpoint is written in the background."""
        self._updates, self._counts = self.rank.save(checkpoint.begin(self.directory))

    def finish(self) -> int:
        """The rest of it; returns the bytes of the directory."""
        checksums = (self.rank.written(),)
        layout = ParallelConfig().model_dump()
        manifest = checkpoint.Manifest(checkpoint.FORMAT, self._updates, self._counts, layout, "float32", checksums)
        checkpoint.commit(self.directory, manifest)
        return sum(file.stat().st_size for file in self.directory.iterdir())

    def blocking(self) -> None:
        self.begin()
        self.finish()


def line(what: str, seconds: list[float]) -> None:
    low, middle, high = (f"{1e3 * value:.0f}" for value in statistics.quantiles(seconds, n=4))
    print(f"{what:32s} {middle:>6s} ms   quartiles {low} to {high}")


def measure(directory: Path, rounds: int, experts: int) -> None:
    bench = Bench(directory, experts)
    bench.step()
    bench.blocking()  # the first allocates the host copy
    held, whole, beside, alone = [], [], [], []
    for _ in range(rounds):
        held.append(time_call(bench.begin))
        beside.append(time_call(bench.step))
        size = bench.finish()
        alone.append(time_call(bench.step))
        whole.append(time_call(bench.blocking))
    parameters = sum(p.numel() for module in bench.rank.model.modules for p in module.parameters())
    print(f"{parameters / 1e6:.1f} M parameters, a checkpoint of {size / 1e6:.0f} MB")
    line("a step is held up, background", held)
    line("a step is held up, blocking", whole)
    line("a step while one is written", beside)
    line("a step while none is", alone)
    print(f"held up, background over blocking: {statistics.median(held) / statistics.median(whole):.3f}")
    print(f"step beside the writing over step alone: {statistics.median(beside) / statistics.median(alone):.3f}")
    bench.rank.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--experts", type=int, default=32)
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="bench-checkpoint-"))
    try:
        measure(directory, options.rounds, options.experts)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
