"""Layers of experts whose load is balanced: tokens go to slots of the expert group instead of to experts (ForeMoE).

::

    router ─> map of experts ─> map of slots ─> Megatron's dispatcher, made for R (N + X) experts ─> own and borrowed
              [T, E], logical    by the plan                                                         experts

Routers, their statistics and traces know of experts only. Without a plan a layer is Megatron's own in every bit, with
experts at home in order; otherwise the map's columns are put into the order of the homes first.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoETokenDispatcher,
)
from torch import Tensor

from agent_rl.errors import TrainerError
from agent_rl.train.expert_balancing.borrowed_experts import BalancedExperts, Placement, Work
from agent_rl.train.megatron.moe import EvenMoELayer, ReleasingMoELayer
from r3.balance import Grid


class SlotDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all, which is given a map of experts, sends to slots by ``placement`` and combines in the order
    of experts.

    A token's outputs are added up as they would be without slots, and so are the gradients of its copies.
    """

    placement: Placement

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """See Megatron's; it counts the tokens of each column, of which here is one a slot."""
        counts, copies = routing_map.sum(0), len(routing_map) * self.config.moe_router_topk
        self._order = self.placement.order(counts, copies)
        held: Tensor = super().preprocess(self.placement.counts(counts)[None])
        self.num_out_tokens = copies
        return held

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """See Megatron's."""
        self.hidden_shape, self.probs = hidden_states.shape, probs
        counted = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counted)
        by_expert = routing_map.T.contiguous()
        tokens = torch.arange(len(routing_map), device=probs.device).expand_as(by_expert).masked_select(by_expert)
        gates = probs.T.contiguous().masked_select(by_expert).index_select(0, self._order)
        self._copies = Copies.of(tokens, self._order, len(routing_map))
        return _Spread.apply(hidden_states.view(-1, hidden_states.shape[-1]), self._copies), gates

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """See Megatron's."""
        combined: Tensor = _Combined.apply(permutated_local_input_tokens, self._copies)
        return combined.view(self.hidden_shape)


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Copies of tokens sorted by slot: ``token`` ``[T k]`` of each, and ``places`` ``[T, k]`` of each token's, in the
    order of their experts."""

    token: Tensor
    places: Tensor

    @staticmethod
    def of(tokens: Tensor, order: Tensor, count: int) -> Copies:
        """From the token of each copy when sorted by expert, and for each slot's copies their places there."""
        slots = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return Copies(tokens[order], slots[tokens.argsort(stable=True)].view(count, -1))

    def spread(self, tokens: Tensor) -> Tensor:
        """``[T, H]`` to ``[T k, H]``."""
        return tokens.index_select(0, self.token)

    def combine(self, rows: Tensor) -> Tensor:
        """``[T k, H]`` to ``[T, H]``: the sums over each token's copies."""
        # As Megatron's own sum does, and not the CPU's embedding_bag of bfloat16, round once.
        wide = rows.float() if rows.device.type == "cpu" else rows
        return F.embedding_bag(self.places, wide, mode="sum").to(rows.dtype)


class _Spread(torch.autograd.Function):
    """:meth:`Copies.spread`; its gradients are combined."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return copies.spread(tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.copies.combine(gradients[0]), None


class _Combined(torch.autograd.Function):
    """:meth:`Copies.combine`; its gradients are spread."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return copies.combine(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.copies.spread(gradients[0]), None


class BalancedMoELayer(ReleasingMoELayer):
    """Megatron's layer, and for a micro-batch that has a plan its dispatcher once more, with slots for experts."""

    experts: BalancedExperts
    token_dispatcher: MoETokenDispatcher
    home: Tensor | None = None
    """The expert in each home place of the expert group, int64 ``[E]`` on the device; None: they are in order."""

    def adopt(self, grid: Grid, *, recomputed: bool, keep_order: bool) -> None:
        """Make room for the borrowed slots of ``grid``. ``recomputed``: the layer is run again under the backward pass.
        ``keep_order``: outputs are added up as without slots; of all-to-all alone."""
        self._plain, self._slots = self.token_dispatcher, _slot_dispatcher(self.config, grid, keep_order)
        self._recomputed = recomputed
        self.clear()

    def clear(self) -> None:
        """Forget all plans. Idempotent."""
        self._begun = False
        self._work: Work | None = None
        self._kept: deque[Work | None] = deque()

    @property
    def left(self) -> int:
        """Micro-batches that were run forward and not yet recomputed."""
        return len(self._kept)

    def begin(self, work: Work | None, *, backward: bool) -> None:
        """Before a forward pass: the work to do (None: no expert is borrowed)."""
        self._begun, self._work = True, work
        if backward and self._recomputed:
            self._kept.append(work)

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
        """See Megatron's; first the plan is looked up: forward the one that was begun, in the recomputation the oldest
        that is kept."""
        again = not self._begun
        if again and not self._kept:
            raise TrainerError(f"layer {self.layer_number}: recomputed more often than it was run forward")
        work = self._kept.popleft() if again else self._work
        self._begun = False
        self.experts.work, self.experts.again = work, again
        self.token_dispatcher = self._plain if work is None else self._slots
        if work is None and self.home is not None:
            probs, routing_map = probs.index_select(1, self.home), routing_map.index_select(1, self.home)
        elif work is not None and isinstance(self._slots, SlotDispatcher):
            self._slots.placement = work.placement
        elif work is not None:
            probs, routing_map = work.placement.spread(probs, routing_map)
        return super().preprocess(hidden_states, probs, routing_map)


class EvenBalancedMoELayer(BalancedMoELayer, EvenMoELayer):
    """For the allgather dispatcher: the map of slots is filled up as that of experts would be."""


def _slot_dispatcher(config: Any, grid: Grid, keep_order: bool) -> MoETokenDispatcher:
    """The dispatcher of ``config`` for ``R (N + X)`` experts."""
    groups = get_default_pg_collection()
    each = grid.homes + grid.slots
    wide = copy.copy(config)
    wide.num_moe_experts = grid.ranks * each
    kind = MoEAllGatherTokenDispatcher
    if config.moe_token_dispatcher_type == "alltoall":
        kind = SlotDispatcher if keep_order else MoEAlltoAllTokenDispatcher
    first = groups.ep.rank() * each
    return kind(each, list(range(first, first + each)), config=wide, pg_collection=groups)
