"""DeepEP's normal kernels over gloo, as Megatron-core calls them; ``Buffer.fault`` makes one wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .utils import EventOverlap

__all__ = ["Buffer"]


@dataclass(frozen=True)
class Handle:
    """By rank the rows that come from it and this rank's rows that go to it, and the number of rows."""

    come: list[Tensor]
    go: list[Tensor]
    rows: int


class Sizes:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class Buffer:
    fault = ""
    dispatches = 0

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(count: int) -> None: ...

    @staticmethod
    def get_dispatch_config(ranks: int) -> Sizes:
        return Sizes()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, **_: Any) -> tuple[Any, ...]:
        per_expert = topk_idx.flatten().bincount(minlength=num_experts)
        return None, None, per_expert, None, EventOverlap()

    def dispatch(self, x: Tensor, handle: Handle | None = None, **options: Any) -> tuple[Any, ...]:
        """Sends a token once to each rank with one of its experts; with ``handle`` in the same way again."""
        Buffer.dispatches += 1
        if Buffer.fault == "raises":
            raise RuntimeError("DeepEP error: timeout\nof the dispatch")
        if handle is not None:
            every = self._gathered(x)
            got = torch.cat([rows[places] for rows, places in zip(every, handle.come, strict=True)])
            return got * (2 if Buffer.fault == "backwards" else 1), None, None, None, None, EventOverlap()
        topk_idx, topk_weights = options["topk_idx"], options["topk_weights"]
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        each = len(options["num_tokens_per_expert"]) // ranks
        come, tokens, experts, weights = [], [], [], []
        for rows, chosen, gates in self._gathered((x, topk_idx, topk_weights)):
            places = (chosen // each == rank).any(-1).nonzero()[:, 0]
            local = torch.where(chosen // each == rank, chosen - rank * each, -1)[places]
            come.append(places)
            tokens.append(rows[places])
            experts.append(local)
            weights.append(torch.where(local >= 0, gates[places], 0))
        here = torch.cat(experts)
        counts = here[here >= 0].bincount(minlength=each).tolist()
        go = [(topk_idx // each == other).any(-1).nonzero()[:, 0] for other in range(ranks)]
        return torch.cat(tokens), here, torch.cat(weights), counts, Handle(come, go, len(x)), EventOverlap()

    def combine(
        self, x: Tensor, handle: Handle, topk_weights: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sums each token's rows, and its gates, over all ranks."""
        added = self._returned(x, handle)
        gates = None if topk_weights is None else self._returned(topk_weights, handle)
        return added * (1.1 if Buffer.fault == "off" else 1), gates, EventOverlap()

    def _returned(self, rows: Tensor, handle: Handle) -> Tensor:
        added = rows.new_zeros(handle.rows, *rows.shape[1:])
        own = dist.get_rank(self.group)
        pieces = self._gathered(rows.split([len(places) for places in handle.come]))
        for other, places in enumerate(handle.go):
            added.index_add_(0, places, pieces[other][own])
        return added

    def _gathered(self, given: Any) -> list[Any]:
        every: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(every, given, group=self.group)
        return every
