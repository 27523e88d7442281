"""Step time of the Megatron trainer with routing replay over without, on this machine's CPU. Goal: at most 1.05.

Run: ``OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE python tests/bench/bench_replay.py [rounds]``

A step is an old-log-prob pass and a forward and backward pass over one packed micro-batch of 8k tokens, at the size of
the quickstart's model. The two kinds of step take turns, so that other load on the machine falls on both; the ratio is
that of the medians, and the quartiles are printed beside it. Processor time is given besides wall time: a busy machine
moves it less. Last, from a profile of a few steps: the share of the processor time that goes to preparing micro-batches
(with replay: cutting, checking and moving routes) and to choosing experts (with replay: taking the given ones).
"""

from __future__ import annotations

import cProfile
import pstats
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from agent_rl.config import ParallelConfig
from agent_rl.train.megatron.batch import PackedBatch, PackedRoutes
from agent_rl.train.megatron.parallel import destroy_parallel, init_parallel

VOCAB, EXPERTS, TOP_K, LAYERS = 1024, 8, 2, 4


def save_model(folder: Path) -> None:
    """A random model of the quickstart's size (2.1 M parameters)."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=128,
        norm_topk_prob=True,
        tie_word_embeddings=True,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def step(model: Any, batch: PackedBatch, routes: PackedRoutes | None) -> tuple[float, float, float]:
    """Seconds of the forward pass, of the forward and backward pass, and of processor time for both."""
    start, used = time.perf_counter(), time.process_time()
    model.forward_logprobs([batch], [routes], entropy=True)
    middle = time.perf_counter()
    model.train_microbatches([batch], [routes], lambda logprobs, _entropy, _batch: (-logprobs.mean(), {}))
    return middle - start, time.perf_counter() - middle, time.process_time() - used


def main(rounds: int) -> None:
    from agent_rl.train.megatron.model import PolicyModel

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        model = PolicyModel.build(Path(folder), ParallelConfig(), device=torch.device("cpu"))
    lengths = torch.randint(200, 300, (33,)).tolist()
    batch = PackedBatch.from_sequences([torch.randint(0, VOCAB, (length,)) for length in lengths])
    native = model.forward_logprobs([batch], None, record=True)[0].routes
    # Random experts would also be spread more evenly over the experts; the native ones leave the work as it was.
    given = PackedRoutes(native.to(torch.uint8), torch.ones(len(batch), dtype=torch.bool))
    step(model, batch, None)
    step(model, batch, given)
    times: dict[str, list[tuple[float, float, float]]] = {"without": [], "with": []}
    for turn in range(rounds):
        for kind in ("without", "with") if turn % 2 else ("with", "without"):
            times[kind].append(step(model, batch, given if kind == "with" else None))
    report(times, len(batch))
    for kind, routes in (("without", None), ("with", given)):
        shares = ", ".join(f"{name} {share:.2%}" for name, share in profile(model, batch, routes).items())
        print(f"{kind:>8} replay, share of processor time: {shares}")


def profile(model: Any, batch: PackedBatch, routes: PackedRoutes | None, steps: int = 5) -> dict[str, float]:
    """The shares of processor time under the two functions where replay works."""
    profiler = cProfile.Profile(time.process_time)
    started = time.process_time()
    with profiler:
        for _ in range(steps):
            step(model, batch, routes)
    total = time.process_time() - started
    rows = pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
    cumulative = {name: row[3] for (_, _, name), row in rows}
    return {label: cumulative[name] / total for label, name in (("prepare", "_item"), ("choose", "get_replay_topk"))}


def report(times: dict[str, list[tuple[float, float, float]]], tokens: int) -> None:
    for kind, rows in times.items():
        forward, both, _ = (statistics.median(part) for part in zip(*rows, strict=True))
        print(
            f"{kind:>8} replay: forward {tokens / forward:,.0f} tokens/s, with backward {tokens / both:,.0f} tokens/s"
        )
    walls = {kind: [forward + both for forward, both, _ in rows] for kind, rows in times.items()}
    ratios(walls, "wall time")
    ratios({kind: [used for _, _, used in rows] for kind, rows in times.items()}, "processor time")
    print(f"threads {torch.get_num_threads()}, rounds {len(walls['with'])}, tokens {tokens}")


def ratios(totals: dict[str, list[float]], what: str) -> None:
    rounds = [a / b for a, b in zip(totals["with"], totals["without"], strict=True)]
    low, _, high = statistics.quantiles(rounds, n=4)
    ratio = statistics.median(totals["with"]) / statistics.median(totals["without"])
    print(f"replay over without, {what}: {ratio:.3f} (quartiles of the rounds {low:.3f} to {high:.3f}, goal <= 1.05)")


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    init_parallel(ParallelConfig(), 0, master_addr="127.0.0.1", master_port=port, device=torch.device("cpu"))
    try:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
    finally:
        destroy_parallel()
