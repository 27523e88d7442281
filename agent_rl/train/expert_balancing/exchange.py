"""Borrowed experts from rank to rank, and their gradients home: an all-to-all on a communicator of its own.

An expert's weights are contiguous in its home's parameter and in the borrower's buffer. So each is sent from the one
and received into the other without being packed: the exchange is a batch of sends and receives, as NCCL's all-to-all
is inside, and needs no memory but the borrowed experts' own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from agent_rl.train.expert_balancing.transfer import Ahead, Coming, Counters, ExpertWeights, Loan, TransferStats, loans
from r3.balance import Grid, Plan


class Exchange:
    """A :class:`~agent_rl.train.expert_balancing.transfer.Transfer` straight between ranks.

    ``layers``: this rank's home experts by their layer's number. ``ranks``: the global ranks of the expert group, in
    its order. ``prefetch``: False begins nothing before it is fetched. ``timeout``: seconds after which a rank gives up
    waiting for another. All ranks of the world make theirs together.
    """

    def __init__(
        self,
        layers: Mapping[int, ExpertWeights],
        grid: Grid,
        ranks: Sequence[int],
        *,
        prefetch: bool = True,
        timeout: float = 600.0,
    ) -> None:
        self._layers, self._grid, self._ranks = layers, grid, list(ranks)
        self._own = self._ranks.index(dist.get_rank())
        self._group: Any = communicator(self._ranks, timeout)
        self._counters = Counters.of(layers)
        self._ahead = Ahead(self._begin, self._counters, enabled=prefetch)

    def prefetch(self, layer: int, plan: Plan) -> None:
        """See :class:`Transfer`."""
        self._ahead.prefetch(layer, plan)

    def fetch(self, layer: int, plan: Plan) -> tuple[Tensor, Tensor]:
        """See :class:`Transfer`."""
        return self._ahead.fetch(layer, plan)

    def _begin(self, layer: int, plan: Plan) -> Coming:
        """Begin to send what this rank lends and to receive what it borrows."""
        lent, found = loans(plan), self._layers[layer]
        live = sum(loan.borrower == self._own for loan in lent)
        weights = found.weight1.detach(), found.weight2.detach()
        buffers = tuple(weight.new_empty(live, *weight.shape[1:]) for weight in weights)
        operations = []
        for loan in lent:
            for weight, buffer in zip(weights, buffers, strict=True):
                if loan.home == self._own:
                    operations.append(self._send(weight[loan.slot], loan.borrower))
                elif loan.borrower == self._own:
                    operations.append(self._receive(buffer[loan.place], loan.home))
        return Coming((buffers[0], buffers[1]), partial(wait, start(operations)))

    @torch.no_grad()
    def give_back(self, layer: int, plan: Plan, grad1: Tensor, grad2: Tensor) -> None:
        """See :class:`Transfer`."""
        with self._counters.exposed():
            for some in _rounds(loans(plan), self._grid.slots):
                self._give_back(layer, some, (grad1.contiguous(), grad2.contiguous()))

    def _give_back(self, layer: int, lent: Sequence[Loan], gradients: tuple[Tensor, Tensor]) -> None:
        experts, operations, received = self._layers[layer], [], []
        for loan in lent:
            for weight, gradient in zip((experts.weight1, experts.weight2), gradients, strict=True):
                if loan.borrower == self._own:
                    operations.append(self._send(gradient[loan.place], loan.home))
                    self._counters.add(TransferStats(returned=gradient[loan.place].nbytes))
                elif loan.home == self._own:
                    buffer = gradient.new_empty(weight.shape[1:])
                    operations.append(self._receive(buffer, loan.borrower))
                    received.append((weight.main_grad[loan.slot], buffer))  # type: ignore[attr-defined]
        wait(start(operations))
        for main_grad, buffer in received:  # in the order of the plan: the sum is the same in every run
            main_grad.add_(buffer)

    def refresh(self) -> None:
        """See :class:`Transfer`. Nothing is kept here but what was begun and not fetched, which is out of date now."""
        self._ahead.drop()

    def take_stats(self) -> TransferStats:
        """See :class:`Transfer`."""
        return self._counters.take()

    def close(self) -> None:
        """See :class:`Transfer`."""
        self._ahead.drop()
        group, self._group = self._group, None
        leave(group)

    def _send(self, tensor: Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(dist.isend, tensor, self._ranks[rank], self._group)

    def _receive(self, tensor: Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(dist.irecv, tensor, self._ranks[rank], self._group)


def communicator(ranks: Sequence[int], timeout: float, *, backend: str | None = None) -> Any:
    """A new process group of these global ranks; ``backend`` None is that of the world. All ranks of the world call it
    together, each with its own group's.

    (Torch's way for members alone, ``use_local_synchronization``, names a group like one that was destroyed before, and
    then takes the dead group's addresses for its own.)
    """
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, tuple(ranks))
    limit = timedelta(seconds=timeout)
    groups = {members: dist.new_group(members, limit, backend) for members in dict.fromkeys(every)}
    group = groups[tuple(ranks)]
    dist.barrier(group)  # NCCL makes its connections in the first call, which all ranks must join
    return group


def leave(group: Any) -> None:
    """Destroy what :func:`communicator` made; None, and one that ended with its world, is no matter."""
    if group is not None and dist.is_initialized():
        dist.destroy_process_group(group)


def start(operations: list[dist.P2POp]) -> Sequence[dist.Work]:
    """Begin sends and receives. Two ranks must give those between them in the same order."""
    works: Sequence[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
    return works


def wait(works: Sequence[dist.Work]) -> None:
    """Return when all of :func:`start` is done; on a GPU: make the stream wait for it."""
    for work in works:
        work.wait()


def _rounds(lent: Sequence[Loan], most: int) -> list[list[Loan]]:
    """The loans in as many rounds as let no home receive more than ``most`` at once: that bounds its memory."""
    rounds: list[list[Loan]] = []
    received: dict[int, int] = {}
    for loan in lent:
        count = received.get(loan.home, 0)
        received[loan.home] = count + 1
        if count // most == len(rounds):
            rounds.append([])
        rounds[count // most].append(loan)
    return rounds
