"""A rank's experts, its own and those it borrows for one micro-batch of one layer (ForeMoE).

::

    forward    own experts ─────────────────────────────┐
               fetch ─> borrowed experts, then dropped ─┴─> outputs
    backward   fetch again ─> gradients of the borrowed, given back to their homes
               gradients of the own, to the parameters

A recomputation keeps what it fetched until the backward pass, which comes next. Which rows are whose was decided
before, by :mod:`agent_rl.train.expert_balancing.moe_layer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from agent_rl.train.expert_balancing.transfer import Transfer
from agent_rl.train.megatron.moe import Experts, gated
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

    def fetch(self, *, ahead: bool) -> tuple[Tensor, Tensor]:
        """The borrowed ``weight1`` and ``weight2``; ``ahead``: begins to fetch those of the next layer."""
        weights = self.transfer.fetch(*self.visit[self.place])
        if ahead:
            self._prefetch(self.place + 1)
        return weights

    def give_back(self, gradient1: Tensor, gradient2: Tensor) -> None:
        """Send the borrowed experts' gradients home, and only then, to spare memory, begin to fetch the weights of the
        layer before."""
        self.transfer.give_back(*self.visit[self.place], gradient1, gradient2)
        self._prefetch(self.place - 1)

    def _prefetch(self, place: int) -> None:
        if 0 <= place < len(self.visit):
            self.transfer.prefetch(*self.visit[place])


class Rows:
    """Rows sorted by expert, and where to put zeros between them so that each expert has enough for its product.

    An expert whose tokens are shared out is multiplied in parts, and the bits of a product of few rows depend on how
    many they are.
    """

    def __init__(self, counts: Tensor, least: Tensor) -> None:
        """``counts`` and ``least`` int64 ``[experts]`` on the CPU; an expert without rows gets none."""
        self.restore = torch.where(counts > 0, counts.maximum(least), counts)
        self._place = None if torch.equal(self.restore, counts) else _places(counts, self.restore)

    def fill(self, rows: Tensor) -> Tensor:
        """``rows`` with those of zeros between them."""
        if self._place is None:
            return rows
        wide = rows.new_zeros(int(self.restore.sum()), *rows.shape[1:])
        return wide.index_copy(0, self._place.to(rows.device), rows)

    def cut(self, rows: Tensor) -> Tensor:
        """``rows`` without those that :meth:`fill` put between them."""
        return rows if self._place is None else rows.index_select(0, self._place.to(rows.device))


def _places(counts: Tensor, restore: Tensor) -> Tensor:
    """For each row its place when every expert has its ``restore`` rows."""
    shift = (restore.cumsum(0) - restore) - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum())) + shift.repeat_interleave(counts)


class BalancedExperts(Experts):
    """Own experts and, where there is ``work`` to do, those borrowed for it. ``again``: under the backward pass."""

    work: Work | None = None
    again = False

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """As of :class:`Experts`; with work to do ``tokens_per_expert`` are those of all local slots ``[N + X]``."""
        if self.work is None:
            return super().forward(tokens, tokens_per_expert, probs)
        counts, least, homes = tokens_per_expert.to("cpu", torch.int64), self.work.least, len(self.weight1)
        split = (int(counts[:homes].sum()), int(counts[homes:].sum()))
        (tokens, foreign), (probs, foreign_probs) = tokens.split(split), probs.split(split)
        rows, live = Rows(counts[:homes], least[:homes]), self.work.held[homes:]
        own, _ = super().forward(rows.fill(tokens), rows.restore, rows.fill(probs))
        lent = Rows(counts[homes:][live], least[homes:][live])
        borrowed: Tensor = _Borrowed.apply(foreign, foreign_probs, lent, self.work, self.again)
        return torch.cat((rows.cut(own), borrowed)), None


class _Borrowed(torch.autograd.Function):
    """Borrowed experts' outputs: the operations that autograd would do, with weights that are not kept for it.

    It runs on every rank, also without a row: fetching and giving back are for all ranks of the expert group.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, probs: Tensor, rows: Rows, work: Work, again: bool) -> Tensor:
        weights = work.fetch(ahead=not again)
        tokens, probs = rows.fill(tokens), rows.fill(probs)
        ends = rows.restore.cumsum(0).to(tokens.device, torch.int32)
        hidden = F.grouped_mm(tokens, weights[0].transpose(1, 2), offs=ends)
        output = F.grouped_mm(gated(hidden, probs), weights[1].transpose(1, 2), offs=ends)
        ctx.save_for_backward(tokens, probs, hidden, ends)
        ctx.rows, ctx.work, ctx.weights = rows, work, weights if again else None
        return rows.cut(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        tokens, probs, hidden, ends = ctx.saved_tensors
        output = ctx.rows.fill(gradients[0])
        weight1, weight2 = ctx.weights or ctx.work.fetch(ahead=False)
        ctx.weights = None
        with torch.enable_grad():
            leaves = hidden.detach().requires_grad_(), probs.detach().requires_grad_()
            inner = gated(*leaves)
        hidden, probs = torch.autograd.grad(inner, leaves, F.grouped_mm(output, weight2, offs=ends))
        del weight2  # before a gradient of its size is made
        gradient = F.grouped_mm(hidden, weight1, offs=ends)
        del weight1
        lent1 = F.grouped_mm(hidden.t(), tokens, offs=ends)
        ctx.work.give_back(lent1, F.grouped_mm(output.t(), inner.detach(), offs=ends))
        return ctx.rows.cut(gradient), ctx.rows.cut(probs), None, None, None
