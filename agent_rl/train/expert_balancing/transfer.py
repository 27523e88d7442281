"""The interface behind which borrowed experts and their gradients move between ranks. Import only in rank processes.

A plan (:class:`r3.balance.LayerPlan`) lends experts for one micro-batch of one layer. The owner rank keeps parameters,
gradients and optimizer state. A borrower fetches the weights for the product and returns its share of the gradient.
Two implementations: :class:`~agent_rl.train.expert_balancing.exchange.Exchange` (rank to rank) and
:class:`~agent_rl.train.expert_balancing.host_pool.HostPool` (shared host memory).
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

from r3.balance import LayerPlan


class ExpertWeights(Protocol):
    """The experts of one layer that this rank owns (:class:`~agent_rl.train.megatron.moe.Experts`):
    ``weight1 [N, 2 I, H]`` and ``weight2 [N, H, I]``, each with Megatron's float32 ``main_grad`` of the same shape."""

    weight1: torch.nn.Parameter
    weight2: torch.nn.Parameter


class Transfer(Protocol):
    """Lends experts within the expert group, outside autograd.

    ``layer`` is the layer's number in the whole model. All ranks of the group call all methods in the same order with
    the same plans, also a rank that borrows and lends nothing. :meth:`fetch` and :meth:`return_gradients` cover the
    ``live`` borrowed slots of this rank (those with an expert), in the order of the slots.
    """

    def prefetch(self, layer: int, plan: LayerPlan) -> None:
        """Start the :meth:`fetch` of the same layer and plan. The weights must not change in between."""

    def fetch(self, layer: int, plan: LayerPlan) -> tuple[Tensor, Tensor]:
        """Returns copies of the borrowed experts' ``weight1 [live, 2 I, H]`` and ``weight2 [live, H, I]``."""

    def return_gradients(self, layer: int, plan: LayerPlan, grad1: Tensor, grad2: Tensor) -> None:
        """Add this micro-batch's share of the borrowed experts' gradients (shapes as :meth:`fetch`, one float type on
        all ranks) to ``main_grad`` on their owner ranks. Call once per micro-batch, before gradients are reduced."""

    def refresh(self) -> None:
        """Call after every change of the weights (update, load, swap with the reference), before the next fetch."""

    def take_stats(self) -> TransferStats:
        """Returns what this rank moved since the last call."""

    def close(self) -> None:
        """Release memory and communicators. Idempotent."""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """``fetched``: bytes of weights received into this rank's borrowed slots. ``returned``: bytes of gradients sent to
    owner ranks. ``exposed_ms``: time that computation waited for either. ``refresh_ms``: time in
    :meth:`Transfer.refresh`."""

    fetched: int = 0
    returned: int = 0
    exposed_ms: float = 0.0
    refresh_ms: float = 0.0

    def __add__(self, other: TransferStats) -> TransferStats:
        return TransferStats(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class Loan:
    """One expert lent by a plan: parameter slot ``slot`` of rank ``owner`` goes to the ``live_slot``-th occupied
    borrowed slot of rank ``borrower``. Ranks are those of the expert group."""

    owner: int
    slot: int
    borrower: int
    live_slot: int


def loans(plan: LayerPlan) -> list[Loan]:
    """Returns all loans of a plan, ordered by borrower and live slot: the same list on every rank."""
    parameter_slots = np.argsort(plan.layout.placement)
    result = []
    for borrower, slots in enumerate(plan.borrowed):
        for live_slot, parameter_slot in enumerate(parameter_slots[slots[slots >= 0]].tolist()):
            owner, slot = divmod(parameter_slot, plan.layout.experts_per_rank)
            result.append(Loan(owner, slot, borrower, live_slot))
    return result


class TransferCounters:
    """Sums of :class:`TransferStats`. ``device``: the device of the weights."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._stats = TransferStats()

    @classmethod
    def for_layers(cls, layers: Mapping[int, ExpertWeights]) -> TransferCounters:
        """Counters for these experts; a pipeline stage may have none."""
        return cls(next((experts.weight1.device for experts in layers.values()), torch.device("cpu")))

    def add(self, amounts: TransferStats) -> None:
        """Add ``amounts`` to the sums."""
        self._stats += amounts

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Add the duration of the block to ``exposed_ms``: on a GPU the time of its stream, on a CPU of the process."""
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
        """Returns the sums since the last call."""
        for begin, end in self._events:
            end.synchronize()
            self.add(TransferStats(exposed_ms=begin.elapsed_time(end)))
        self._events.clear()
        stats, self._stats = self._stats, TransferStats()
        return stats


@dataclass(frozen=True, slots=True, eq=False)
class PendingFetch:
    """Borrowed weights in transfer. ``wait`` returns when they have arrived; on a GPU it makes the stream wait."""

    weights: tuple[Tensor, Tensor]
    wait: Callable[[], None]


class Prefetcher:
    """Fetches that were started before their use, by layer and borrowed experts. ``start`` starts one; with
    ``enabled`` False every fetch starts when it is needed."""

    def __init__(
        self, start: Callable[[int, LayerPlan], PendingFetch], counts: TransferCounters, *, enabled: bool
    ) -> None:
        self._start, self._counters, self._enabled = start, counts, enabled
        self._pending: dict[tuple[int, bytes], PendingFetch] = {}

    def prefetch(self, layer: int, plan: LayerPlan) -> None:
        """Start the fetch unless it was started already."""
        key = (layer, plan.borrowed.tobytes())
        if self._enabled and key not in self._pending:
            self._pending[key] = self._start_counted(layer, plan)

    def fetch(self, layer: int, plan: LayerPlan) -> tuple[Tensor, Tensor]:
        """Returns the weights after they have arrived."""
        with self._counters.exposed():
            pending = self._pending.pop((layer, plan.borrowed.tobytes()), None) or self._start_counted(layer, plan)
            pending.wait()
        return pending.weights

    @torch.no_grad()
    def _start_counted(self, layer: int, plan: LayerPlan) -> PendingFetch:
        pending = self._start(layer, plan)
        self._counters.add(TransferStats(fetched=sum(weight.nbytes for weight in pending.weights)))
        return pending

    def drop(self) -> None:
        """Wait for the fetches that nobody used and discard them."""
        for pending in self._pending.values():
            pending.wait()
        self._pending.clear()
