"""How late the event loop wakes while a large step is dealt out to the trainer's ranks and its routes are counted.

Run: ``python benchmarks/bench_lag.py [trajectories]`` (default 512)

Trajectories of 16,384 tokens with routes of 48 layers (top-8 of 128 experts) go through :class:`RayTrainer`'s step over
8 data ranks that share their experts. The ranks are stand-ins that answer at once, so all that runs is the driver's own
work. A task that sleeps 5 ms at a time measures how late it is woken: first while nothing is done, which is the
machine's own lag beside other work; then while the step is taken as it is; then with all its work on the loop itself,
the baseline. The metrics must be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from unittest import mock

import checkout  # noqa: F401
import numpy as np
from support.fake_workers import FakeWorkers

from agent_rl.config import RunConfig
from agent_rl.models.spec import ModelSpec
from agent_rl.train.batching.cost import sequence_cost
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.types import Sample
from agent_rl.utils.concurrency import LoopLag, run_alongside
from r3.routing import Routing

TOKENS, LAYERS, TOP_K, EXPERTS, RANKS, BUDGET = 16_384, 48, 8, 128, 8, 65_536
SAMPLED = TOKENS // 4
T = TypeVar("T")
DISTINCT = 8
"""So many different trajectories' routes are held: of 512 they would be 3.2 GB."""

FACTS = ModelSpec(
    "qwen3_moe", moe=(True,) * LAYERS, hidden=2048, heads=32, kv_heads=4, head_dim=128, inner=6144,
    vocab_size=151_936, max_positions=40_960, num_experts=EXPERTS, top_k=TOP_K, expert_inner=768,
)  # fmt: skip
CONFIG: dict[str, Any] = {
    "name": "lag",
    "model": "none",
    "train": {"microbatch_tokens": BUDGET, "mini_steps": 1, "parallel": {"world_size": RANKS, "expert": RANKS}},
}


def trajectories(count: int) -> list[Sample]:
    generator = np.random.default_rng(0)
    routings = [routing(generator) for _ in range(DISTINCT)]
    mask = np.arange(TOKENS) >= TOKENS - SAMPLED
    tokens = generator.integers(0, FACTS.vocab_size, TOKENS).astype(np.int32)
    logprobs = np.where(mask, -generator.random(TOKENS), 0).astype(np.float32)
    return [Sample(tokens, mask, logprobs, 1.0, routings[index % DISTINCT]) for index in range(count)]


def routing(generator: np.random.Generator) -> Routing:
    start = generator.integers(0, EXPERTS, (TOKENS, LAYERS, 1))
    experts = ((start + np.arange(TOP_K) * 15) % EXPERTS).astype(np.uint8)
    return Routing(experts, np.arange(TOKENS) < TOKENS - 1, (), EXPERTS)


async def on_the_loop(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return call(*args, **options)


async def watched(doing: Awaitable[T]) -> tuple[T, str]:
    """What comes of it, and a line: the seconds and processor seconds it took, and how late the loop was meanwhile."""
    lag = LoopLag(interval=0.005)
    async with run_alongside(lag.watch()):
        await asyncio.sleep(0.1)
        lag.delays.clear()
        began, worked = time.perf_counter(), time.process_time()
        result = await doing
        took, worked = time.perf_counter() - began, time.process_time() - worked
        await asyncio.sleep(0.02)
    p50, p99, longest = 1e3 * np.percentile(lag.delays, [50, 99, 100])
    late = f"lag p50 {p50:.1f} ms, p99 {p99:.1f} ms (goal: at most 50), longest {longest:.0f} ms"
    return result, f"{took:5.2f} s ({worked:.2f} of processor time); {late}"


async def main(count: int) -> None:
    samples = trajectories(count)
    trainer = RayTrainer(RunConfig.model_validate(CONFIG))
    trainer.workers, trainer._cost = FakeWorkers(samples, RANKS, LAYERS), sequence_cost(FACTS)  # type: ignore[assignment]
    print(f"{count} trajectories of {TOKENS:,} tokens, {LAYERS} layers")
    _, line = await watched(asyncio.sleep(5.0))
    print(f"  nothing done  {line}", flush=True)
    found, line = await watched(trainer.step(samples, measure_without_replay=True))
    print(f"  as it is      {line}", flush=True)
    with mock.patch("asyncio.to_thread", on_the_loop):
        blocked, line = await watched(trainer.step(samples, measure_without_replay=True))
    print(f"  on the loop   {line}")
    assert found == blocked, "the metrics differ"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trajectories", nargs="?", type=int, default=512)
    asyncio.run(main(parser.parse_args().trajectories))
