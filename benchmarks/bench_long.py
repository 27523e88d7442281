"""Tokens a second and peak memory of one training step against the length of its one sequence, up to 65,536 tokens.

Run: ``python benchmarks/bench_long.py [--lengths 1024 4096] [--model small vocabulary] [--device cuda]``
(``--lengths 65536``, a whole trajectory, takes minutes on two cores)

One trajectory with replayed routes goes through the forward and the backward pass, with full recomputation, in a fresh
process a point: a real Megatron rank on the trainer's own model. Models: ``small``, and the same with Qwen3-30B-A3B's
``vocabulary`` of 151,936, of which all logits in float32 would be 39.8 GB at 65,536 tokens. Memory is the peak resident
set of the process less what it held before the step (weights, gradients, code); on a GPU, torch's peak. Beside it, what
does not exist whole: the logits, and one attention matrix of one head.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

import torch
from one_rank import QUICKSTART, arguments, one_rank, policy
from timing import timed

SMALL: dict[str, Any] = {
    **QUICKSTART,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
MODELS = {"small": SMALL, "vocabulary": {**SMALL, "vocab_size": 151_936}}
MIB = 1 << 20


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def point(length: int, name: str, device_name: str) -> dict[str, float]:
    """One step over one sequence in this process."""
    from agent_rl.train.megatron.packed_batch import PackedBatch, PackedRoutes

    shape = MODELS[name]
    with one_rank(device_name) as device:
        model = policy(device, shape, recompute="full")[1]
        draw = torch.Generator().manual_seed(0)

        def data(tokens: int) -> tuple[PackedBatch, PackedRoutes]:
            ids = torch.randint(0, shape["vocab_size"], (tokens,), generator=draw)
            scores = torch.rand(tokens, shape["num_hidden_layers"], shape["num_experts"], generator=draw)
            experts = scores.argsort(-1)[..., : shape["num_experts_per_tok"]].to(torch.uint8)
            return PackedBatch.from_sequences([ids]), PackedRoutes(experts, torch.ones(tokens, dtype=torch.bool))

        def step(batch: PackedBatch, routes: PackedRoutes) -> None:
            model.train_microbatches([batch], [routes], lambda logprobs, _entropy, _batch: (-logprobs.mean(), {}))

        step(*data(64))
        batch, routes = data(length)
        before = peak_bytes(device)
        used = timed(lambda: step(batch, routes), device)
        finite = all(bool(p.main_grad.isfinite().all()) for p in model.modules[0].parameters())
    if not finite:
        raise SystemExit(f"{length} tokens: a gradient is not finite")
    return {"wall": used.wall, "processor": used.processor, "bytes": peak_bytes(device) - before}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--point", action="store_true", help="measure in this process and print JSON")
    options = parser.parse_args()
    if options.point:
        print(json.dumps(point(options.lengths[0], options.model[0], options.device)))
        return
    for name in options.model:
        print(f"\n{name}: {MODELS[name]}, full recomputation, replay")
        columns = (
            "tokens",
            "tokens/s",
            "a proc. s",
            "wall s",
            "proc. s",
            "MiB",
            "KiB a token",
            "logits MiB",
            "L^2 MiB",
        )
        print(" ".join(f"{column:>11}" for column in columns))
        for length in options.lengths:
            command = [sys.executable, __file__, "--point", "--lengths", str(length), "--model", name]
            done = subprocess.run([*command, "--device", options.device], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{length} tokens: {done.stderr.strip().splitlines()[-1]}")
            found = json.loads(done.stdout.strip().splitlines()[-1])
            wall, processor, size = found["wall"], found["processor"], found["bytes"]
            logits, square = length * MODELS[name]["vocab_size"] * 4, length**2 * 4
            row = (length, length / wall, length / processor, wall, processor, size / MIB, size / length / 1024)
            print(" ".join(f"{value:11,.1f}" for value in (*row, logits / MIB, square / MIB)), flush=True)


if __name__ == "__main__":
    main()
