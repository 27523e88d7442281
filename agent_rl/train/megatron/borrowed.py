"""A rank's experts, its own and those it borrows for one micro-batch of one layer (ForeMoE).

::

    forward    fetch ─> products of own and borrowed ─> the borrowed weights are dropped
    backward   fetch again ─> gradients ─> own: to the parameters, borrowed: given back to their homes

A recomputation keeps what it fetched until the backward pass, which comes next. Which rows are whose was decided
before, by :mod:`agent_rl.train.megatron.balanced`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from agent_rl.train.megatron.moe import Experts, gated
from agent_rl.train.megatron.transfer import Transfer
from r3.balance import Plan


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Which of this rank's tokens go to which slot of the expert group, P slots in all; int64 ``[P]`` on the device.

    Slot p computes expert ``owner[p]``, and of this rank's tokens of it, in their order, those from ``first[p]`` to
    before ``stop[p]``. An empty slot takes none.
    """

    owner: Tensor
    first: Tensor
    stop: Tensor

    def counts(self, counts: Tensor) -> Tensor:
        """``[P]``: how many tokens each slot gets, where the experts have ``counts`` ``[E]``."""
        return (counts[self.owner].minimum(self.stop) - self.first).clamp(min=0)

    def order(self, counts: Tensor, tokens: int) -> Tensor:
        """``[tokens]``: for each row sorted by slot its place among the rows sorted by expert."""
        held = self.counts(counts)
        starts = (counts.cumsum(0) - counts)[self.owner] + self.first
        shift = (starts - (held.cumsum(0) - held)).repeat_interleave(held, output_size=tokens)
        return torch.arange(tokens, device=counts.device) + shift

    def spread(self, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        """Gate weights and map of slots ``[T, P]`` from those of experts ``[T, E]``; weights not chosen are 0."""
        turn = (routing_map.cumsum(0) - 1)[:, self.owner]
        chosen = routing_map[:, self.owner] & (turn >= self.first) & (turn < self.stop)
        return torch.where(chosen, probs.index_select(1, self.owner), 0.0), chosen


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """This rank's part in one micro-batch of one layer.

    ``visit``: the layers' numbers and plans of the micro-batch in this chunk of the model; this is the one at
    ``place``. ``held`` bool ``[N + X]`` marks the local slots that hold an expert, ``least`` int64 ``[N + X]`` how many
    rows the product of each must have.
    """

    visit: Sequence[tuple[int, Plan]]
    place: int
    transfer: Transfer
    placement: Placement
    held: Tensor
    least: Tensor

    def fetch(self, *, forward: bool) -> tuple[Tensor, Tensor]:
        """The borrowed ``weight1`` and ``weight2``; begins to fetch those of the layer that comes next."""
        weights = self.transfer.fetch(*self.visit[self.place])
        following = self.place + (1 if forward else -1)
        if 0 <= following < len(self.visit):
            self.transfer.prefetch(*self.visit[following])
        return weights

    def give_back(self, gradient1: Tensor, gradient2: Tensor) -> None:
        """Send the borrowed experts' gradients home."""
        self.transfer.give_back(*self.visit[self.place], gradient1, gradient2)


class Rows:
    """Rows sorted by slot, own experts before borrowed ones, and products of each slot's rows with its expert.

    An expert whose rows are shared out is multiplied in pieces. The bits of a product of few rows depend on how many
    they are, so a piece is filled up with zeros to ``least`` rows.
    """

    def __init__(self, counts: Tensor, least: Tensor, own: int, device: torch.device) -> None:
        """``counts`` and ``least`` int64 ``[own + live]``, on the CPU."""
        filled = torch.where(counts > 0, counts.maximum(least), counts)
        self._total, border = int(filled.sum()), int(filled[:own].sum())
        self._place = None if torch.equal(filled, counts) else _places(counts, filled).to(device)
        own_ends, borrowed_ends = (
            part.cumsum(0).to(device=device, dtype=torch.int32) for part in (filled[:own], filled[own:])
        )
        self._own = slice(0, border), own_ends
        self._borrowed = slice(border, self._total), borrowed_ends

    def fill(self, rows: Tensor) -> Tensor:
        """``rows`` with those of zeros between them."""
        if self._place is None:
            return rows
        return rows.new_zeros(self._total, *rows.shape[1:]).index_copy_(0, self._place, rows)

    def cut(self, rows: Tensor) -> Tensor:
        """``rows`` without those that :meth:`fill` put between them."""
        return rows if self._place is None else rows.index_select(0, self._place)

    def product(self, rows: Tensor, own: Tensor, borrowed: Tensor) -> Tensor:
        """Filled ``rows`` ``[n, A]`` times each one's expert, ``[N, A, B]`` and ``[live, A, B]``: ``[n, B]``."""
        parts = (
            F.grouped_mm(rows[span], weights, offs=ends)
            for weights, (span, ends) in ((own, self._own), (borrowed, self._borrowed))
            if len(weights)
        )
        return torch.cat(list(parts))

    def gradients(self, outputs: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Of own and borrowed weights ``[..., B, A]``, from an output's gradient ``[n, B]`` and the input ``[n, A]``,
        both filled."""
        own, borrowed = (
            F.grouped_mm(outputs[span].t(), rows[span], offs=ends) for span, ends in (self._own, self._borrowed)
        )
        return own, borrowed


def _places(counts: Tensor, filled: Tensor) -> Tensor:
    """For each row its place when every expert has its ``filled`` rows."""
    shift = (filled.cumsum(0) - filled) - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum())) + shift.repeat_interleave(counts)


class BalancedExperts(Experts):
    """Own experts and, where there is ``work`` to do, those borrowed for it. ``again``: under the backward pass."""

    work: Work | None = None
    again = False

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """As of :class:`Experts`; with work to do ``tokens_per_expert`` are those of all local slots ``[N + X]``."""
        if self.work is None:
            return super().forward(tokens, tokens_per_expert, probs)
        held, counts = self.work.held, tokens_per_expert.to("cpu", torch.int64)
        rows = Rows(counts[held], self.work.least[held], len(self.weight1), tokens.device)
        output: Tensor = _Computed.apply(tokens, probs, self.weight1, self.weight2, rows, self.work, self.again)
        return output, None


class _Computed(torch.autograd.Function):
    """Experts' outputs; the same operations as autograd's own, with borrowed weights that it does not keep."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, probs: Tensor, weight1: Tensor, weight2: Tensor, rows: Rows, work: Work, again: bool
    ) -> Tensor:
        borrowed = work.fetch(forward=not again)
        tokens, probs = rows.fill(tokens), rows.fill(probs)
        hidden = rows.product(tokens, weight1.transpose(1, 2), borrowed[0].transpose(1, 2))
        output = rows.product(gated(hidden, probs), weight2.transpose(1, 2), borrowed[1].transpose(1, 2))
        ctx.save_for_backward(tokens, probs, hidden, weight1, weight2)
        ctx.rows, ctx.work, ctx.borrowed = rows, work, borrowed if again else None
        return rows.cut(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        tokens, probs, hidden, weight1, weight2 = ctx.saved_tensors
        rows, output = ctx.rows, ctx.rows.fill(gradients[0])
        borrowed1, borrowed2 = ctx.borrowed or ctx.work.fetch(forward=False)
        ctx.borrowed = None
        with torch.enable_grad():
            leaves = hidden.detach().requires_grad_(), probs.detach().requires_grad_()
            inner = gated(*leaves)
        # Each borrowed weight is let go of before the gradient of its size is made.
        inner_gradient = rows.product(output, weight2, borrowed2)
        del borrowed2
        hidden, probs = torch.autograd.grad(inner, leaves, inner_gradient)
        token_gradient = rows.product(hidden, weight1, borrowed1)
        del borrowed1
        own1, lent1 = rows.gradients(hidden, tokens)
        own2, lent2 = rows.gradients(output, inner.detach())
        ctx.work.give_back(lent1, lent2)
        return rows.cut(token_gradient), rows.cut(probs), own1, own2, None, None, None
