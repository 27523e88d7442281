"""What moves between ranks where experts are borrowed, and the seam behind which it moves. Import only in rank
processes.

A plan (:class:`r3.balance.Plan`) lends experts for one micro-batch of one layer. The home rank keeps parameters,
gradients and optimizer state; a borrower gets the weights for the product and sends its share of the gradient back.
:class:`~agent_rl.train.expert_balancing.exchange.Exchange` and
:class:`~agent_rl.train.expert_balancing.host_pool.Pool` move them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from r3.balance import Plan


class ExpertWeights(Protocol):
    """A layer's home experts on this rank (:class:`~agent_rl.train.megatron.moe.Experts`): ``weight1 [N, 2 I, H]``
    and ``weight2 [N, H, I]``, each with Megatron's float32 ``main_grad`` of the same shape."""

    weight1: torch.nn.Parameter
    weight2: torch.nn.Parameter


class Transfer(Protocol):
    """Lends experts over the expert group, outside autograd.

    ``layer`` is the layer's number in the whole model. All ranks of the group call all methods in the same order with
    the same plans, also a rank that borrows and lends nothing. The experts of ``fetch`` and ``give_back`` are this
    rank's borrowed slots that hold one (live), in the order of the slots.
    """

    def prefetch(self, layer: int, plan: Plan) -> None:
        """Begin what :meth:`fetch` of the same layer and plan will return. The weights must not change in between."""

    def fetch(self, layer: int, plan: Plan) -> tuple[Tensor, Tensor]:
        """The borrowed experts' ``weight1 [live, 2 I, H]`` and ``weight2 [live, H, I]``, the caller's own copies."""

    def give_back(self, layer: int, plan: Plan, grad1: Tensor, grad2: Tensor) -> None:
        """Add this micro-batch's share of the borrowed experts' gradients (shapes as :meth:`fetch`, one float type on
        all ranks) to ``main_grad`` at their homes. Once a micro-batch, before its gradients are reduced."""

    def refresh(self) -> None:
        """After every change of the weights (update, load, exchange for the reference's), before the next fetch."""

    def take_stats(self) -> TransferStats:
        """What was moved since the last call, by this rank."""

    def close(self) -> None:
        """Let go of memory and communicators. Idempotent."""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """``fetched``: bytes of weights that came to this rank's borrowed slots; ``returned``: bytes of gradients that it
    sent home; ``exposed_ms``: time that it waited for either; ``refresh_ms``: time in :meth:`Transfer.refresh`."""

    fetched: int = 0
    returned: int = 0
    exposed_ms: float = 0.0
    refresh_ms: float = 0.0

    def __add__(self, other: TransferStats) -> TransferStats:
        """The sums."""
        return TransferStats(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class Loan:
    """One expert lent by a plan: ``slot`` of its ``home`` rank to ``place`` among the ``borrower``'s live slots. Ranks
    count in the expert group."""

    home: int
    slot: int
    borrower: int
    place: int


def loans(plan: Plan) -> list[Loan]:
    """All loans of a plan, by borrower and place: the same list on every rank."""
    home_slot = np.argsort(plan.grid.home)
    found = []
    for borrower, slots in enumerate(plan.borrowed):
        for place, at in enumerate(home_slot[slots[slots >= 0]].tolist()):
            home, slot = divmod(at, plan.grid.homes)
            found.append(Loan(home, slot, borrower, place))
    return found


class Counters:
    """Adds up a :class:`TransferStats`. ``device``: where the weights are."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._stats = TransferStats()

    @classmethod
    def of(cls, layers: Mapping[int, ExpertWeights]) -> Counters:
        """For these experts; a pipeline stage may have none."""
        return cls(next((experts.weight1.device for experts in layers.values()), torch.device("cpu")))

    def add(self, amounts: TransferStats) -> None:
        """Add these to the sums."""
        self._stats += amounts

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Time what the block makes the computation wait for: on a GPU its stream, not the host."""
        if not self._cuda:
            started = time.perf_counter()
            yield
            return self.add(TransferStats(exposed_ms=1e3 * (time.perf_counter() - started)))
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))

    def take(self) -> TransferStats:
        """The sums since the last call."""
        for begin, end in self._events:
            end.synchronize()
            self.add(TransferStats(exposed_ms=begin.elapsed_time(end)))
        self._events.clear()
        found, self._stats = self._stats, TransferStats()
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Coming:
    """Borrowed weights on their way. ``wait`` returns when they are there; on a GPU it makes the stream wait."""

    weights: tuple[Tensor, Tensor]
    wait: Callable[[], None]


class Ahead:
    """Fetches that were begun before they are needed, by layer and borrowed experts; none where not ``enabled``.
    ``begin`` begins one."""

    def __init__(self, begin: Callable[[int, Plan], Coming], counters: Counters, *, enabled: bool) -> None:
        self._begin, self._counters, self._enabled = begin, counters, enabled
        self._coming: dict[tuple[int, bytes], Coming] = {}

    def prefetch(self, layer: int, plan: Plan) -> None:
        """Begin, unless that was done already."""
        key = (layer, plan.borrowed.tobytes())
        if self._enabled and key not in self._coming:
            self._coming[key] = self._started(layer, plan)

    def fetch(self, layer: int, plan: Plan) -> tuple[Tensor, Tensor]:
        """The weights, when they are there."""
        with self._counters.exposed():
            coming = self._coming.pop((layer, plan.borrowed.tobytes()), None) or self._started(layer, plan)
            coming.wait()
        return coming.weights

    @torch.no_grad()
    def _started(self, layer: int, plan: Plan) -> Coming:
        coming = self._begin(layer, plan)
        self._counters.add(TransferStats(fetched=sum(weight.nbytes for weight in coming.weights)))
        return coming

    def drop(self) -> None:
        """Forget what was not fetched, when it is there."""
        for coming in self._coming.values():
            coming.wait()
        self._coming.clear()
