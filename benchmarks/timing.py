"""How the benchmarks time: calls and awaited work on a clock, the fastest of some rounds, and ratios with intervals."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Clock = Callable[[], float]


def time_call(call: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """Seconds that ``call`` takes on ``clock``."""
    began = clock()
    call()
    return clock() - began


async def time_await(work: Awaitable[object], clock: Clock = time.perf_counter) -> float:
    """Seconds that ``work`` takes on ``clock``."""
    began = clock()
    await work
    return clock() - began


def fastest(calls: Mapping[str, Callable[[], object]], rounds: int = 7) -> dict[str, float]:
    """Seconds of processor time of each call's fastest round; they take turns, so that all meet the same machine."""
    seconds = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name] = min(seconds[name], time_call(call, time.process_time))
    return seconds


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
        import torch

        torch.cuda.synchronize()
