"""A layer's small experts, as our CPU servers multiply them, over a product an expert.

``python benchmarks/bench_experts.py`` prints, for the quickstart's layer and the paper-shaped model's in bfloat16 on
one thread, the median processor time of both ways by the number of tokens, taken in turns, and their ratio. Every round
routes anew, as in a server, so an expert's number of tokens is seldom one that was seen before. The baseline sorts the
tokens by expert and goes through the experts in Python, as SGLang does (``moe_forward_native``). The last column says
whether both results are the same bits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch
from timing import time_call
from torch import Tensor
from torch.nn import functional as F

from agent_rl.engine.cpu.cpu_kernels import mix_experts

SHAPES = {"quickstart": (8, 2, 128, 128), "paper": (128, 8, 128, 16)}
"""Experts, chosen of them, hidden size, inner size."""
TOKENS = (1, 4, 16, 64, 256, 1024, 3000)
ROUNDS = 30


def one_by_one(x: Tensor, gates: Tensor, chosen: Tensor, up_and_gate: Tensor, down: Tensor) -> Tensor:
    slots, inner = chosen.reshape(-1), down.shape[2]
    order = slots.argsort()
    rows, start, made = x[order // chosen.shape[1]], 0, []
    for expert, count in enumerate(torch.bincount(slots, minlength=len(down)).tolist()):
        if count:
            middle = F.linear(rows[start : start + count], up_and_gate[expert])
            made.append(F.linear(F.silu(middle[..., :inner]) * middle[..., inner:], down[expert]))
            start += count
    back = torch.empty_like(rows)
    back[order] = torch.cat(made)
    return (back.view(*chosen.shape, -1).to(gates.dtype) * gates.unsqueeze(-1)).sum(1).to(x.dtype)


def measure(experts: int, top_k: int, hidden: int, inner: int, tokens: int) -> tuple[float, float, bool]:
    weights = (
        torch.randn(experts, 2 * inner, hidden).bfloat16() / 16,
        torch.randn(experts, hidden, inner).bfloat16() / 16,
    )
    rounds, same = [], True
    for _ in range(ROUNDS):
        x = torch.randn(tokens, hidden).bfloat16()
        popular = torch.randn(tokens, experts) + torch.randn(experts)
        gates, chosen = popular.softmax(-1).topk(top_k)
        given = (x, gates, chosen, *weights)
        rounds.append([1e3 * time_call(partial(way, *given), time.thread_time) for way in (one_by_one, mix_experts)])
        same = same and torch.equal(one_by_one(*given), mix_experts(*given))
    before, after = (statistics.median(column) for column in zip(*rounds, strict=True))
    return before, after, same


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| layer | tokens | a product an expert, ms | padded, ms | ratio | same bits |")
    print("|---|---|---|---|---|---|")
    for name, shape in SHAPES.items():
        for tokens in TOKENS:
            before, after, same = measure(*shape, tokens)
            bits = "yes" if same else "no"
            print(f"| {name} | {tokens:,} | {before:.2f} | {after:.2f} | {after / before:.2f} | {bits} |")


if __name__ == "__main__":
    main()
