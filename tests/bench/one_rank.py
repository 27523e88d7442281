"""What the trainer's benchmarks share: a world of one Megatron rank, random Qwen3-MoE checkpoints, fair timing."""

from __future__ import annotations

import argparse
import contextlib
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from agent_rl.config import ParallelConfig
from agent_rl.demo_model import init
from agent_rl.train.megatron.parallel import destroy_parallel, init_parallel

SHAPES: dict[str, dict[str, Any]] = {name: asdict(sizes) for name, sizes in init.SHAPES.items()}
"""Sizes of the starting models by name, as transformers' configs have them."""
QUICKSTART = SHAPES["tiny"]
"""The quickstart's model, 2.1 M parameters."""


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with ``--device``; the rest is the caller's."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return parser


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def world(parallel: ParallelConfig, rank: int, port: int, device: str) -> Iterator[torch.device]:
    """A Megatron world, as its ``rank``; every rank's process must enter."""
    place = torch.device(device)
    init_parallel(parallel, rank, master_addr="127.0.0.1", master_port=port, device=place)
    try:
        yield place
    finally:
        destroy_parallel()


def one_rank(device: str) -> contextlib.AbstractContextManager[torch.device]:
    """A Megatron world of this process alone."""
    return world(ParallelConfig(), 0, free_port(), device)


def policy(
    device: torch.device, shape: Mapping[str, Any], parallel: ParallelConfig | None = None, **options: Any
) -> tuple[Any, Any]:
    """A random Qwen3-MoE of ``shape`` as transformers makes it, and the trainer's own model with the same weights.

    ``options`` are those of ``PolicyModel.build``.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from agent_rl.train.megatron.model import PolicyModel

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **{"norm_topk_prob": True, "tie_word_embeddings": True, "max_position_embeddings": 1 << 17, **shape}
    )
    reference = Qwen3MoeForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        model = PolicyModel.build(Path(folder), parallel or ParallelConfig(), device=device, **options)
    return reference.to(device=device, dtype=options.get("dtype", torch.float32)), model


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one call: of the wall clock, and of the processor (all threads of this process, user and system)."""

    wall: float
    processor: float


def timed(call: Callable[[], Any], device: torch.device) -> Times:
    """How long ``call`` takes. On a GPU its work is waited for."""
    _wait(device)
    wall, processor = time.perf_counter(), time.process_time()
    call()
    _wait(device)
    return Times(time.perf_counter() - wall, time.process_time() - processor)


def interleaved(
    calls: Mapping[str, Callable[[], Any]], device: torch.device, *, rounds: int, warmup: int = 1
) -> dict[str, list[Times]]:
    """Every call once a round, each round in a new order, so that other load on the machine falls on all alike."""
    for _ in range(warmup):
        for call in calls.values():
            call()
    times: dict[str, list[Times]] = {name: [] for name in calls}
    order, shuffle = list(calls), random.Random(0)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            times[name].append(timed(calls[name], device))
    return times


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of one figure a round, and a 95 % bootstrap interval of that median."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(rounds: Sequence[float]) -> Ratio:
        draw = random.Random(0)
        medians = sorted(statistics.median(draw.choices(rounds, k=len(rounds))) for _ in range(2000))
        return Ratio(statistics.median(rounds), medians[50], medians[-51])

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def percent(self) -> str:
        return f"{self.median:.3%} [{self.low:.3%}, {self.high:.3%}]"


def ratio(times: Mapping[str, Sequence[Times]], over: str, under: str, clock: str) -> Ratio:
    """``over``'s time by ``under``'s, round by round; ``clock`` is ``wall`` or ``processor``."""
    return Ratio.of([getattr(a, clock) / getattr(b, clock) for a, b in zip(times[over], times[under], strict=True)])


def median(times: Sequence[Times], clock: str) -> float:
    return statistics.median(getattr(one, clock) for one in times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
