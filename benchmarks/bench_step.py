"""Forward and backward pass of the trainer's model over transformers' Qwen3-MoE, same weights and tokens. Goal: <= 1.

Run: ``OMP_NUM_THREADS=1 python benchmarks/bench_step.py [--rounds 9] [--device cuda]``

4,096 tokens through the quickstart's model, in float32: as 16 sequences of 256 (transformers gets them as a batch
without padding, its best case), as one sequence, and as sequences of uneven lengths, packed in both (transformers is
told where they start by ``position_ids`` and makes a mask of them). Loss: the mean log-prob of every token given those
before it. Ours includes what training needs besides: accumulation into Megatron's gradient buffers in float32.

The two take turns in random order; the ratio is the median over rounds, with a 95 % bootstrap interval. Processor time
(user and system, all threads) is given beside the wall clock: a busy machine moves it less. With ``--peak-tflops`` also
MFU: the FLOPs of :mod:`agent_rl.train.batching.cost`, three times (forward, and twice for backward), a second over
the peak.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from one_rank import QUICKSTART, arguments, one_rank, policy
from timing import interleaved, median, ratio
from torch import Tensor

from agent_rl.train.batching.cost import sequence_cost

TOKENS = 4096
UNEVEN = (1500, 900, 600, 400, 300, 200, 130, 66)
CASES: dict[str, tuple[int, ...]] = {"16 x 256": (256,) * 16, "1 x 4096": (TOKENS,), "uneven": UNEVEN}


def ours(model: Any, sequences: list[Tensor]) -> Callable[[], None]:
    from agent_rl.train.megatron.packed_batch import PackedBatch

    batch, count = PackedBatch.from_sequences(sequences), sum(len(s) - 1 for s in sequences)

    def step() -> None:
        model.train_microbatches([batch], None, lambda got, _entropy, _batch: (-got.sum() / count, {}), entropy=False)

    return step


def theirs(model: Any, sequences: list[Tensor], device: torch.device) -> Callable[[], None]:
    even = len({len(s) for s in sequences}) == 1
    rows = torch.stack(sequences) if even else torch.cat(sequences)[None]
    positions = None if even else torch.cat([torch.arange(len(s)) for s in sequences])[None].to(device)
    targets = torch.cat([s.roll(-1) for s in sequences]).to(device)
    ends = torch.tensor([len(s) for s in sequences]).cumsum(0) - 1
    kept = torch.ones(len(targets), dtype=torch.bool)
    kept[ends] = False
    kept, rows = kept.to(device), rows.to(device)

    def step() -> None:
        model.zero_grad()
        logits = model(rows, position_ids=positions, use_cache=False).logits.flatten(0, 1)[kept]
        torch.nn.functional.cross_entropy(logits.float(), targets[kept]).backward()

    return step


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--peak-tflops", type=float, help="the GPU's peak, for MFU")
    options = parser.parse_args()
    with one_rank(options.device) as device:
        reference, model = policy(device, QUICKSTART, dtype=getattr(torch, options.dtype))
        print(f"threads {torch.get_num_threads()}, rounds {options.rounds}, {options.dtype} on {options.device}")
        for name, lengths in CASES.items():
            draw = torch.Generator().manual_seed(0)
            sequences = [torch.randint(0, QUICKSTART["vocab_size"], (n,), generator=draw) for n in lengths]
            calls = {"ours": ours(model, sequences), "transformers": theirs(reference, sequences, device)}
            times = interleaved(calls, device, rounds=options.rounds)
            found = {clock: ratio(times, "ours", "transformers", clock) for clock in ("processor", "wall")}
            speed = {who: sum(lengths) / median(spent, "processor") for who, spent in times.items()}
            print(
                f"{name:9} ours over transformers: processor time {found['processor']}, wall {found['wall']}; "
                f"tokens a processor second: ours {speed['ours']:,.0f}, transformers {speed['transformers']:,.0f}",
                flush=True,
            )
            if options.peak_tflops:
                flops = 3 * sum(sequence_cost(model.model_spec).of(lengths))
                print(f"{'':9} MFU {flops / median(times['ours'], 'wall') / options.peak_tflops / 1e12:.1%}")


if __name__ == "__main__":
    main()
