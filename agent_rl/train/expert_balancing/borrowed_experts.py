"""The experts that a rank computes for one micro-batch of one layer: its own and the borrowed ones (ForeMoE).

::

    forward    own experts ──────────────────────────────────┐
               fetch ─> compute borrowed experts, drop them ─┴─> outputs
    backward   fetch again ─> gradients of the borrowed experts, returned to their owner ranks
               gradients of the own experts, added to the parameters

A recomputation keeps the fetched weights until the backward pass, which follows at once.
:mod:`agent_rl.train.expert_balancing.moe_layer` assigns tokens to slots before this module runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from agent_rl.train.expert_balancing.transfer import Transfer
from agent_rl.train.megatron.moe import Experts, gated_activation
from r3.balance import LayerPlan


@dataclass(frozen=True, slots=True, eq=False)
class SlotAssignment:
    """Assigns this rank's tokens to the P expert slots of the expert group; int64 ``[P]`` tensors on the device.

    Slot p computes expert ``expert[p]``. Of this rank's tokens of that expert, in their order, it computes those from
    ``first[p]`` up to but excluding ``stop[p]``. An empty slot computes none.
    """

    expert: Tensor
    first: Tensor
    stop: Tensor

    def slot_counts(self, expert_counts: Tensor) -> Tensor:
        """Returns the tokens per slot ``[P]`` from the tokens per expert ``[E]``."""
        return (expert_counts[self.expert].minimum(self.stop) - self.first).clamp(min=0)

    def expert_order(self, expert_counts: Tensor, tokens: int) -> Tensor:
        """Returns ``[tokens]``: for each row sorted by slot, its index among the rows sorted by expert."""
        slot_counts = self.slot_counts(expert_counts)
        starts = (expert_counts.cumsum(0) - expert_counts)[self.expert] + self.first
        shift = (starts - (slot_counts.cumsum(0) - slot_counts)).repeat_interleave(slot_counts, output_size=tokens)
        return torch.arange(tokens, device=expert_counts.device) + shift


@dataclass(frozen=True, slots=True, eq=False)
class SlotProducts:
    """Which products this rank's slots compute, ``[N + X]`` on the CPU: ``expert`` (-1: empty) and ``min_rows``, the
    minimum number of rows. An expert whose tokens are shared needs ``floor`` rows or as many as it has tokens, because
    the bits of products of fewer rows depend on their number; ``short``: some shared expert of the layer, on any rank,
    has fewer foreseen tokens, so its tokens must be counted before the products."""

    expert: Tensor
    min_rows: Tensor
    floor: int
    short: bool

    def counted(self, totals: Tensor) -> SlotProducts:
        """Returns the same for the true ``totals`` ``[E]`` of the experts' tokens, unforeseen ones included."""
        whole = totals[self.expert.clamp(min=0)].clamp(max=self.floor)
        return replace(self, min_rows=torch.where(self.min_rows > 0, whole, 0))


@dataclass(frozen=True, slots=True, eq=False)
class LayerBorrowing:
    """What this rank borrows and computes in one micro-batch of one layer.

    ``layers``: (layer number, plan) of all layers of the micro-batch in this model chunk that borrow; this layer is at
    ``index``. ``products``: what must hold for the products of the local slots.
    """

    layers: Sequence[tuple[int, LayerPlan]]
    index: int
    transfer: Transfer
    assignment: SlotAssignment
    products: SlotProducts

    def fetch(self, *, prefetch_next: bool) -> tuple[Tensor, Tensor]:
        """Returns the borrowed ``weight1`` and ``weight2``; ``prefetch_next`` starts the fetch for the next layer."""
        weights = self.transfer.fetch(*self.layers[self.index])
        if prefetch_next:
            self._prefetch(self.index + 1)
        return weights

    def return_gradients(self, gradient1: Tensor, gradient2: Tensor) -> None:
        """Send the gradients to the owner ranks, then start the fetch for the previous layer. Doing it afterwards
        keeps the peak memory low."""
        self.transfer.return_gradients(*self.layers[self.index], gradient1, gradient2)
        self._prefetch(self.index - 1)

    def _prefetch(self, index: int) -> None:
        if 0 <= index < len(self.layers):
            self.transfer.prefetch(*self.layers[index])


class RowPadding:
    """Zero rows inserted between rows sorted by expert, so that each product has its minimum number of rows.

    An expert whose tokens are shared between ranks is multiplied in parts, and the bits of a product with few rows
    depend on their number.
    """

    def __init__(self, counts: Tensor, min_rows: Tensor) -> None:
        """``counts`` and ``min_rows``: int64 ``[experts]`` on the CPU. An expert without rows gets no zero rows."""
        self.padded_counts = torch.where(counts > 0, counts.maximum(min_rows), counts)
        unchanged = torch.equal(self.padded_counts, counts)
        self._rows = None if unchanged else _padded_row_indices(counts, self.padded_counts)

    def pad(self, rows: Tensor) -> Tensor:
        """Returns ``rows`` with the zero rows inserted."""
        if self._rows is None:
            return rows
        padded = rows.new_zeros(int(self.padded_counts.sum()), *rows.shape[1:])
        return padded.index_copy(0, self._rows.to(rows.device), rows)

    def unpad(self, rows: Tensor) -> Tensor:
        """Returns ``rows`` without the rows that :meth:`pad` inserted."""
        return rows if self._rows is None else rows.index_select(0, self._rows.to(rows.device))


def _padded_row_indices(counts: Tensor, padded_counts: Tensor) -> Tensor:
    """Returns each row's index after padding."""
    shift = (padded_counts.cumsum(0) - padded_counts) - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum())) + shift.repeat_interleave(counts)


class BalancedExperts(Experts):
    """This rank's own experts and, when ``borrowing`` is set, the borrowed ones. ``recomputing``: the forward pass
    runs again under the backward pass."""

    borrowing: LayerBorrowing | None = None
    recomputing = False

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """See :class:`Experts`. When borrowing, ``tokens_per_expert`` has one count per local slot ``[N + X]``."""
        if self.borrowing is None:
            return super().forward(tokens, tokens_per_expert, probs)
        counts, own, products = tokens_per_expert.to("cpu", torch.int64), len(self.weight1), self.borrowing.products
        split = (int(counts[:own].sum()), int(counts[own:].sum()))
        (tokens, borrowed_tokens), (probs, borrowed_probs) = tokens.split(split), probs.split(split)
        padding, occupied = RowPadding(counts[:own], products.min_rows[:own]), products.expert[own:] >= 0
        own_output, _ = super().forward(padding.pad(tokens), padding.padded_counts, padding.pad(probs))
        borrowed_padding = RowPadding(counts[own:][occupied], products.min_rows[own:][occupied])
        borrowed_output: Tensor = _ComputeBorrowed.apply(
            borrowed_tokens, borrowed_probs, borrowed_padding, self.borrowing, self.recomputing
        )
        return torch.cat((padding.unpad(own_output), borrowed_output)), None


class _ComputeBorrowed(torch.autograd.Function):
    """Outputs of borrowed experts: the operations that autograd would run, with weights that are fetched again for the
    backward pass.

    It runs on every rank, also on one without rows: fetching and returning are collective over the expert group.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, probs: Tensor, padding: RowPadding, borrowing: LayerBorrowing, recomputing: bool
    ) -> Tensor:
        weights = borrowing.fetch(prefetch_next=not recomputing)
        tokens, probs = padding.pad(tokens), padding.pad(probs)
        ends = padding.padded_counts.cumsum(0).to(tokens.device, torch.int32)
        hidden = F.grouped_mm(tokens, weights[0].transpose(1, 2), offs=ends)
        output = F.grouped_mm(gated_activation(hidden, probs), weights[1].transpose(1, 2), offs=ends)
        ctx.save_for_backward(tokens, probs, hidden, ends)
        ctx.padding, ctx.borrowing, ctx.weights = padding, borrowing, weights if recomputing else None
        return padding.unpad(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        tokens, probs, hidden, ends = ctx.saved_tensors
        output = ctx.padding.pad(gradients[0])
        weight1, weight2 = ctx.weights or ctx.borrowing.fetch(prefetch_next=False)
        ctx.weights = None
        with torch.enable_grad():
            leaves = hidden.detach().requires_grad_(), probs.detach().requires_grad_()
            inner = gated_activation(*leaves)
        hidden, probs = torch.autograd.grad(inner, leaves, F.grouped_mm(output, weight2, offs=ends))
        del weight2  # frees its memory before a gradient of the same size is allocated
        gradient = F.grouped_mm(hidden, weight1, offs=ends)
        del weight1
        gradient1 = F.grouped_mm(hidden.t(), tokens, offs=ends)
        ctx.borrowing.return_gradients(gradient1, F.grouped_mm(output.t(), inner.detach(), offs=ends))
        return ctx.padding.unpad(gradient), ctx.padding.unpad(probs), None, None, None
