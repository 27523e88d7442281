"""The CPU speeds that `agent-rl plan --time` assumes (agent_rl/planner/assumptions.py), measured on this machine.

Run: ``OMP_NUM_THREADS=1 python benchmarks/bench_plan_time.py [trainer] [optimizer] [engine] [sandbox]``

All figures are processor time (user and system): other load on the machine moves it less than the wall clock.

- trainer: passes and updates of both demo models, fitted by FLOPs and copies of tokens to experts.
- optimizer: torch's AdamW with clipping on the tensors of both demo models, fitted by bytes and tensors.
- engine: real servers of both demo models answer bursts of 1 to 64 requests with 1 and with 33 tokens each, fitted by
  layers of decode steps, requests, decoded and prefilled copies of tokens to experts, and FLOPs.
- sandbox: recorded episodes of the quickstart run again without an engine; two sizes remove the start of the program.
  An episode is ``task_seconds + start_seconds + turns x (tool_seconds + loop_turn) + grade_seconds``.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from bench_capture import cpu_seconds, sample
from checkout import ROOT
from timing import fastest

from agent_rl.config import EngineConfig
from agent_rl.engine.launch import EngineServer
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.models.spec import read_model_spec
from agent_rl.train.batching.cost import sequence_cost
from agent_rl.train.hf_index import expected_shapes

ROUNDS = 3
MODELS = {name: ROOT / "agent_rl" / "demo_model" / "data" / f"{name}-moe" for name in ("tiny", "paper")}
SEQUENCE, PROMPT = 160, 46
"""Tokens of a trajectory, and of a prompt that the prefix cache lacks, as in the quickstart."""


def fit(names: str, rows: list[tuple[float, ...]], seconds: list[float]) -> None:
    """Print the least squares of the relative error."""
    measured = np.array(seconds)
    factors = np.array(rows) / measured[:, None]
    found = np.linalg.lstsq(factors, np.ones(len(measured)), rcond=None)[0]
    for name, value in zip(names.split(), found, strict=True):
        print(f"  {name} {value:.3g}")
    print(f"  largest relative error of {len(rows)} measurements: {np.abs(factors @ found - 1).max():.0%}", flush=True)


def measure_trainer() -> None:
    import torch
    from one_rank import SHAPES, one_rank, policy

    from agent_rl.train.megatron.packed_batch import PackedBatch

    rows, seconds = [], []
    with one_rank("cpu") as device:
        for name, directory in MODELS.items():
            model, spec = policy(device, SHAPES[name])[1], read_model_spec(directory)
            for tokens in (1600, 8000):
                batch = PackedBatch.from_sequences(
                    [torch.randint(0, spec.vocab_size, (SEQUENCE,)) for _ in range(tokens // SEQUENCE)]
                )
                loss = lambda logprobs, _entropy, _batch: (-logprobs.mean(), {})  # noqa: E731
                calls = {
                    "forward": partial(model.forward_logprobs, [batch], None, record=True),
                    "update": partial(model.train_microbatches, [batch], None, loss),
                }
                flops = sum(sequence_cost(spec).of([SEQUENCE])) * tokens / SEQUENCE
                copies = tokens * spec.top_k * len(spec.moe_layer_ids)
                for (kind, spent), passes in zip(fastest(calls, 4).items(), (1, 3), strict=True):
                    print(f"  {name} {tokens} tokens {kind}: {spent:.3f} s, {passes * flops / spent / 1e9:.1f} GFLOP/s")
                    rows.append((passes * flops / 1e9, passes * copies))
                    seconds.append(spent)
    fit("seconds_per_gflop trainer_copy", rows, seconds)


def measure_optimizer() -> None:
    import torch

    rows, seconds = [], []
    for directory in MODELS.values():
        weights = [
            torch.nn.Parameter(torch.zeros(shape)) for shape in expected_shapes(read_model_spec(directory)).values()
        ]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        adam = torch.optim.AdamW(weights, lr=1e-3)

        def update(adam: torch.optim.AdamW = adam, weights: list[torch.nn.Parameter] = weights) -> None:
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            adam.step()

        rows.append((2 * 8 * sum(weight.numel() for weight in weights) / 1e9, len(weights)))
        seconds.append(fastest({"update": update})["update"])
    fit("seconds_per_gigabyte adam_tensor", rows, seconds)


async def measure_engine() -> None:
    rows, seconds, rng = [], [], np.random.default_rng(0)
    for name, directory in MODELS.items():
        spec, config = read_model_spec(directory), EngineConfig(threads=1, max_total_tokens=65536)
        with tempfile.TemporaryDirectory() as scratch:
            async with EngineServer(config, directory, Path(scratch) / "log", capture_routes=True) as server:
                engine = SGLangEngine(server.url, spec, config)
                for size in (1, 4, 16, 64):
                    for tokens in (1, 33):
                        spent = []
                        for _ in range(4):
                            prompts = rng.integers(2, spec.vocab_size - 2, (size, PROMPT)).tolist()
                            assert server.pid is not None
                            before = cpu_seconds(server.pid)
                            await sample(engine, prompts, tokens, 0)
                            spent.append(cpu_seconds(server.pid) - before)
                        least = max(sorted(spent[1:])[0], 0.01)
                        print(f"  {name} {size} requests x {tokens} tokens: {least:.2f} s {spent}", flush=True)
                        if least >= 0.05:  # the kernel counts in hundredths of a second
                            copies, decoded = spec.top_k * len(spec.moe_layer_ids), (tokens - 1) * size
                            gflop = sequence_cost(spec).linear * (PROMPT * size + decoded) / 1e9
                            steps = (tokens - 1) * spec.num_layers
                            rows.append((steps, size, decoded * copies, PROMPT * size * copies, gflop))
                            seconds.append(least)
                await engine.close()
    fit("engine_layer engine_request engine_copy prefill_copy seconds_per_gflop", rows, seconds)


def measure_sandbox() -> None:
    recorded = ROOT / "tests" / "captured" / "quickstart" / "evaluations" / "step-000006-sampled.jsonl.zst"
    spent: dict[int, list[float]] = {}
    for tasks in (8, 64) * ROUNDS:
        with tempfile.TemporaryDirectory() as runs:
            options = [
                "--policy",
                f"replay:{recorded}",
                "--split",
                "heldout",
                "--tasks",
                str(tasks),
                f"runs_dir={runs}",
            ]
            command = [
                sys.executable,
                "-m",
                "agent_rl.cli",
                "eval",
                str(ROOT / "configs" / "quickstart.yaml"),
                *options,
            ]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.setdefault(tasks, []).append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    print(f"  episode {(min(spent[64]) - min(spent[8])) / 56:.3g}", flush=True)


PARTS = {
    "trainer": measure_trainer,
    "optimizer": measure_optimizer,
    "engine": lambda: asyncio.run(measure_engine()),
    "sandbox": measure_sandbox,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    for part in parser.parse_args().parts:
        print(part, flush=True)
        PARTS[part]()


if __name__ == "__main__":
    main()
