"""How long a step is held up by a checkpoint: written in the background, over written while training waits.

    python tests/bench/bench_checkpoint.py [--rounds 7] [--experts 32]

One trainer rank under Ray, as in a run. Turn by turn it saves and waits for the copy alone, and saves and waits for the
whole folder; and it trains a step while one is being written, and one while none is. Medians; ratios are of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from agent_rl.config import RunConfig
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.types import Sample

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "train"))

from conftest import write_moe

VOCAB = 4096


def samples(count: int, length: int) -> list[Sample]:
    generator = np.random.default_rng(0)
    mask = np.arange(length) >= length // 4
    logprobs = np.where(mask, -8.0, 0.0).astype(np.float32)
    return [
        Sample(generator.integers(0, VOCAB, length).astype(np.int32), mask, logprobs, (-1.0) ** n, None)
        for n in range(count)
    ]


async def measure(folder: Path, rounds: int, experts: int) -> None:
    model = write_moe(
        folder / "model", layers=4, hidden=256, heads=4, kv=2, head_dim=64, experts=experts, inter=256, vocab=VOCAB
    )
    train = {"device": "cpu", "replay": "off", "lr": 1e-5, "native_every": 0}
    config = RunConfig.model_validate({"name": "bench", "model": model, "train": train})
    data = samples(4, 256)
    held, whole, beside, alone = [], [], [], []
    async with RayTrainer(config) as trainer:
        await trainer.step(data, measure_native=False)
        await trainer.save(folder / "step-000000")  # the first allocates the host copy
        for number in range(1, rounds + 1):
            started = time.perf_counter()
            writing = await trainer.begin_save(folder / f"step-{number:06d}")
            held.append(time.perf_counter() - started)
            beside.append(await timed(trainer.step(data, measure_native=False)))
            await writing
            alone.append(await timed(trainer.step(data, measure_native=False)))
            whole.append(await timed(trainer.save(folder / f"step-{number:06d}-blocking")))
            size = clear(folder)
        parameters = trainer.parameters
    print(f"{parameters / 1e6:.1f} M parameters, a checkpoint of {size / 1e6:.0f} MB")
    line("a step is held up, background", held)
    line("a step is held up, blocking", whole)
    line("a step while one is written", beside)
    line("a step while none is", alone)
    print(f"held up, background over blocking: {statistics.median(held) / statistics.median(whole):.3f}")
    print(f"step beside the writing over step alone: {statistics.median(beside) / statistics.median(alone):.3f}")


def clear(folder: Path) -> int:
    """Remove all checkpoints; the bytes of one."""
    for path in folder.glob("step-*"):
        size = sum(file.stat().st_size for file in path.iterdir())
        shutil.rmtree(path)
    return size


async def timed(work: object) -> float:
    started = time.perf_counter()
    await work  # type: ignore[misc]
    return time.perf_counter() - started


def line(what: str, seconds: list[float]) -> None:
    low, middle, high = (f"{1e3 * value:.0f}" for value in statistics.quantiles(seconds, n=4))
    print(f"{what:32s} {middle:>6s} ms   quartiles {low} to {high}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--experts", type=int, default=32)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-checkpoint-"))
    try:
        asyncio.run(measure(folder, options.rounds, options.experts))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
