"""What capturing routes costs the engine: decode throughput of two real servers, with capture over without.

``python benchmarks/bench_capture.py`` starts both on this machine and lets them take turns, burst by burst, so that
what else the machine does hits both; it prints a table and one JSON object:

- ``throughput_ratio``: median over rounds of tokens/s with capture (and routes asked for) over tokens/s without. The R3
  paper reports a loss below 3 % (arXiv 2510.11370);
- ``latency_ratio``: the same of one request alone;
- ``cpu_ratio``: processor time a token of the server's processes with capture over without, the batch's requests: what
  the others on the machine do is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import checkout  # noqa: F401  (puts the checkout's scripts on the path)
import numpy as np

from agent_rl.config import EngineConfig
from agent_rl.engine.launch import EngineServer, group_members
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.models.spec import read_model_spec
from agent_rl.types import SamplingParams
from scripts.tiny_moe import TinyMoe, initial_weights, save_checkpoint

PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Burst:
    """One batch: tokens a second, and the server's seconds of processor time a token."""

    speed: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the two servers, and what its requests ask for."""

    server: EngineServer
    engine: SGLangEngine
    routes_from: int | None

    async def burst(self, prompts: list[list[int]], tokens: int) -> Burst:
        assert self.server.pid is not None
        before = cpu_seconds(self.server.pid)
        speed, count = await sample(self.engine, prompts, tokens, self.routes_from)
        return Burst(speed, (cpu_seconds(self.server.pid) - before) / count)


def cpu_seconds(group: int) -> float:
    """Processor time, user and system, that the processes of a group have used."""
    ticks = 0
    for pid in group_members(group):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def sample(
    engine: SGLangEngine, prompts: list[list[int]], tokens: int, routes_from: int | None
) -> tuple[float, int]:
    """Tokens a second of one batch, and how many they were."""
    sampling = SamplingParams(max_new_tokens=tokens)
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(engine.generate(prompt, sampling, routes_from=routes_from, session=str(index)))
            for index, prompt in enumerate(prompts)
        ]
    count = sum(len(task.result().tokens) for task in tasks)
    return count / (time.perf_counter() - started), count


async def measure(model: Path, logs: Path, batch: int, tokens: int, rounds: int) -> dict[str, float]:
    model_spec = read_model_spec(model)
    config = EngineConfig(max_total_tokens=65536, max_running_requests=max(batch, 1))
    # The prompts' first token differs from request to request and round to round: nothing is served from the cache.
    rng = np.random.default_rng(0)
    bursts: dict[tuple[bool, int], list[Burst]] = {}
    async with AsyncExitStack() as stack:
        arms = {}
        for capture in (True, False):
            server = EngineServer(config, model, logs / f"capture-{capture}.log", capture_routes=capture)
            await stack.enter_async_context(server)
            engine = SGLangEngine(server.url, model_spec, config)
            stack.push_async_callback(engine.close)
            arms[capture] = Arm(server, engine, 0 if capture else None)
        for turn in range(rounds + 1):
            for size in {batch, 1}:
                prompts = rng.integers(2, model_spec.vocab_size - 2, (size, PROMPT_TOKENS)).tolist()
                order = (True, False) if turn % 2 else (False, True)
                for capture in order:
                    done = await arms[capture].burst(prompts, tokens)
                    if turn:  # the first round warms both servers up
                        bursts.setdefault((capture, size), []).append(done)
    return report(bursts, batch)


def report(bursts: dict[tuple[bool, int], list[Burst]], batch: int) -> dict[str, float]:
    def medians(size: int) -> dict[str, float]:
        on, off = bursts[True, size], bursts[False, size]
        ratios = sorted(with_.speed / without.speed for with_, without in zip(on, off, strict=True))
        found = {
            "tokens_per_second_capture": statistics.median(each.speed for each in on),
            "tokens_per_second_plain": statistics.median(each.speed for each in off),
            "throughput_ratio": statistics.median(ratios),
            "cpu_ratio": sum(each.cpu for each in on) / sum(each.cpu for each in off),
        }
        spread = f"rounds {ratios[0]:.3f} to {ratios[-1]:.3f}"
        print(f"batch {size}: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()), f"({spread})")
        return found

    alone = medians(1)
    values = {"batch": batch, "rounds": len(bursts[True, batch]), "latency_ratio": alone["throughput_ratio"]}
    return values | {"cpu_ratio_alone": alone["cpu_ratio"]} | medians(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint's directory; a tiny random one by default")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = chosen.model or Path(scratch) / "model"
        if chosen.model is None:
            sizes = TinyMoe()
            save_checkpoint(model, initial_weights(sizes, 0), sizes, eos=0, pad=1)
        print(json.dumps(asyncio.run(measure(model, Path(scratch), chosen.batch, chosen.tokens, chosen.rounds))))


if __name__ == "__main__":
    main()
