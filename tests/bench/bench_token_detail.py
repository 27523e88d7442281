"""A training step with ``observe.token_detail`` over one without, and the bytes it keeps. Goals: 1.01; 10 bytes a
sampled token and 2 bytes a token.

Run: ``OMP_NUM_THREADS=1 python tests/bench/bench_token_detail.py [--rounds 12] [--tokens 8192] [--device cuda]``

A step is a rank's whole share (old log-probs, the pass without replay, the update) of trajectories of 512 tokens, a
quarter of them sampled, at the size of the quickstart's model, with the routes of a model whose weights differ a
little; then the driver's counting; with detail also putting it together by sample and writing its file. Both kinds take
turns in random order; the ratio is the median over rounds, with a 95 % bootstrap interval. The driver's part
of detail is timed besides, as its share of a step without: it is what the ratio's noise would hide.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from one_rank import QUICKSTART, arguments, interleaved, median, one_rank, policy, ratio

from agent_rl.config import RunConfig
from agent_rl.rollout.token_details import details_path, write_details
from agent_rl.train.batching.mini_steps import split_step
from agent_rl.train.orders import OptimizerSpec, StepOrder
from agent_rl.train.route_shares import RankInfo, count_all_differing, cut
from agent_rl.train.token_detail import LayerBits, token_details
from agent_rl.types import Group, Sample, StopReason, Trajectory
from r3.routing import Routing

LENGTH = 512


def samples_of(model: Any, count: int) -> list[Sample]:
    """Trajectories with routes of which one router in a hundred is not the model's own choice."""
    from agent_rl.train.megatron.packed_batch import PackedBatch

    random, draw = np.random.default_rng(0), torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, QUICKSTART["vocab_size"], (LENGTH,), generator=draw) for _ in range(count)]
    samples = []
    for tokens in sequences:
        output = model.forward_logprobs([PackedBatch.from_sequences([tokens])], None, record=True)[0]
        experts = output.routes.to(torch.uint8).numpy()
        other = random.random(experts.shape[:2]) < 0.01
        experts[other] = (experts[other] + 1) % QUICKSTART["num_experts"]
        mask = np.arange(LENGTH) % 64 >= 48
        logprobs = np.where(mask, output.logprobs.cpu().numpy() + random.normal(0, 0.01, LENGTH), 0).astype(np.float32)
        routing = Routing(experts, np.arange(LENGTH) < LENGTH - 1, (), QUICKSTART["num_experts"])
        samples.append(Sample(tokens.numpy().astype(np.int32), mask, logprobs, 1.0, routing))
    return samples


class Step:
    """One step of one rank and its driver, with detail or without."""

    def __init__(self, model: Any, samples: list[Sample], device: str, folder: Path) -> None:
        from agent_rl.train.optimizer import PolicyOptimizer

        train = {"device": device, "lr": 1e-9, "microbatch_tokens": 4096}
        self.config = RunConfig.model_validate({"name": "bench", "model": "none", "train": train})
        self.optimizer = PolicyOptimizer(model.chunks, OptimizerSpec(lr=0.0), torch.float32)
        self.model, self.samples, self.stem = model, samples, folder / "step-000001"
        (self.shares,) = split_step(samples, mini_steps=1, budget=4096, ranks=1)
        self.batches = [[ids for share in self.shares for ids in share.micro_batches]]
        self.shards = [cut(samples, ids, model.shard) for ids in self.batches[0]]
        self.infos = [RankInfo(0, 0, 1, True, model.shard, len(model.shard.columns))]
        self.group = Group("t", tuple(_trajectory(sample) for sample in samples))

    def __call__(self, detail: bool) -> None:
        from agent_rl.train.step import grpo_step

        order = StepOrder(self.config, measure_native=True, detail=detail)
        named = dict(enumerate(self.samples))
        self.answer = grpo_step(self.model, self.optimizer, named, self.shares, self.shards, order)
        self.drive(detail)

    def drive(self, detail: bool) -> None:
        """What the driver makes of the rank's answer."""
        report, differs = self.answer
        if not detail:
            count_all_differing(self.samples, self.batches, self.infos, [differs])
            return
        bits = LayerBits(self.samples), LayerBits(self.samples)
        count_all_differing(self.samples, self.batches, self.infos, [differs], *(part.take for part in bits))
        details = token_details(self.samples, self.batches, {0: report}, *bits)
        write_details(self.stem, {(number, 0): own for number, own in details.items()}, [self.group])


def _trajectory(sample: Sample) -> Trajectory:
    return Trajectory(
        "t", "e", sample.tokens, sample.loss_mask, sample.logprobs, sample.routing, StopReason.SUBMITTED, 1.0, True,
        (), (), (),
    )  # fmt: skip


def spent(call: Callable[[], None], times: int = 20) -> float:
    """Seconds of processor time that a call takes."""
    started = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - started) / times


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()
    with one_rank(options.device) as device, tempfile.TemporaryDirectory() as folder:
        model = policy(device, QUICKSTART)[1]
        step = Step(model, samples_of(model, options.tokens // LENGTH), options.device, Path(folder))
        calls = {"without": partial(step, False), "with": partial(step, True)}
        times = interleaved(calls, device, rounds=options.rounds)
        found = {clock: ratio(times, "with", "without", clock) for clock in ("processor", "wall")}
        whole = median(times["without"], "processor")
        step(True)
        more = spent(partial(step.drive, True)) - spent(partial(step.drive, False))
        print(f"threads {torch.get_num_threads()}, rounds {options.rounds}, on {options.device}")
        print(
            f"{options.tokens} tokens: detail over none: processor time {found['processor']} (goal <= 1.01), wall "
            f"{found['wall']}; a step {whole:.2f} s; the driver's part of detail {more / whole:.2%} of it"
        )
        size, sampled = details_path(step.stem).stat().st_size, sum(int(s.loss_mask.sum()) for s in step.samples)
        print(f"{size} bytes; the goal allows {10 * sampled + 2 * options.tokens}")


if __name__ == "__main__":
    main()
