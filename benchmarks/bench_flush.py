"""What a weight publish costs the turns after it: it flushes the prefixes, which the engine then computes again.

Run: ``python benchmarks/bench_flush.py [lengths ...] [--rounds 5]``

A real SGLang server on this CPU serves a random model of the quickstart's size. Of each length of context a turn of 64
observed and 16 sampled tokens is timed with its prefix in the cache and after a flush, in turns, and the ratio of the
medians printed. Then the same on H100s by the planner's model (``agent-rl plan``): ``configs/paper-swe.yaml``, whose
engines have 4 GPUs; a turn there observes and samples what the config's mean turn does. The last column is the time in
which an engine computes the prefixes of all its running episodes once more, at half of that length each, as a share of
the planned rollout of a step: the upper bound of what a publish costs a run that samples beside training. A synchronous
run has no running episodes at a publish.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path

import checkout  # noqa: F401  (puts the checkout's scripts on the path)
import numpy as np
from timing import time_await

from agent_rl.config import EngineConfig
from agent_rl.config.loader import load_config
from agent_rl.engine.launch import EngineServer
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.models.spec import read_model_spec
from agent_rl.planner.assumptions import Assumptions
from agent_rl.planner.hardware import GPUS
from agent_rl.planner.known_models import planned_model
from agent_rl.planner.rollout_time import RolloutModel
from agent_rl.train.batching.cost import sequence_cost
from agent_rl.types import SamplingParams
from agent_rl.weight_sync.receivers import WeightReceivers
from scripts.tiny_moe import TinyMoe, initial_weights, save_checkpoint

OBSERVED, SAMPLED, POSITIONS = 64, 16, 65_536
PLANNED = Path(__file__).parents[1] / "configs/paper-swe.yaml"


async def measured(lengths: list[int], rounds: int, directory: Path) -> None:
    sizes = TinyMoe()
    save_checkpoint(directory / "model", initial_weights(sizes, 0), sizes, eos=0, pad=1)
    description = json.loads((directory / "model/config.json").read_text()) | {"max_position_embeddings": POSITIONS}
    (directory / "model/config.json").write_text(json.dumps(description))
    config = EngineConfig(threads=1, max_total_tokens=POSITIONS, start_timeout=900, request_timeout=900)
    spec = read_model_spec(directory / "model")
    async with (
        EngineServer(config, directory / "model", directory / "engine.log") as server,
        SGLangEngine(server.url, spec, config) as engine,
    ):
        with WeightReceivers([server.url]) as receivers:
            for length in lengths:
                await one_length(engine, receivers, spec.vocab_size, length, rounds)


async def one_length(engine: SGLangEngine, receivers: WeightReceivers, vocab: int, length: int, rounds: int) -> None:
    rng = np.random.default_rng(length)
    prefix = rng.integers(2, vocab, length).tolist()
    seconds: dict[bool, list[float]] = {False: [], True: []}

    async def turn(flushed: bool) -> None:
        tokens = prefix + rng.integers(2, vocab, OBSERVED).tolist()
        if flushed:
            await asyncio.to_thread(receivers.flush)
        sampling = SamplingParams(max_new_tokens=SAMPLED)
        seconds[flushed].append(
            await time_await(engine.generate(tokens, sampling, routes_from=length - 1, session="one"))
        )

    for number in range(rounds + 1):
        await turn(flushed=True)  # leaves the prefix in the cache
        await turn(flushed=False)
        if not number:
            seconds = {False: [], True: []}
    cached, flushed = (statistics.median(seconds[which]) for which in (False, True))
    print(
        f"{length:>7,} tokens: cached {1e3 * cached:6.0f} ms, flushed {1e3 * flushed:7.0f} ms, {flushed / cached:.2f}",
        flush=True,
    )


def modelled() -> None:
    config = load_config(PLANNED)
    model, assume = planned_model(config.model), Assumptions.of(config, "cuda")
    rollout = RolloutModel(config, model, "cuda", assume)
    running = config.rollout.concurrency / config.engine.count
    speed = GPUS[config.hardware.gpu].flops[config.engine.dtype] * config.engine.gpus * assume["prefill"]
    episodes = config.rollout.tasks_per_step * config.rollout.group_size
    step = rollout.rollout("rollout", episodes, group=config.rollout.group_size).seconds
    cost = sequence_cost(model)
    observed = (assume["tokens"] - assume["sampled_tokens"] - assume["prompt_tokens"]) / assume["turns"]
    decode = assume["sampled_tokens"] / assume["turns"] * rollout.decode_step(running)
    print(f"\n{PLANNED.name} on {config.hardware.gpu}, {running:.0f} requests an engine; planned rollout {step:,.0f} s")
    for length in (8_192, 16_384, 32_768, 65_536):
        prefix = cost.of([length])[0] / speed
        with_prefix = (cost.of([length + observed])[0] - cost.of([length])[0]) / speed + decode
        all_prefixes = running * cost.of([length // 2])[0] / speed
        print(
            f"{length:>7,} tokens: cached {with_prefix:6.1f} s, flushed {with_prefix + prefix:6.1f} s, "
            f"{1 + prefix / with_prefix:.2f}; all prefixes of an engine {all_prefixes:5.1f} s, "
            f"{all_prefixes / step:.2%} of the rollout"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", nargs="*", type=int, default=[1024, 4096, 16_384])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    modelled()
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(measured(options.lengths, options.rounds, Path(scratch)))
