"""What running requests add to a weight update, on one real SGLang server on this CPU.

Run: ``python benchmarks/bench_publish.py [rounds] [requests]``

Updates of the quickstart's size go to the server through the gate, as a run's do: first while nothing runs, then, 2.5 s
apart, while so many episodes sample with routes. It prints the median time of both and their difference (goal: at most
300 ms), the time until the gate is drained among it, and what became of the episodes: each turn that was cut goes on
from its tokens through all updates that follow, until it is 256 tokens long. The client refuses tokens of a version
that was not the published one while they were asked for, and a transcript refuses rows that do not line up: either ends
the bench. No completion may have tokens of two versions.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from bench_weight_sync import ROOT, SIZES, make
from torch import Tensor

from agent_rl.config import EngineConfig, R3Config
from agent_rl.engine.launch import EngineServer
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.models.spec import read_model_spec
from agent_rl.rollout.transcript import Transcript
from agent_rl.types import SamplingParams
from agent_rl.weight_sync.publisher import WeightPublisher

LENGTH, BETWEEN = 256, 2.5


@dataclass
class Sampled:
    """What the episodes sampled: completions, those of two versions, and how often each finished turn was cut."""

    completions: int = 0
    mixed: int = 0
    cuts: list[int] = field(default_factory=list)


async def episodes(engine: SGLangEngine, number: int, sampled: Sampled) -> None:
    """One turn after the other, each until it is of the full length."""
    while True:
        transcript, cuts = Transcript(range(number, number + 8), max_tokens=LENGTH, routes=R3Config()), 0
        while transcript.remaining:
            asked = SamplingParams(max_new_tokens=transcript.remaining)
            rows, session = transcript.routes_from, f"s{number}"
            completion = await engine.generate(transcript.tokens, asked, routes_from=rows, session=session)
            transcript.sampled(completion)
            sampled.completions += 1
            sampled.mixed += len({span.version for span in completion.versions}) > 1
            cuts += completion.interrupted
        *_, routing = transcript.arrays()
        assert routing is not None
        assert routing.present[:-1].all()
        sampled.cuts.append(cuts)


@asynccontextmanager
async def sampling(engine: SGLangEngine, requests: int, sampled: Sampled) -> AsyncIterator[None]:
    """Within the block so many episodes sample; the first answers have begun."""
    async with asyncio.TaskGroup() as scope:
        running = [scope.create_task(episodes(engine, number, sampled)) for number in range(requests)]
        await asyncio.sleep(2)
        yield
        for task in running:
            task.cancel()


async def update(
    engine: SGLangEngine, link: WeightPublisher, weights: Sequence[tuple[str, Tensor]], version: int
) -> tuple[float, float]:
    """Seconds that an update takes, and those until nothing runs."""
    began = time.perf_counter()
    async with engine.gate.closed():
        drained = time.perf_counter() - began
        engine.fleet.publishing(str(version))
        report = await asyncio.to_thread(link.publish, weights, str(version))
        engine.fleet.settled()
    assert not report.failures
    return time.perf_counter() - began, drained


async def measure(directory: Path, rounds: int, requests: int) -> None:
    weights = make(directory, SIZES["quickstart's"])
    config = EngineConfig(
        python=str(ROOT / ".venv-engine/bin/python"), device="cpu", threads=1, max_running_requests=requests,
        max_total_tokens=requests * (LENGTH + 128), start_timeout=900, request_timeout=600,
    )  # fmt: skip
    async with (
        EngineServer(config, directory, directory / "engine.log") as server,
        SGLangEngine(server.url, read_model_spec(directory), config) as engine,
    ):
        link = WeightPublisher([server.url], torch.device("cpu"), read_model_spec(directory), config)
        again = partial(update, engine, link, weights)
        await again(0)  # joins
        idle, busy, sampled = [], [], Sampled()
        for version in range(1, rounds + 1):
            idle.append(await again(version))
        async with sampling(engine, requests, sampled):
            for version in range(rounds + 1, 2 * rounds + 1):
                busy.append(await again(version))
                await asyncio.sleep(BETWEEN)
        await asyncio.to_thread(link.close)
    report(idle, busy, requests, sampled)


def report(
    idle: Sequence[tuple[float, float]], busy: Sequence[tuple[float, float]], requests: int, sampled: Sampled
) -> None:
    took, with_requests = (statistics.median(1e3 * whole for whole, _ in times) for times in (idle, busy))
    drained = [1e3 * until for _, until in busy]
    print(
        f"{len(busy)} updates: {took:.0f} ms with nothing running, {with_requests:.0f} ms with {requests} requests, "
        f"{with_requests - took:+.0f} ms (goal: at most 300); of these the gate took "
        f"{statistics.median(drained):.0f} ms (longest {max(drained):.0f})"
    )
    cuts = f"cut {statistics.mean(sampled.cuts):.1f} times each, at most {max(sampled.cuts)}" if sampled.cuts else ""
    print(
        f"{sampled.completions} completions, {sampled.mixed} of two versions; {len(sampled.cuts)} turns of "
        f"{LENGTH} tokens ended, {cuts}"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)  # beside other work OpenMP's waiting threads would be what is measured
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=20, help="updates without requests, and with them")
    parser.add_argument("requests", nargs="?", type=int, default=64, help="that run at once")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        asyncio.run(measure(Path(place), options.rounds, options.requests))
