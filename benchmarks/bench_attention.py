"""A batch's attention in one call, as our CPU servers compute it, over a call a sequence.

``python benchmarks/bench_attention.py`` prints, for the quickstart's heads in bfloat16 on one thread, the median
processor time of both ways by how keys and values are stored, the number of sequences, their length and their new
tokens, taken in turns, and their ratio. The baseline goes through the sequences in Python and computes a prefix's
queries again, as SGLang does (``TorchNativeAttnBackend``). The last columns: whether the server takes the one call
there, and the largest difference.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import torch
from timing import time_call
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agent_rl.engine.cpu.cpu_kernels import attend, is_batched_attention_faster

HEADS, KEYS_OF, SIZE, ENTRIES = 4, 2, 64, 65536
CASES = (
    (1, 150, 1), (4, 150, 1), (16, 150, 1), (64, 150, 1), (64, 1000, 1), (1, 400, 30), (16, 150, 20), (64, 150, 20),
)  # fmt: skip
"""Sequences, their mean length (they are evenly spread from two thirds to four thirds of it), new tokens each."""
STORED = (torch.bfloat16, torch.float8_e4m3fn)
ROUNDS = 20


def one_by_one(queries: Tensor, keys: Tensor, values: Tensor, places: Tensor, lengths: Tensor, asked: Tensor) -> Tensor:
    made, count = [], int(asked[0])
    for query, own, length in zip(queries.movedim(0, 1).split(count, 1), places, lengths.tolist(), strict=True):
        rows = query
        if count > 1:
            rows = query.new_zeros(HEADS, length, SIZE)
            rows[:, -count:] = query
        k, v = (part[own[:length]].to(query.dtype).movedim(0, 1)[None] for part in (keys, values))
        out = scaled_dot_product_attention(rows[None], k, v, enable_gqa=True, is_causal=count > 1, scale=0.125)
        made.append(out[0, :, -count:].movedim(1, 0))
    return torch.cat(made)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    drawn = [torch.randn(ENTRIES, KEYS_OF, SIZE) for _ in range(2)]
    print(f"{'stored':>14} {'sequences':>9} {'length':>6} {'new':>4}  one by one  at once  ratio  taken  difference")
    for stored, (batch, length, new) in itertools.product(STORED, CASES):
        keys, values = (part.to(stored) for part in drawn)
        lengths = torch.linspace(2 * length / 3, 4 * length / 3, batch).long() if batch > 1 else torch.tensor([length])
        asked = torch.full((batch,), new)
        places = torch.randint(0, ENTRIES, (batch, int(lengths.max())), dtype=torch.int32)
        queries = torch.randn(batch * new, HEADS, SIZE).bfloat16()
        given = (queries, keys, values, places, lengths, asked)
        ways = (lambda given=given: one_by_one(*given)), (lambda given=given: attend(*given, 0.125))
        found = [way() for way in ways]
        times = [[1e3 * time_call(way, time.thread_time) for way in ways] for _ in range(ROUNDS)]
        slow, fast = (statistics.median(column) for column in zip(*times, strict=True))
        taken = "yes" if is_batched_attention_faster(lengths, asked, HEADS) else "no"
        apart = float((found[0].float() - found[1].float()).abs().max())
        ratio = f"{slow:>8.2f} ms {fast:>5.2f} ms {fast / slow:>5.2f}"
        print(f"{str(stored)[6:]:>14} {batch:>9} {length:>6} {new:>4} {ratio} {taken:>6} {apart:>11.1e}")


if __name__ == "__main__":
    main()
