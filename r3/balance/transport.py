"""All planners that a config can name (``train.balance.planner``), and the planner ``foremoe``: transport on two
levels, batched over instances, in integers.

1. Between nodes: each node borrows the experts of other nodes that most of its own tokens use, which saves traffic on
   the links, and the loads of the nodes are made even.
2. Between the ranks of each node.

Experts are named by their parameter slot (``rank * N + i``), so that the experts of a node are consecutive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from r3.balance.baselines import eplb_fixed_owners, sequential, shadow
from r3.balance.plan import ExpertLayout, Ints, PlanArrays, PlanError

EVEN = 101
"""Load of the fullest rank, in percent of the mean, up to which borrowing costs a pass more than it saves
(benchmarks/bench_balance_step.py)."""


def transport(counts: Ints, layout: ExpertLayout, *, link_slots: int, within_node: bool) -> PlanArrays:
    """Returns plans for ``counts`` ``[M, L, R, E]``. ``link_slots``: borrowed slots of a rank that save link traffic.

    ``within_node``: no expert is borrowed from another node. An instance borrows nothing if its plan, for lack of
    slots, would load the fullest rank more than without borrowing; also, on one node or within nodes, if its ranks are
    even already (``EVEN``).
    """
    each = layout.ranks // layout.nodes
    sources = counts.reshape(*counts.shape[:2], layout.nodes, each, layout.experts).sum(axis=3, dtype=np.int32)
    by_slot = np.broadcast_to(layout.placement, (counts.shape[1], layout.experts))[:, None]
    sources = np.take_along_axis(sources, by_slot[None], axis=3).reshape(-1, *sources.shape[2:])
    demand = own_demand(sources) if within_node else even_demand(sources, link_slots * each, layout.slots * each)
    slots = rank_slots(demand, layout)
    plans = as_plans(slots, layout, counts)
    owner_max = sources.sum(axis=1).reshape(len(sources), layout.ranks, -1).sum(axis=2).max(axis=1)
    keep = slots.load.reshape(len(sources), -1).max(axis=1) > owner_max
    if within_node or layout.nodes == 1:
        total = sources.reshape(len(sources), -1).sum(axis=1, dtype=np.int64)
        keep |= 100 * layout.ranks * owner_max.astype(np.int64) <= EVEN * total
    if not keep.any():
        return plans
    mask, unbalanced = keep.reshape(*counts.shape[:2], 1, 1), PlanArrays.identity(layout, counts)
    borrowed = np.where(mask, unbalanced.borrowed, plans.borrowed)
    return PlanArrays(layout, borrowed, np.where(mask, unbalanced.load, plans.load), unbalanced.counts)


def rank_slots(demand: Ints, layout: ExpertLayout) -> Slots:
    """Spread the nodes' ``demand`` ``[B, K, E]`` evenly over their ranks; the result has P = B * K problems."""
    each, own = layout.ranks // layout.nodes, own_experts(demand)
    expert = np.arange(layout.experts, dtype=np.int32).reshape(layout.nodes, each, layout.experts_per_rank)
    tokens = demand[:, own].reshape(-1, each, layout.experts_per_rank)
    slots = Slots.with_own_experts(np.tile(expert, (len(demand), 1, 1)), tokens, layout.slots)
    foreign = np.where(own, 0, demand).reshape(-1, layout.experts)
    borrowed = int((foreign > 0).sum(axis=1).max(initial=0))
    largest = np.argsort(-foreign, axis=1, kind="stable")[:, :borrowed].astype(np.int32)
    borrow_largest(slots, largest, np.take_along_axis(foreign, largest, axis=1))
    level(slots)
    return slots


def as_plans(slots: Slots, layout: ExpertLayout, counts: Ints) -> PlanArrays:
    """Returns ``slots`` as plans over logical experts, for ``counts`` ``[M, L, R, E]``."""
    lead = (*counts.shape[:2], layout.ranks, layout.experts_per_rank + layout.slots)
    expert, tokens = slots.expert.reshape(lead), slots.tokens.reshape(lead)
    placement = np.broadcast_to(layout.placement, (lead[1], layout.experts))
    logical = np.where(expert < 0, -1, placement[np.arange(lead[1])[:, None, None], expert])
    load = np.zeros((*lead[:2], layout.experts, layout.ranks), np.int32)
    batch, layer, rank, slot = np.nonzero(tokens)
    load[batch, layer, logical[batch, layer, rank, slot], rank] = tokens[batch, layer, rank, slot]
    return PlanArrays(layout, np.ascontiguousarray(logical[..., layout.experts_per_rank :]), load, counts)


def own_experts(counts: Ints) -> NDArray[np.bool_]:
    """Returns ``[K, E]``: which node owns each expert."""
    nodes, experts = counts.shape[1:]
    return np.arange(nodes)[:, None] == np.arange(experts) * nodes // experts


def own_demand(counts: Ints) -> Ints:
    """Returns ``[B, K, E]``: tokens of each expert that each node computes if no node borrows."""
    return np.where(own_experts(counts), counts.sum(axis=1, keepdims=True), 0).astype(np.int32)


def even_demand(counts: Ints, imports: int, limit: int) -> Ints:
    """Returns ``[B, K, E]``: tokens of each expert that each node computes when loads are even.

    Each node borrows, for its own tokens, the ``imports`` foreign experts that most of its tokens use; then loads are
    made even. ``counts``: tokens by source node. A node borrows at most ``limit`` experts.
    """
    own, nodes = own_experts(counts), counts.shape[1]
    reach = min(limit * (nodes - 1), counts.shape[2] - counts.shape[2] // nodes)
    preferred = np.argsort(np.where(own, 1, -counts), axis=2, kind="stable")[..., :reach].astype(np.int32)
    demand = np.zeros_like(counts)
    chosen = preferred[..., : min(imports, limit)]
    np.put_along_axis(demand, chosen, np.take_along_axis(counts, chosen, axis=2), axis=2)
    rest = counts.sum(axis=1, keepdims=True) - demand.sum(axis=1, keepdims=True)
    demand += np.where(own, rest, 0).astype(np.int32)
    _NodeTransport(counts, demand, preferred, min(limit, imports * 5 // 4), limit).make_even()
    return demand


@dataclass(frozen=True, eq=False)
class _Pairs:
    """For each of ``rows`` a node ``source`` with too many tokens and a node ``target`` with too few."""

    rows: Ints
    source: Ints
    target: Ints


@dataclass(frozen=True, eq=False)
class _NodeTransport:
    """Moves tokens between nodes by changing ``demand`` ``[B, K, E]`` in place.

    ``preferred`` ``[B, K, F]``: a node's foreign experts, those that most of its own tokens use first. A node borrows
    up to ``own_limit`` experts for its own tokens only, and up to ``limit`` if even loads need it.
    """

    counts: Ints
    demand: Ints
    preferred: Ints
    own_limit: int
    limit: int

    def make_even(self) -> None:
        """Move tokens from the fullest node to the emptiest until all have their share, or nothing moves.

        Half of the excess leaves as new loans, which reduces traffic from the target to the source, and half by ending
        the smallest loans of the source, which adds traffic in the other direction: both directions stay alike, and so
        does the number of loans.
        """
        nodes = self.demand.shape[1]
        share = (self.demand.sum(axis=(1, 2))[:, None] + np.arange(nodes)[::-1]) // nodes
        rows = np.arange(len(self.demand))
        while len(rows):
            excess = self.demand[rows].sum(axis=2) - share[rows]
            source, target = excess.argmax(axis=1), excess.argmin(axis=1)
            index = np.arange(len(rows))
            amount = np.minimum(excess[index, source], -excess[index, target])
            pairs = _Pairs(rows, source, target)
            remaining = amount - amount // 2 + self._apply(self._lend, pairs, amount // 2)
            for move in (self._end_loans, self._lend, self._lend_more):
                remaining = self._apply(move, pairs, remaining)
            rows = rows[remaining < amount]

    def _apply(self, move: Callable[[_Pairs, Ints], Ints], pairs: _Pairs, amount: Ints) -> Ints:
        """Returns what remains of ``amount`` after ``move``, which gets only the rows with a nonzero amount."""
        busy = np.flatnonzero(amount)
        remaining = np.zeros_like(amount)
        remaining[busy] = move(_Pairs(pairs.rows[busy], pairs.source[busy], pairs.target[busy]), amount[busy])
        return remaining

    def _lend(self, pairs: _Pairs, amount: Ints) -> Ints:
        """The target borrows more experts of the source, for its own tokens only."""
        expert, lent, source_tokens = self._preferred_by_target(pairs)
        new = ~lent & self._is_owner(expert, pairs.source)
        new &= new.cumsum(axis=1) <= self.own_limit - lent.sum(axis=1, keepdims=True)
        own = self.counts[pairs.rows[:, None], pairs.target[:, None], expert]
        return self._move(pairs, expert, np.where(new, np.minimum(source_tokens, own), 0), amount)

    def _lend_more(self, pairs: _Pairs, amount: Ints) -> Ints:
        """The target also computes tokens of other nodes, first with experts that it borrows already."""
        expert, lent, source_tokens = self._preferred_by_target(pairs)
        remaining = self._move(pairs, expert, np.where(lent, source_tokens, 0), amount)
        new = ~lent & (source_tokens > 0)
        new &= new.cumsum(axis=1) <= self.limit - lent.sum(axis=1, keepdims=True)
        return self._move(pairs, expert, np.where(new, source_tokens, 0), remaining)

    def _end_loans(self, pairs: _Pairs, amount: Ints) -> Ints:
        """The source returns tokens to experts of the target that it borrows, the smallest loans first."""
        expert = self.preferred[pairs.rows, pairs.source][:, ::-1]
        tokens = self.demand[pairs.rows[:, None], pairs.source[:, None], expert]
        return self._move(pairs, expert, np.where(self._is_owner(expert, pairs.target), tokens, 0), amount)

    def _preferred_by_target(self, pairs: _Pairs) -> tuple[Ints, NDArray[np.bool_], Ints]:
        """Returns ``[rows, F]``: the experts that the target prefers, whether it borrows them, and the source's tokens
        of them."""
        expert, rows = self.preferred[pairs.rows, pairs.target], pairs.rows[:, None]
        lent = self.demand[rows, pairs.target[:, None], expert] > 0
        return expert, lent, self.demand[rows, pairs.source[:, None], expert]

    def _is_owner(self, expert: Ints, node: Ints) -> NDArray[np.bool_]:
        return expert // (self.demand.shape[2] // self.demand.shape[1]) == node[:, None]

    def _move(self, pairs: _Pairs, expert: Ints, tokens: Ints, amount: Ints) -> Ints:
        """Move up to ``amount`` of ``tokens``, the first experts first; returns what remains of ``amount``."""
        moved = np.clip(amount[:, None] - (tokens.cumsum(axis=1) - tokens), 0, tokens).astype(np.int32)
        index, column = np.nonzero(moved)
        self.demand[pairs.rows[index], pairs.source[index], expert[index, column]] -= moved[index, column]
        self.demand[pairs.rows[index], pairs.target[index], expert[index, column]] += moved[index, column]
        return amount - moved.sum(axis=1)


@dataclass(frozen=True, eq=False)
class Slots:
    """What the ranks of a node hold and compute, changed in place: ``expert`` (-1: empty) and ``tokens`` ``[P, r, S]``,
    ``load`` ``[P, r]``.

    P nodes of instances at once, r ranks per node, S = N + X slots per rank; the first ``own`` (N) are parameter slots.
    """

    expert: Ints
    tokens: Ints
    load: Ints
    own: int

    @staticmethod
    def with_own_experts(expert: Ints, tokens: Ints, slots: int) -> Slots:
        """Ranks that hold their own experts ``[P, r, N]`` and ``slots`` empty slots each."""
        empty = (*tokens.shape[:2], slots)
        return Slots(
            np.concatenate([expert, np.full(empty, -1, np.int32)], axis=2),
            np.concatenate([tokens, np.zeros(empty, np.int32)], axis=2),
            tokens.sum(axis=2, dtype=np.int32),
            tokens.shape[2],
        )

    def add(self, rows: Ints, rank: Ints, expert: Ints, tokens: Ints) -> None:
        """Give ``tokens`` of ``expert`` to one rank per row: to its slot with that expert, or to an empty slot."""
        experts = self.expert[rows, rank]
        same = experts == expert[:, None]
        slot = np.where(same.any(axis=1), same.argmax(axis=1), (experts < 0).argmax(axis=1))
        self.expert[rows, rank, slot] = expert
        self.tokens[rows, rank, slot] += tokens
        self.load[rows, rank] += tokens

    def take(self, rows: Ints, rank: Ints, slot: Ints, tokens: Ints) -> None:
        """Take ``tokens`` from one slot per row; a borrowed slot without tokens becomes empty."""
        self.tokens[rows, rank, slot] -= tokens
        self.load[rows, rank] -= tokens
        idle = (self.tokens[rows, rank, slot] == 0) & (slot >= self.own)
        self.expert[rows[idle], rank[idle], slot[idle]] = -1

    def has_empty_slot(self, rows: Ints) -> NDArray[np.bool_]:
        """Returns bool ``[rows, r]``."""
        return np.any(self.expert[rows] < 0, axis=2)


def borrow_largest(slots: Slots, expert: Ints, tokens: Ints) -> None:
    """Borrow the experts ``[P, n]`` that have tokens, in this order, each on the least loaded rank with two empty slots
    (:func:`level` needs the second), or with one if no rank has two."""
    free = (slots.expert < 0).sum(axis=2)
    for column in range(tokens.shape[1]):
        rows = np.flatnonzero(tokens[:, column])
        penalty = np.maximum(2 - free[rows], 0) << 32
        rank = (slots.load[rows] + penalty).argmin(axis=1)
        slots.add(rows, rank, expert[rows, column], tokens[rows, column])
        free[rows, rank] -= 1


def level(slots: Slots) -> None:
    """Fill the emptiest rank up to its share with one expert of a rank above its share, until no rank is above.

    As in the alias method of sampling, the giving rank may fall below its share and is filled later: with experts large
    enough, every rank borrows at most one.
    """
    ranks = slots.load.shape[1]
    total = slots.load.sum(axis=1, keepdims=True)
    share = (total + np.arange(ranks)[::-1]) // ranks
    rows = np.arange(len(total))
    while len(rows):
        index = np.arange(len(rows))
        excess = slots.load[rows] - share[rows]
        deficit = np.where(slots.has_empty_slot(rows), -excess, 0)
        target = deficit.argmax(axis=1)
        largest = slots.tokens[rows].max(axis=2)
        fill = np.minimum(largest, deficit[index, target, None]).astype(np.int64) << 32
        source = np.where(excess > 0, fill + excess, -1).argmax(axis=1)
        slot = slots.tokens[rows, source].argmax(axis=1)
        amount = np.minimum(deficit[index, target], slots.tokens[rows, source, slot])
        amount = np.where(excess[index, source] > 0, amount, 0).astype(np.int32)
        going = amount > 0
        rows, source, target, slot, amount = (a[going] for a in (rows, source, target, slot, amount))
        expert = slots.expert[rows, source, slot]
        slots.take(rows, source, slot, amount)
        slots.add(rows, target, expert, amount)


Planner = Literal["foremoe", "eplb", "shadow", "sequential"]


@dataclass(frozen=True, eq=False)
class PlannerOptions:
    """How a pass is planned.

    ``link_slots``: how many of a rank's X borrowed slots ``foremoe`` uses to reduce traffic between nodes (None: half
    of them, at most 2). ``within_node``: ``foremoe`` borrows no expert from another node, as an update requires whose
    weights and gradients are exchanged within nodes. ``expected``: ``[L, E]``, the loads of the last step, by which
    ``eplb`` places replicas (None, in the first step: no replicas).
    """

    planner: Planner = "foremoe"
    link_slots: int | None = None
    within_node: bool = False
    expected: Ints | None = None

    def slots_for_links(self, layout: ExpertLayout) -> int:
        """Returns ``link_slots`` or its default. Raises PlanError if it exceeds the layout's borrowed slots."""
        if self.link_slots is None:
            return min(layout.slots // 2, 2)
        if not 0 <= self.link_slots <= layout.slots:
            raise PlanError(
                f"{self.link_slots} slots for links, a rank borrows {layout.slots}: expected 0 to {layout.slots}"
            )
        return self.link_slots


def plan_pass(counts: Ints, layout: ExpertLayout, options: PlannerOptions) -> PlanArrays:
    """Returns plans for the foreseen tokens ``counts``, int32 ``[M, L, R, E]``: equal counts give equal plans.

    Raises PlanError if the shape of ``counts`` does not match ``layout``, and for an unknown planner.
    """
    if counts.ndim != 4 or counts.shape[2:] != (layout.ranks, layout.experts):
        raise PlanError(f"counts are {counts.shape}, expected [M, L, {layout.ranks}, {layout.experts}]")
    match options.planner:
        case "foremoe":
            links = options.slots_for_links(layout)
            return transport(counts, layout, link_slots=links, within_node=options.within_node)
        case "shadow":
            return shadow(counts, layout)
        case "eplb" if options.expected is not None:
            return eplb_fixed_owners(counts, layout, options.expected)
        case "eplb" | "sequential":
            return sequential(counts, layout)
    raise PlanError(f"planner {options.planner!r} is not known: expected foremoe, eplb, shadow or sequential")
