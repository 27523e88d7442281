"""What ``monitoring.token_detail`` costs a training step, and the bytes it keeps. Goals: 1 % of a step; 10 bytes a
sampled token and 2 bytes a token.

Run: ``OMP_NUM_THREADS=1 python benchmarks/bench_token_detail.py [--rounds 100] [--tokens 8192] [--device cuda]``

A step is a rank's whole share (old log-probs, the pass without replay, the update) of trajectories of 512 tokens, a
quarter of them sampled, at the size of the quickstart's model, with the routes of a model whose weights differ a
little; then the driver's counting; with detail also putting it together by sample and writing its file. It is measured
in two ways:

- directly: what detail adds is run again and again on what one step gave it. That is, on the rank: the loss function
  with detail less the same without, the tensors put together, and their way to the driver (pickled and read again); on
  the driver: its part of a step with detail less that without. Processor time (on a GPU wall time), as shares of a step
  without.
- as a whole: steps with and without take turns in random order. Its interval holds whatever else could become slower,
  and all noise of two steps.

Both are medians over rounds with a 95 % bootstrap interval.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from one_rank import QUICKSTART, arguments, one_rank, policy
from timing import Ratio, interleaved, median, ratio

from agent_rl.config import RunConfig
from agent_rl.rollout.token_details import details_path, worst, write_details
from agent_rl.train.batching.partition import split_step
from agent_rl.train.requests import OptimizerSpec, StepRequest
from agent_rl.train.route_sharding import WorkerInfo, count_all_differing, shard_routes
from agent_rl.train.step_metrics import RouteDifferenceBits, token_details
from agent_rl.types import Group, Sample, StopReason, Trajectory
from r3.routing import Routing

LENGTH = 512


def build_samples(model: Any, count: int) -> list[Sample]:
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

    def __init__(self, model: Any, samples: list[Sample], device: str, directory: Path) -> None:
        from agent_rl.train.optimizer import PolicyOptimizer

        train = {"device": device, "lr": 1e-9, "microbatch_tokens": 4096}
        self.config = RunConfig.model_validate({"name": "bench", "model": "none", "train": train})
        self.optimizer = PolicyOptimizer(model.chunks, OptimizerSpec(lr=0.0), torch.float32)
        self.model, self.samples, self.stem = model, samples, directory / "step-000001"
        (self.shares,) = split_step(samples, mini_steps=1, budget=4096, ranks=1)
        self.batches = [[ids for share in self.shares for ids in share.micro_batches]]
        self.shards = [shard_routes(samples, ids, model.shard) for ids in self.batches[0]]
        self.infos = [WorkerInfo(0, 0, 1, True, model.shard, len(model.shard.columns))]
        self.group = Group("t", tuple(_trajectory(sample) for sample in samples))

    def __call__(self, detail: bool) -> None:
        from agent_rl.train.step import grpo_step

        order = StepRequest(self.config, measure_without_replay=True, detail=detail)
        named = dict(enumerate(self.samples))
        self.answer = grpo_step(self.model, self.optimizer, named, self.shares, self.shards, order)
        self.drive(detail)

    def drive(self, detail: bool) -> None:
        """What the driver makes of the rank's answer."""
        report, differs = self.answer
        if not detail:
            count_all_differing(self.samples, self.batches, self.infos, [differs])
            return
        bits = RouteDifferenceBits(self.samples), RouteDifferenceBits(self.samples)
        count_all_differing(self.samples, self.batches, self.infos, [differs], *(part.take for part in bits))
        details = token_details(self.samples, self.batches, {0: report}, *bits)
        write_details(self.stem, {(number, 0): own for number, own in details.items()}, [self.group])
        for own in details.values():  # for the index of trajectories
            worst(own.gap), worst(own.gap_without_replay)


def _trajectory(sample: Sample) -> Trajectory:
    return Trajectory(
        "t", "e", sample.tokens, sample.loss_mask, sample.logprobs, sample.routing, StopReason.SUBMITTED, 1.0, True,
        (), (), (),
    )  # fmt: skip


class Added:
    """What detail adds to a rank's share of a step, on what a step gave it."""

    def __init__(self, step: Step) -> None:
        self._losses: list[tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = []
        with self._recording(), patch("agent_rl.train.step._sampled_tokens", wraps=_sampled_tokens()) as gathered:
            step(True)
        self._gathered, self._sampled = gathered.call_args.args, step.answer[0].sampled

    def loss(self, detail: bool) -> None:
        """The loss of every micro-batch."""
        for plain, detailed, args in self._losses:
            (detailed if detail else plain)(*args)

    def gather(self) -> None:
        """One array of all micro-batches, and its way to the driver."""
        _sampled_tokens()(*self._gathered)
        pickle.loads(pickle.dumps(self._sampled, protocol=5))

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """While it lasts, the arguments of every call of a loss function are kept."""
        from agent_rl.train.step import grpo_loss

        def recorded(config: Any, share: Any, *, detail: bool) -> Callable[..., Any]:
            both = tuple(grpo_loss(config, share, detail=with_it) for with_it in (False, True))

            def loss(*args: Any) -> Any:
                self._losses.append((*both, args))
                return both[detail](*args)

            return loss

        with patch("agent_rl.train.step.grpo_loss", recorded):
            yield


def _sampled_tokens() -> Callable[..., Any]:
    from agent_rl.train import step

    return step._sampled_tokens


TIMES = 20


def repeated(call: Callable[..., None], *args: bool) -> None:
    for _ in range(TIMES):
        call(*args)


def added(step: Step, device: torch.device, rounds: int, clock: str, whole: float) -> dict[str, Ratio]:
    """What detail adds on the rank, on the driver and in all, as shares of a step of ``whole`` seconds without."""
    own = Added(step)
    calls = {
        "loss": partial(repeated, own.loss, True), "plain loss": partial(repeated, own.loss, False),
        "gather": partial(repeated, own.gather),
        "drive": partial(repeated, step.drive, True), "plain drive": partial(repeated, step.drive, False),
    }  # fmt: skip
    times = interleaved(calls, device, rounds=rounds)
    spent = {name: np.array([getattr(one, clock) for one in times[name]]) / TIMES / whole for name in calls}
    rank = spent["loss"] - spent["plain loss"] + spent["gather"]
    driver = spent["drive"] - spent["plain drive"]
    parts = {"rank": rank, "driver": driver, "both": rank + driver}
    return {name: Ratio.of(part.tolist()) for name, part in parts.items()}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()
    with one_rank(options.device) as device, tempfile.TemporaryDirectory() as directory:
        model = policy(device, QUICKSTART)[1]
        step = Step(model, build_samples(model, options.tokens // LENGTH), options.device, Path(directory))
        calls = {"without": partial(step, False), "with": partial(step, True)}
        times = interleaved(calls, device, rounds=options.rounds)
        clock = "processor" if options.device == "cpu" else "wall"
        whole = median(times["without"], clock)
        parts = added(step, device, options.rounds, clock, whole)
        print(f"threads {torch.get_num_threads()}, rounds {options.rounds}, on {options.device}")
        print(f"{options.tokens} tokens, a step of {whole:.2f} s ({clock} time); detail adds (goal: at most 1 %)")
        print("directly: " + ", ".join(f"{name} {part.percent()}" for name, part in parts.items()))
        for clock in ("processor", "wall"):
            print(f"as a whole, {clock} time of a step with over one without: {ratio(times, 'with', 'without', clock)}")
        size, sampled = details_path(step.stem).stat().st_size, sum(int(s.loss_mask.sum()) for s in step.samples)
        print(f"{size} bytes; the goal allows {10 * sampled + 2 * options.tokens}")


if __name__ == "__main__":
    main()
