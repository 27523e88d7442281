"""Step time of the Megatron trainer with routing replay over without. Goal: at most 1.01 at 4,096 tokens.

Run: ``OMP_NUM_THREADS=1 python benchmarks/bench_replay.py [--rounds 20] [--tokens 4096] [--shape paper]``

A step is an old-log-prob pass and a forward and backward pass over one packed micro-batch of 4,096 and of 8,192 tokens,
in sequences of 256, at the size of the quickstart's model, or of another shape (``--shape paper``: 128 experts, top-8,
8 layers). The routes are the model's own, so both kinds of step do the same work in the experts. They take turns in
random order; the ratio is the median over rounds, with a 95 % bootstrap interval. Processor time (user and system, all
threads) is given beside the wall clock: a busy machine moves it less. Last, from a profile of a few steps: the share of
the processor time that goes to preparing micro-batches (with replay: cutting, checking and moving routes) and to
choosing experts (with replay: taking the given ones).
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from one_rank import SHAPES, arguments, one_rank, policy
from timing import interleaved, median, ratio

SEQUENCE = 256


def step(model: Any, batch: Any, routes: Any) -> None:
    model.forward_logprobs([batch], [routes], entropy=True)
    model.train_microbatches([batch], [routes], lambda logprobs, _entropy, _batch: (-logprobs.mean(), {}))


def calls_of(model: Any, tokens: int) -> dict[str, Callable[[], None]]:
    from agent_rl.train.megatron.packed_batch import PackedBatch, PackedRoutes

    draw = torch.Generator().manual_seed(0)
    sequences = [
        torch.randint(0, model.model_spec.vocab_size, (SEQUENCE,), generator=draw) for _ in range(tokens // SEQUENCE)
    ]
    batch = PackedBatch.from_sequences(sequences)
    native = model.forward_logprobs([batch], None, record=True)[0].routes
    given = PackedRoutes(native.to(torch.uint8), torch.ones(len(batch), dtype=torch.bool))
    return {"without": partial(step, model, batch, None), "with": partial(step, model, batch, given)}


def shares(call: Callable[[], None], steps: int = 5) -> str:
    """The shares of processor time under the two functions where replay works."""
    profiler, started = cProfile.Profile(time.process_time), time.process_time()
    with profiler:
        for _ in range(steps):
            call()
    total = time.process_time() - started
    rows = pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
    cumulative = {name: row[3] for (_, _, name), row in rows}
    return ", ".join(
        f"{label} {cumulative[name] / total:.2%}"
        for label, name in (("prepare", "_prepare"), ("choose", "get_replay_topk"))
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    options = parser.parse_args()
    with one_rank(options.device) as device:
        model = policy(device, SHAPES[options.shape])[1]
        print(f"threads {torch.get_num_threads()}, rounds {options.rounds}, on {options.device}")
        for tokens in options.tokens:
            calls = calls_of(model, tokens)
            times = interleaved(calls, device, rounds=options.rounds)
            found = {clock: ratio(times, "with", "without", clock) for clock in ("processor", "wall")}
            print(
                f"{tokens} tokens: replay over without: processor time {found['processor']} (goal <= 1.01), wall "
                f"{found['wall']}; a step {median(times['with'], 'processor'):.2f} s of processor time",
                flush=True,
            )
        for kind, call in calls.items():
            print(f"{kind:>8} replay, share of processor time: {shares(call)}")


if __name__ == "__main__":
    main()
