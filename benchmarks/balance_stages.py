"""The four stages of ForeMoE's paper, each of which can be left out, for comparison with the planner ``foremoe``.

1. expert placement by the loads of whole steps (:func:`r3.balance.plan.measured_placement`, in the layout);
2. swaps: an expert of the fullest rank changes places with one of another rank;
3. replicas, by turns: the fullest rank lends one of its heaviest experts to the rank where that helps most, of load and
   links; the machine that sends most tokens of one expert away gets a replica of it;
4. shares: the tokens of replicated experts are divided anew. The paper solves a linear program here; this fills the
   holders of one expert after the other like water, in integers, and needs no solver.

Also the paper's planner for updates within a machine (:func:`update_within_machine`). B instances are the micro-batches
times the layers. A swapped expert takes one of its new rank's X borrowed slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from r3.balance.baselines import as_plans, replicas
from r3.balance.plan import ExpertLayout, Ints, PlanArrays

WINDOW = 4
"""Experts of a rank, the heaviest, that are looked at for a swap or a replica."""
_FAR = np.iinfo(np.int64).max // 4


@dataclass(frozen=True, slots=True)
class Stages:
    """How much the stages 2 to 4 do: swaps an instance, replicas N_r a rank, sweeps over the shares; 0 leaves one out.

    ``link_weight``: tokens of the fullest rank that a token over a link between machines counts for.
    """

    swaps: int = 16
    replicas: int = 2
    sweeps: int = 4
    link_weight: float = 0.5


def staged(counts: Ints, layout: ExpertLayout, stages: Stages) -> PlanArrays:
    """Plans for ``counts`` ``[M, L, R, E]``, on the placement of the layout."""
    state = _State.on_owners(counts, layout)
    for _ in range(stages.swaps):
        state.swap()
    for turn in range(stages.replicas * layout.ranks):
        if turn % 2 and layout.nodes > 1:
            state.spare_link()
        else:
            state.replicate(stages.link_weight)
    for _ in range(stages.sweeps):
        share(state.load, state.held)
    return as_plans(state.load, state.held, layout, counts)


def update_within_machine(counts: Ints, layout: ExpertLayout, redundant: int) -> PlanArrays:
    """Algorithm 3 of the paper: in each machine the heaviest experts get a replica more, replicas go longest first to
    the ranks, and shares are filled like water. A rank needs N + ``redundant`` borrowed slots."""
    state = _State.on_owners(counts, layout)
    each = layout.ranks // layout.nodes
    home = np.broadcast_to(layout.owner_rank, (*counts.shape[:2], layout.experts)).reshape(len(state.load), -1)
    members = np.argsort(home // each, axis=1, kind="stable").reshape(-1, layout.experts // layout.nodes)
    rows = np.repeat(np.arange(len(home)), layout.nodes)[:, None]
    tokens = state.load.sum(axis=2)[rows, members]
    nowhere = np.zeros((members.shape[1], each), bool)
    held = replicas(tokens, nowhere, redundant, layout.experts_per_rank + redundant)
    state.held[:] = False
    for node in range(layout.nodes):
        ranks = np.arange(node * each, (node + 1) * each)
        mine = slice(node, None, layout.nodes)
        state.held[rows[mine, :, None], members[mine, :, None], ranks] = held[mine]
    state.load[:] = np.where(state.held.cumsum(axis=2) * state.held == 1, state.load.sum(axis=2, keepdims=True), 0)
    for _ in range(4):
        share(state.load, state.held)
    return as_plans(state.load, state.held, layout, counts)


def share(load: Ints, held: NDArray[np.bool_]) -> None:
    """Divide the tokens of every expert with more than one holder anew, the heaviest first, ``load`` in place."""
    at, tokens = np.arange(len(load)), load.sum(axis=2)
    shared = np.where(held.sum(axis=2) > 1, tokens, 0)
    order = np.argsort(-shared, axis=1, kind="stable")[:, : int((shared > 0).sum(axis=1).max(initial=0))]
    total = load.sum(axis=1)
    for expert in order.T:
        rows = at[shared[at, expert] > 0]
        which = expert[rows]
        base = total[rows] - load[rows, which]
        load[rows, which] = pour(base, held[rows, which], tokens[rows, which])
        total[rows] = base + load[rows, which]


def pour(base: Ints, held: NDArray[np.bool_], tokens: Ints) -> Ints:
    """``[B, R]``: ``tokens`` ``[B]`` over the holders so that the fullest of ``base`` plus tokens is least."""
    order = np.argsort(np.where(held, base, _FAR), axis=1, kind="stable")
    depth = np.take_along_axis(np.where(held, base, _FAR), order, axis=1)
    wet = np.arange(1, depth.shape[1] + 1)
    holders = np.where(depth < _FAR, tokens[:, None] + np.minimum(depth, _FAR).cumsum(axis=1) > wet * depth, False)
    count = holders.sum(axis=1, keepdims=True).clip(1)
    volume = tokens[:, None] + np.where(wet <= count, depth, 0).sum(axis=1, keepdims=True)
    level = (volume + count - wet) // count
    poured = np.where(wet <= count, level - depth, 0)
    found = np.empty_like(poured)
    np.put_along_axis(found, order, poured, axis=1)
    return found


@dataclass(frozen=True, eq=False)
class _State:
    """Changed in place. ``held`` and ``load`` ``[B, E, R]``, ``home`` the same before any change, ``free`` ``[B, R]``
    slots; ``seen`` ``[B, E, K]``: tokens by source machine."""

    layout: ExpertLayout
    home: NDArray[np.bool_]
    held: NDArray[np.bool_]
    load: Ints
    free: Ints
    seen: Ints

    @staticmethod
    def on_owners(counts: Ints, layout: ExpertLayout) -> _State:
        load = PlanArrays.identity(layout, counts).load.reshape(-1, layout.experts, layout.ranks).astype(np.int64)
        home = np.broadcast_to(layout.owner_mask, (*counts.shape[:2], *load.shape[1:])).reshape(load.shape)
        seen = counts.reshape(len(load), layout.nodes, -1, layout.experts).sum(axis=2).swapaxes(1, 2)
        return _State(layout, home, home.copy(), load, np.full((len(load), layout.ranks), layout.slots), seen)

    def swap(self) -> None:
        """Of the heaviest experts at home on the fullest rank and on each other, the pair that leaves least on both."""
        at, total = np.arange(len(self.load)), self.load.sum(axis=1)
        full = total.argmax(axis=1)
        here = np.where(self.held & self.home, self.load, -1)
        experts = np.argsort(-here, axis=1, kind="stable")[:, : max(WINDOW, self.layout.experts_per_rank)]
        tokens = np.take_along_axis(here, experts, axis=1)
        less = tokens[at, :, full][:, :WINDOW, None, None] - tokens[:, None]
        worst = np.maximum(total[at, full][:, None, None, None] - less, total[:, None, None] + less)
        possible = (tokens >= 0)[:, None] & (tokens[at, :, full] >= 0)[:, :WINDOW, None, None]
        possible &= ((self.free > 0) & (np.arange(self.layout.ranks) != full[:, None]))[:, None, None]
        possible &= (self.free[at, full] > 0)[:, None, None, None]
        worst = np.where(possible, worst, _FAR).reshape(len(at), -1)
        best = worst.argmin(axis=1)
        rows = np.flatnonzero(worst[at, best] < total[at, full])
        given, taken, rank = np.unravel_index(best[rows], less.shape[1:])
        self._relocate(rows, experts[rows, given, full[rows]], full[rows], rank)
        self._relocate(rows, experts[rows, taken, rank], rank, full[rows])

    def _relocate(self, rows: Ints, expert: Ints, source: Ints, target: Ints) -> None:
        self.load[rows, expert, target] = self.load[rows, expert, source]
        self.load[rows, expert, source] = 0
        self.held[rows, expert, source], self.held[rows, expert, target] = False, True
        self.free[rows, target] -= 1

    def replicate(self, link_weight: float) -> None:
        """The fullest rank lends one of its heaviest experts to the rank that lowers the smoothed objective most: the
        sum of the loads' squares, as the fullest rank alone does not tell two replicas apart of which both are needed,
        and the tokens over links."""
        at, total = np.arange(len(self.load)), self.load.sum(axis=1)
        full = total.argmax(axis=1)
        experts = np.argsort(-self.load[at, :, full], axis=1, kind="stable")[:, :WINDOW]
        tokens = self.load[at[:, None], experts, full[:, None]]
        gap = total[at, full][:, None] - total
        moved = np.minimum(tokens[:, :, None], gap[:, None] // 2)
        gain = 2.0 * moved * (gap[:, None] - moved)
        gain -= link_weight * total.mean(axis=1)[:, None, None] * self._crossing(experts, full, moved)
        possible = (self.free > 0)[:, None] & ~self.held[at[:, None], experts] & (moved > 0)
        gain = np.where(possible, gain, 0).reshape(len(at), -1)
        best = gain.argmax(axis=1)
        rows = np.flatnonzero(gain[at, best] > 0)
        place, rank = np.unravel_index(best[rows], moved.shape[1:])
        self._lend(rows, experts[rows, place], full[rows], rank, moved[rows, place, rank])

    def spare_link(self) -> None:
        """The machine with most tokens of one expert that it does not compute gets the expert, on its emptiest rank."""
        at, total, node = np.arange(len(self.load)), self.load.sum(axis=1), np.array(self.layout.node_of_rank)
        computed = self.load.reshape(*self.load.shape[:2], self.layout.nodes, -1).sum(axis=3)
        missing = (self.seen - computed).reshape(len(at), -1)
        expert, target = np.divmod(missing.argmax(axis=1), self.layout.nodes)
        inside = node == target[:, None]
        possible = inside & (self.free > 0) & ~self.held[at, expert]
        rank = np.where(possible, total, _FAR).argmin(axis=1)
        source = np.where(inside, -1, self.load[at, expert]).argmax(axis=1)
        moved = np.minimum(missing.max(axis=1), self.load[at, expert, source])
        rows = np.flatnonzero((moved > 0) & possible[at, rank])
        self._lend(rows, expert[rows], source[rows], rank[rows], moved[rows])

    def _lend(self, rows: Ints, expert: Ints, source: Ints, target: Ints, moved: Ints) -> None:
        self.load[rows, expert, target] += moved
        self.load[rows, expert, source] -= moved
        self.held[rows, expert, target] = True
        self.free[rows, target] -= 1

    def _crossing(self, experts: Ints, source: Ints, moved: Ints) -> Ints:
        """``[B, w, R]``: how many more tokens cross between machines when so many are ``moved`` from the source."""
        rows, node = np.arange(len(self.load))[:, None], np.array(self.layout.node_of_rank)
        computed = self.load[rows, experts].reshape(*experts.shape, self.layout.nodes, -1).sum(axis=3)
        excess = computed - self.seen[rows, experts]
        here, there = excess[rows, :, node[source][:, None]].swapaxes(1, 2), excess[:, :, node]
        more = np.maximum(there + moved, 0) - np.maximum(there, 0) + np.maximum(here - moved, 0) - np.maximum(here, 0)
        return np.where(node == node[source][:, None], 0, more.swapaxes(0, 1)).swapaxes(0, 1)
