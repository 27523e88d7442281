"""MoE layers with balanced load: tokens go to slots of the expert group instead of to experts (ForeMoE).

::

    router ─> map of experts ─> map of slots ─> Megatron's dispatcher with R (N + X) slots ─> own and borrowed experts
              [T, E], logical    by the plan

Routers, their statistics and traces use logical experts only. Without a plan, a layer equals Megatron's bit for bit
while experts are placed in order; with another placement, the columns of the map are reordered first.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoETokenDispatcher
from torch import Tensor

from agent_rl.errors import TrainerError
from agent_rl.train.expert_balancing.borrowed_experts import BalancedExperts, LayerBorrowing, SlotAssignment
from agent_rl.train.megatron.moe import ReleasingMoELayer
from r3.balance import ExpertLayout


class SlotDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all dispatcher for a map of experts: sends to slots by ``assignment`` and combines in the order
    of experts.

    Outputs of a token, and gradients of its copies, are added up in the same order as without slots.
    """

    assignment: SlotAssignment

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """See Megatron's method, which counts the tokens per column; here a column is a slot."""
        counts, copies = routing_map.sum(0), len(routing_map) * self.config.moe_router_topk
        self._order = self.assignment.expert_order(counts, copies)
        tokens_per_slot: Tensor = super().preprocess(self.assignment.slot_counts(counts)[None])
        self.num_out_tokens = copies
        return tokens_per_slot

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """See Megatron's method."""
        self.hidden_shape, self.probs = hidden_states.shape, probs
        counts = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        by_expert = routing_map.T.contiguous()
        tokens = torch.arange(len(routing_map), device=probs.device).expand_as(by_expert).masked_select(by_expert)
        gates = probs.T.contiguous().masked_select(by_expert).index_select(0, self._order)
        self._copies = TokenCopies.sort(tokens, self._order, len(routing_map))
        return _Copy.apply(hidden_states.view(-1, hidden_states.shape[-1]), self._copies), gates

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """See Megatron's method."""
        combined: Tensor = _Combine.apply(permutated_local_input_tokens, self._copies)
        return combined.view(self.hidden_shape)


@dataclass(frozen=True, slots=True, eq=False)
class TokenCopies:
    """Copies of T tokens sorted by slot, k per token: ``token`` ``[T k]`` is the token of each copy, ``rows``
    ``[T, k]`` the copies of each token in the order of their experts."""

    token: Tensor
    rows: Tensor

    @staticmethod
    def sort(tokens: Tensor, order: Tensor, count: int) -> TokenCopies:
        """From the ``tokens`` of the copies sorted by expert, and ``order``: for each copy sorted by slot its index
        among those sorted by expert."""
        slots = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return TokenCopies(tokens[order], slots[tokens.argsort(stable=True)].view(count, -1))

    def copy(self, tokens: Tensor) -> Tensor:
        """``[T, H]`` to ``[T k, H]``."""
        return tokens.index_select(0, self.token)

    def combine(self, rows: Tensor) -> Tensor:
        """``[T k, H]`` to ``[T, H]``: the sums over each token's copies."""
        # Rounds once, like Megatron's sum; embedding_bag in bfloat16 on a CPU rounds after every addition.
        wide = rows.float() if rows.device.type == "cpu" else rows
        return F.embedding_bag(self.rows, wide, mode="sum").to(rows.dtype)


class _Copy(torch.autograd.Function):
    """:meth:`TokenCopies.copy`; the backward pass combines."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, copies: TokenCopies) -> Tensor:
        ctx.copies = copies
        return copies.copy(tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.copies.combine(gradients[0]), None


class _Combine(torch.autograd.Function):
    """:meth:`TokenCopies.combine`; the backward pass copies."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, copies: TokenCopies) -> Tensor:
        ctx.copies = copies
        return copies.combine(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.copies.copy(gradients[0]), None


class BalancedMoELayer(ReleasingMoELayer):
    """Megatron's layer with a second dispatcher, over slots, for micro-batches that have a plan."""

    experts: BalancedExperts
    token_dispatcher: MoETokenDispatcher
    placement: Tensor | None = None
    """The expert in each parameter slot of the expert group, int64 ``[E]`` on the device; None: they are in order."""

    def enable_borrowing(self, layout: ExpertLayout, *, recomputed: bool) -> None:
        """Build the dispatcher over the slots of ``layout``. ``recomputed``: the layer runs again under the backward
        pass."""
        self._expert_dispatcher = self.token_dispatcher
        self._slot_dispatcher = _slot_dispatcher(self.config, layout)
        self._recomputed = recomputed
        self.clear()

    def clear(self) -> None:
        """Discard all plans. Idempotent."""
        self._begun = False
        self._borrowing: LayerBorrowing | None = None
        self._for_recomputation: deque[LayerBorrowing | None] = deque()

    @property
    def pending_recomputations(self) -> int:
        """Micro-batches that ran forward and were not yet recomputed."""
        return len(self._for_recomputation)

    def begin(self, borrowing: LayerBorrowing | None, *, backward: bool) -> None:
        """Set what the next forward pass borrows (None: no expert). ``backward``: a backward pass follows."""
        self._begun, self._borrowing = True, borrowing
        if backward and self._recomputed:
            self._for_recomputation.append(borrowing)

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
        """See Megatron's method. A forward pass uses the plan of :meth:`begin`, a recomputation the oldest plan that
        waits for one. Raises TrainerError for a recomputation without a forward pass."""
        recomputing = not self._begun
        if recomputing and not self._for_recomputation:
            raise TrainerError(f"layer {self.layer_number}: recomputed more often than it ran forward")
        borrowing = self._for_recomputation.popleft() if recomputing else self._borrowing
        self._begun = False
        if borrowing is not None and borrowing.products.short:
            borrowing = replace(borrowing, products=borrowing.products.counted(self._totals(routing_map)))
        self.experts.borrowing, self.experts.recomputing = borrowing, recomputing
        self.token_dispatcher = self._expert_dispatcher if borrowing is None else self._slot_dispatcher
        if borrowing is None and self.placement is not None:
            probs, routing_map = probs.index_select(1, self.placement), routing_map.index_select(1, self.placement)
        elif borrowing is not None:
            self._slot_dispatcher.assignment = borrowing.assignment
        return super().preprocess(hidden_states, probs, routing_map)

    def _totals(self, routing_map: Tensor) -> Tensor:
        """Returns the tokens of each expert over all ranks, int64 ``[E]`` on the CPU. Collective."""
        totals = routing_map.sum(0)
        torch.distributed.all_reduce(totals, group=self._expert_dispatcher.tp_ep_group)
        return totals.cpu()


def _slot_dispatcher(config: Any, layout: ExpertLayout) -> SlotDispatcher:
    """Returns the dispatcher for ``R (N + X)`` slots."""
    groups = get_default_pg_collection()
    slots_per_rank = layout.experts_per_rank + layout.slots
    slot_config = copy.copy(config)
    slot_config.num_moe_experts = layout.ranks * slots_per_rank
    first = groups.ep.rank() * slots_per_rank
    local_slots = list(range(first, first + slots_per_rank))
    return SlotDispatcher(slots_per_rank, local_slots, config=slot_config, pg_collection=groups)
