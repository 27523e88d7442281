"""Which tokens of a packed micro-batch this rank holds, and the way back.

Every sequence is padded to a multiple that all ranks can share. Under context parallelism a sequence is cut into ``2 *
context_size`` chunks and rank r holds chunks r and ``2 * context_size - 1 - r``; what a context rank holds is then cut
contiguously over tensor ranks for the parts of the model that run sequence-parallel (the routers among them).
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from agent_rl.train.megatron.batch import PackedBatch
from agent_rl.train.megatron.parallel import Ranks


class Layout:
    """The cut of one micro-batch.

    ``lengths``: this rank's tokens of each sequence. ``source`` int64 ``[local]``: which token of the batch each one
    is, -1 for padding. ``positions`` int64 ``[local]``. ``chunks``: the two chunks of every sequence held here under
    context parallelism. ``tokens_total``: T of the uncut batch.
    """

    def __init__(self, batch: PackedBatch, ranks: Ranks) -> None:
        bounds = batch.cu_seqlens.tolist()
        self.tokens_total = bounds[-1]
        self.context_size, self.tensor_size, self.tensor_rank = (
            ranks.context_size,
            ranks.tensor_size,
            ranks.tensor_rank,
        )
        self.chunks = (ranks.context_rank, 2 * ranks.context_size - 1 - ranks.context_rank)
        multiple = ranks.tensor_size * (2 * ranks.context_size if ranks.context_size > 1 else 1)
        sources, positions, self.lengths = [], [], []
        for start, stop in pairwise(bounds):
            padded = -(-(stop - start) // multiple) * multiple
            place = self._mine(torch.arange(padded))
            sources.append(torch.where(place < stop - start, place + start, -1))
            positions.append(place)
            self.lengths.append(len(place))
        self.source = torch.cat(sources)
        self.positions = torch.cat(positions)

    def _mine(self, places: Tensor) -> Tensor:
        if self.context_size == 1:
            return places
        parts = places.chunk(2 * self.context_size)
        return torch.cat([parts[chunk] for chunk in self.chunks])

    def take(self, rows: Tensor, padding: int) -> Tensor:
        """This context rank's rows of ``rows [T, ...]``, with ``padding`` where the cut has a padding token."""
        source = self.source.to(rows.device)
        taken = rows[source.clamp(min=0)]
        return taken.masked_fill((source < 0).view(-1, *[1] * (rows.ndim - 1)), padding)

    @property
    def router_slice(self) -> slice:
        """The part of this context rank's tokens that its routers see (a tensor rank's share)."""
        size = len(self.source) // self.tensor_size
        return slice(self.tensor_rank * size, (self.tensor_rank + 1) * size)

    def gather_context(self, rows: Tensor) -> Tensor:
        """All context ranks' rows in the order of the padded sequences; the gradient is summed back to its owner."""
        from megatron.core.parallel_state import get_context_parallel_group
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        gathered = gather_from_sequence_parallel_region(
            rows.contiguous(), tensor_parallel_output_grad=True, group=get_context_parallel_group()
        )
        return gathered[self._gathered_order.to(rows.device)]

    @cached_property
    def _gathered_order(self) -> Tensor:
        """Index into rank-major rows that restores each padded sequence's order."""
        local, size = sum(self.lengths), self.context_size
        order, start = [], 0
        for length in self.lengths:
            half = length // 2
            for chunk in range(2 * size):
                owner, place = (chunk, 0) if chunk < size else (2 * size - 1 - chunk, half)
                begin = owner * local + start + place
                order.append(torch.arange(begin, begin + half))
            start += length
        return torch.cat(order)
