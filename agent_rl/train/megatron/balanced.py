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
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoETokenDispatcher,
)
from torch import Tensor

from agent_rl.errors import TrainerError
from agent_rl.train.megatron.borrowed import BalancedExperts, Placement, Work
from agent_rl.train.megatron.moe import EvenMoELayer
from r3.balance import Grid


class SlotDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all with a map of experts, sent to slots by ``placement``, combined in the order of experts.

    Tokens are sorted by expert first and by slot then, and the other way back. So a token's outputs are added up in the
    order they would have without slots, and so are the gradients of its copies.
    """

    placement: Placement

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """See Megatron's; it counts the tokens of each column, of which here is one a slot."""
        counts, tokens = routing_map.sum(0), len(routing_map) * self.config.moe_router_topk
        self._order = self.placement.order(counts, tokens)
        held: Tensor = super().preprocess(self.placement.counts(counts)[None])
        self.num_out_tokens = tokens
        return held

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """See Megatron's; from the order of experts to that of slots."""
        rows, gates = super().dispatch_preprocess(hidden_states, routing_map, probs)
        return rows.index_select(0, self._order), gates.index_select(0, self._order)

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """See Megatron's; from the order of slots to that of experts."""
        order = self._order
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        combined: Tensor = super().combine_postprocess(permutated_local_input_tokens.index_select(0, back))
        return combined


class BalancedMoELayer(MoELayer):
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
