"""Sends borrowed experts from rank to rank and their gradients back: an all-to-all on a separate communicator.

An expert's weights are contiguous in the owner's parameter and in the borrower's buffer. Each is sent and received
without packing: the exchange is a batch of sends and receives, like NCCL's all-to-all, and allocates only the borrowed
experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from agent_rl.train.expert_balancing.transfer import (
    ExpertWeights,
    Loan,
    PendingFetch,
    Prefetcher,
    TransferCounters,
    TransferStats,
    loans,
)
from r3.balance import ExpertLayout, LayerPlan


class Exchange:
    """A :class:`~agent_rl.train.expert_balancing.transfer.Transfer` directly between ranks.

    ``layers``: the experts that this rank owns, by layer number. ``ranks``: the global ranks of the expert group, in
    its order. ``prefetch`` False starts every fetch when it is needed. ``timeout``: seconds that a rank waits for
    another. All ranks of the world construct theirs together.
    """

    def __init__(
        self,
        layers: Mapping[int, ExpertWeights],
        layout: ExpertLayout,
        ranks: Sequence[int],
        *,
        prefetch: bool = True,
        timeout: float = 600.0,
    ) -> None:
        self._layers, self._layout, self._ranks = layers, layout, list(ranks)
        self._rank = self._ranks.index(dist.get_rank())
        self._group: Any = communicator(self._ranks, timeout)
        self._counters = TransferCounters.for_layers(layers)
        self._prefetcher = Prefetcher(self._start, self._counters, enabled=prefetch)

    def prefetch(self, layer: int, plan: LayerPlan) -> None:
        """See :class:`Transfer`."""
        self._prefetcher.prefetch(layer, plan)

    def fetch(self, layer: int, plan: LayerPlan) -> tuple[Tensor, Tensor]:
        """See :class:`Transfer`."""
        return self._prefetcher.fetch(layer, plan)

    def _start(self, layer: int, plan: LayerPlan) -> PendingFetch:
        """Start to send what this rank lends and to receive what it borrows."""
        all_loans, experts = loans(plan), self._layers[layer]
        live = sum(loan.borrower == self._rank for loan in all_loans)
        weights = experts.weight1.detach(), experts.weight2.detach()
        buffers = tuple(weight.new_empty(live, *weight.shape[1:]) for weight in weights)
        operations = []
        for loan in all_loans:
            for weight, buffer in zip(weights, buffers, strict=True):
                if loan.owner == self._rank:
                    operations.append(self._send(weight[loan.slot], loan.borrower))
                elif loan.borrower == self._rank:
                    operations.append(self._receive(buffer[loan.live_slot], loan.owner))
        return PendingFetch((buffers[0], buffers[1]), partial(wait, start(operations)))

    @torch.no_grad()
    def return_gradients(self, layer: int, plan: LayerPlan, grad1: Tensor, grad2: Tensor) -> None:
        """See :class:`Transfer`."""
        with self._counters.exposed():
            for round_loans in _rounds(loans(plan), self._layout.slots):
                self._return_round(layer, round_loans, (grad1.contiguous(), grad2.contiguous()))

    def _return_round(self, layer: int, round_loans: Sequence[Loan], gradients: tuple[Tensor, Tensor]) -> None:
        experts, operations, received = self._layers[layer], [], []
        for loan in round_loans:
            for weight, gradient in zip((experts.weight1, experts.weight2), gradients, strict=True):
                if loan.borrower == self._rank:
                    operations.append(self._send(gradient[loan.live_slot], loan.owner))
                    self._counters.add(TransferStats(returned=gradient[loan.live_slot].nbytes))
                elif loan.owner == self._rank:
                    buffer = gradient.new_empty(weight.shape[1:])
                    operations.append(self._receive(buffer, loan.borrower))
                    received.append((weight.main_grad[loan.slot], buffer))  # type: ignore[attr-defined]
        wait(start(operations))
        for main_grad, buffer in received:  # in the order of the plan: every run adds up in the same order
            main_grad.add_(buffer)

    def refresh(self) -> None:
        """See :class:`Transfer`. Discards started fetches: their weights are out of date."""
        self._prefetcher.drop()

    def take_stats(self) -> TransferStats:
        """See :class:`Transfer`."""
        return self._counters.take()

    def close(self) -> None:
        """See :class:`Transfer`."""
        self._prefetcher.drop()
        group, self._group = self._group, None
        leave(group)

    def _send(self, tensor: Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(dist.isend, tensor, self._ranks[rank], self._group)

    def _receive(self, tensor: Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(dist.irecv, tensor, self._ranks[rank], self._group)


def communicator(ranks: Sequence[int], timeout: float, *, backend: str | None = None) -> Any:
    """Returns a new process group of these global ranks; ``backend`` None uses that of the world. All ranks of the
    world call it together, each with the ranks of its own group.

    ``use_local_synchronization`` of torch is not used: it reuses the name of a destroyed group and then connects to
    the addresses of that group.
    """
    all_groups: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_groups, tuple(ranks))
    limit = timedelta(seconds=timeout)
    groups = {members: dist.new_group(members, limit, backend) for members in dict.fromkeys(all_groups)}
    group = groups[tuple(ranks)]
    dist.barrier(group)  # NCCL connects in the first call, which all ranks must join
    return group


def leave(group: Any) -> None:
    """Destroy a group of :func:`communicator`. None, and a group whose world has ended, is ignored."""
    if group is not None and dist.is_initialized():
        dist.destroy_process_group(group)


def start(operations: list[dist.P2POp]) -> Sequence[dist.Work]:
    """Start sends and receives. Two ranks must list those between them in the same order."""
    works: Sequence[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
    return works


def wait(works: Sequence[dist.Work]) -> None:
    """Wait for the works of :func:`start`; on a GPU the stream waits, not the process."""
    for work in works:
        work.wait()


def _rounds(all_loans: Sequence[Loan], max_receives: int) -> list[list[Loan]]:
    """Split the loans into rounds in which no owner receives more than ``max_receives`` gradients: this bounds the
    memory of the receive buffers."""
    rounds: list[list[Loan]] = []
    received: dict[int, int] = {}
    for loan in all_loans:
        count = received.get(loan.owner, 0)
        received[loan.owner] = count + 1
        if count // max_receives == len(rounds):
            rounds.append([])
        rounds[count // max_receives].append(loan)
    return rounds
