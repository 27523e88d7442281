"""All planners that a config can name (``train.balance.planner``), and the planner ``foremoe``: transport on two
levels, batched over instances, in integers.

1. Between nodes: each node borrows the experts of other nodes that most of its own tokens use, which saves traffic on
   the links, and the loads of the nodes are made even.
2. Between the ranks of each node.

Experts are named by their parameter slot (``rank * N + i``), so that the experts of a node are consecutive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from r3.balance.baselines import eplb_fixed_owners, sequential, shadow
from r3.balance.cost import traffic
from r3.balance.plan import ExpertLayout, Ints, PlanArrays, PlanError
from r3.balance.time_model import TimeModel, Work

WORTHWHILE = 101
"""Time without borrowing, in percent of the time of a plan, up to which borrowing costs a pass more than it saves
(benchmarks/bench_balance_step.py)."""

SAMPLED = 32
"""Instances by which a pass chooses its :class:`Reach`."""


@dataclass(frozen=True, slots=True)
class Reach:
    """From where ranks borrow. ``within_node``: from ranks of the same node only. ``slots``: how many of a rank's X
    slots are used. ``imports``: how many experts a node borrows to save traffic between nodes."""

    within_node: bool
    slots: int
    imports: int = 0

    @staticmethod
    def choices(layout: ExpertLayout) -> list[Reach]:
        """Those that a pass chooses from: within nodes, and across nodes with half of the slots or all of them. Half
        of these are for imports; with more, too few remain to make the loads of ranks even."""
        slots, each = layout.slots, layout.ranks // layout.nodes
        if layout.nodes == 1:
            return [Reach(True, slots)]
        used = dict.fromkeys((-(-slots // 2), slots))
        return [Reach(True, slots), *(Reach(False, number, number * each // 2) for number in used)]


def transport(counts: Ints, layout: ExpertLayout, reach: Reach, time: TimeModel) -> PlanArrays:
    """Returns plans for ``counts`` ``[M, L, R, E]``. An instance borrows nothing if its plan saves no time."""
    sources = _sources(counts, layout)
    slots, work = _planned(sources, layout, reach)
    plans = as_plans(slots, layout, counts)
    keep = 100 * time.time(_unbalanced_work(sources, layout)) <= WORTHWHILE * time.time(work)
    if not keep.any():
        return plans
    mask, unbalanced = keep.reshape(*counts.shape[:2], 1, 1), PlanArrays.identity(layout, counts)
    borrowed = np.where(mask, unbalanced.borrowed, plans.borrowed)
    return PlanArrays(layout, borrowed, np.where(mask, unbalanced.load, plans.load), unbalanced.counts)


def choose_reach(counts: Ints, layout: ExpertLayout, time: TimeModel) -> Reach:
    """Returns the choice that leads to the shortest pass over ``counts``, by the time of some instances."""
    choices = Reach.choices(layout)
    if len(choices) == 1 or not counts.size:
        return choices[0]
    total = counts.shape[0] * counts.shape[1]
    batch, layer = np.divmod(np.linspace(0, total - 1, min(total, SAMPLED)).astype(int), counts.shape[1])
    chosen = _chosen_layers(layout, layer)
    times = _times(_sources(counts[batch, layer][None], chosen), chosen, time)
    return choices[int(times.sum(axis=1).argmin())]


def layer_times(sources: Ints, layout: ExpertLayout, time: TimeModel) -> Ints:
    """Returns ``[L]``: picoseconds of the planned micro-batches ``[M, L, K, E]``, tokens by source node."""
    times = _times(_by_slot(sources, layout), layout, time)
    return times.reshape(len(times), *sources.shape[:2]).sum(axis=1).min(axis=0)


def _times(sources: Ints, layout: ExpertLayout, time: TimeModel) -> Ints:
    """Returns ``[choices, B]``: picoseconds of the instances ``sources`` ``[B, K, E]`` by :meth:`Reach.choices`."""
    unbalanced = time.time(_unbalanced_work(sources, layout))
    planned = [time.time(_planned(sources, layout, reach)[1]) for reach in Reach.choices(layout)]
    return np.minimum(planned, unbalanced)


def _chosen_layers(layout: ExpertLayout, layers: Ints) -> ExpertLayout:
    return layout if layout.placement.ndim == 1 else replace(layout, placement=layout.placement[layers])


def _sources(counts: Ints, layout: ExpertLayout) -> Ints:
    """Returns ``[B, K, E]``: tokens by source node and parameter slot."""
    return _by_slot(by_source_node(counts, layout), layout)


def by_source_node(counts: Ints, layout: ExpertLayout) -> Ints:
    """Sum ``[M, L, R, E]`` over the source ranks of each node to ``[M, L, K, E]``."""
    each = layout.ranks // layout.nodes
    return counts.reshape(*counts.shape[:2], layout.nodes, each, layout.experts).sum(axis=3, dtype=np.int32)


def _by_slot(sources: Ints, layout: ExpertLayout) -> Ints:
    by_slot = np.broadcast_to(layout.placement, (sources.shape[1], layout.experts))[:, None]
    return np.take_along_axis(sources, by_slot[None], axis=3).reshape(-1, *sources.shape[2:])


def _planned(sources: Ints, layout: ExpertLayout, reach: Reach) -> tuple[Slots, Work]:
    """Returns what the ranks hold and compute, and the work of each instance."""
    if reach.within_node:
        demand = own_demand(sources)
    else:
        demand = even_demand(sources, reach.imports, reach.slots * (layout.ranks // layout.nodes))
    slots = rank_slots(demand, layout, reach.slots)
    return slots, _work(slots, sources, demand, layout)


def _work(slots: Slots, sources: Ints, demand: Ints, layout: ExpertLayout) -> Work:
    """The work of plans in the form of the planner; :func:`.time_model.work_of` has that of any plans."""
    lead, each = (len(sources), layout.ranks), layout.ranks // layout.nodes
    held = slots.expert[..., slots.own :].reshape(*lead, slots.expert.shape[2] - slots.own)
    used, owner = held >= 0, held // layout.experts_per_rank
    far = used & (owner // each != np.arange(layout.ranks)[:, None] // each)
    row, rank, slot = np.nonzero(far)
    lent = np.bincount(row * layout.ranks + owner[row, rank, slot], minlength=lead[0] * lead[1]).reshape(lead)
    crossing = np.maximum(far.sum(axis=2), lent).max(axis=1)
    load = slots.load.reshape(lead).max(axis=1)
    return Work(load.astype(np.int64), _link(sources, demand), crossing, (used & ~far).sum(axis=2).max(axis=1))


def _unbalanced_work(sources: Ints, layout: ExpertLayout) -> Work:
    load = sources.sum(axis=1).reshape(len(sources), layout.ranks, -1).sum(axis=2).max(axis=1)
    nothing = np.zeros(len(sources), np.int64)
    return Work(load.astype(np.int64), _link(sources, own_demand(sources)), nothing, nothing)


def _link(sources: Ints, demand: Ints) -> Ints:
    sent, received = traffic(sources, demand)
    return np.maximum(sent, received).max(axis=1).astype(np.int64)


def rank_slots(demand: Ints, layout: ExpertLayout, borrowed_slots: int) -> Slots:
    """Spread the nodes' ``demand`` ``[B, K, E]`` evenly over their ranks; the result has P = B * K problems."""
    each, own = layout.ranks // layout.nodes, own_experts(demand)
    expert = np.arange(layout.experts, dtype=np.int32).reshape(layout.nodes, each, layout.experts_per_rank)
    tokens = demand[:, own].reshape(-1, each, layout.experts_per_rank)
    slots = Slots.with_own_experts(np.tile(expert, (len(demand), 1, 1)), tokens, borrowed_slots)
    foreign = np.where(own, 0, demand).reshape(-1, layout.experts)
    borrowed = int((foreign > 0).sum(axis=1).max(initial=0))
    largest = np.argsort(-foreign, axis=1, kind="stable")[:, :borrowed].astype(np.int32)
    borrow_largest(slots, largest, np.take_along_axis(foreign, largest, axis=1))
    level(slots)
    return slots


def as_plans(slots: Slots, layout: ExpertLayout, counts: Ints) -> PlanArrays:
    """Returns ``slots`` as plans over logical experts, for ``counts`` ``[M, L, R, E]``."""
    lead = (*counts.shape[:2], layout.ranks, slots.expert.shape[2])
    expert, tokens = slots.expert.reshape(lead), slots.tokens.reshape(lead)
    placement = np.broadcast_to(layout.placement, (lead[1], layout.experts))
    logical = np.where(expert < 0, -1, placement[np.arange(lead[1])[:, None, None], expert])
    load = np.zeros((*lead[:2], layout.experts, layout.ranks), np.int32)
    batch, layer, rank, slot = np.nonzero(tokens)
    load[batch, layer, logical[batch, layer, rank, slot], rank] = tokens[batch, layer, rank, slot]
    borrowed = np.full((*lead[:3], layout.slots), -1, np.int32)
    borrowed[..., : lead[3] - slots.own] = logical[..., slots.own :]
    return PlanArrays(layout, borrowed, load, counts)


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
    own, (nodes, experts) = own_experts(counts), counts.shape[1:]
    by_owner = np.argsort(-counts.reshape(len(counts), nodes, nodes, -1), axis=3, kind="stable").astype(np.int32)
    by_owner += (np.arange(nodes, dtype=np.int32) * (experts // nodes))[:, None]
    demand = np.zeros_like(counts)
    if number := min(imports, limit, experts - experts // nodes):
        unequal = counts * np.int64(-experts) + np.arange(experts)  # without ties every library chooses the same
        chosen = np.argpartition(np.where(own, experts, unequal), number - 1, axis=2)[..., :number]
        np.put_along_axis(demand, chosen, np.take_along_axis(counts, chosen, axis=2), axis=2)
    rest = counts.sum(axis=1, keepdims=True) - demand.sum(axis=1, keepdims=True)
    demand += np.where(own, rest, 0).astype(np.int32)
    _NodeTransport(counts, demand, by_owner, min(limit, imports * 5 // 4), limit).make_even()
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

    ``by_owner`` ``[B, K, K, E / K]``: the experts of each owner node, those first that most of a node's own tokens use.
    A node borrows up to ``own_limit`` experts for its own tokens only, and up to ``limit`` if even loads need it.
    """

    counts: Ints
    demand: Ints
    by_owner: Ints
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
            for move in (self._end_loans, self._lend, self._extend_loans, self._lend_more):
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
        expert = self.by_owner[pairs.rows, pairs.target, pairs.source]
        new = self._tokens(pairs, pairs.target, expert) == 0
        new &= new.cumsum(axis=1) <= self.own_limit - self._loans(pairs)
        own = self.counts[pairs.rows[:, None], pairs.target[:, None], expert]
        available = np.minimum(self._tokens(pairs, pairs.source, expert), own)
        return self._move(pairs, expert, np.where(new, available, 0), amount)

    def _extend_loans(self, pairs: _Pairs, amount: Ints) -> Ints:
        """The target computes more tokens, also of other nodes, with the experts of the source that it borrows."""
        expert = self.by_owner[pairs.rows, pairs.target, pairs.source]
        lent = self._tokens(pairs, pairs.target, expert) > 0
        return self._move(pairs, expert, np.where(lent, self._tokens(pairs, pairs.source, expert), 0), amount)

    def _lend_more(self, pairs: _Pairs, amount: Ints) -> Ints:
        """The target computes tokens of any experts that the source computes, first of those that it borrows."""
        foreign = ~own_experts(self.counts)[pairs.target]
        preference = np.where(foreign, -self.counts[pairs.rows, pairs.target], 1)
        expert = np.argsort(preference, axis=1, kind="stable")[:, : int(foreign.sum(axis=1).max(initial=0))]
        lent, available = (self._tokens(pairs, node, expert) for node in (pairs.target, pairs.source))
        remaining = self._move(pairs, expert, np.where(lent > 0, available, 0), amount)
        new = (available > 0) & (lent == 0)
        new &= new.cumsum(axis=1) <= self.limit - self._loans(pairs)
        return self._move(pairs, expert, np.where(new, available, 0), remaining)

    def _end_loans(self, pairs: _Pairs, amount: Ints) -> Ints:
        """The source returns tokens to experts of the target that it borrows, the smallest loans first."""
        expert = self.by_owner[pairs.rows, pairs.source, pairs.target][:, ::-1]
        return self._move(pairs, expert, self._tokens(pairs, pairs.source, expert), amount)

    def _tokens(self, pairs: _Pairs, node: Ints, expert: Ints) -> Ints:
        """Returns ``[rows, n]``: the tokens of ``expert`` that ``node`` computes."""
        return self.demand[pairs.rows[:, None], node[:, None], expert]

    def _loans(self, pairs: _Pairs) -> Ints:
        """Returns ``[rows, 1]``: how many experts the target borrows."""
        foreign = ~own_experts(self.counts)[pairs.target]
        return ((self.demand[pairs.rows, pairs.target] > 0) & foreign).sum(axis=1, keepdims=True)

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
    """How a pass is planned. ``foremoe`` minimizes ``time``. ``expected``: ``[L, E]``, the loads of the last step, by
    which ``eplb`` places replicas (None, in the first step: no replicas)."""

    planner: Planner = "foremoe"
    time: TimeModel = field(default_factory=TimeModel)
    expected: Ints | None = None


def plan_pass(counts: Ints, layout: ExpertLayout, options: PlannerOptions) -> PlanArrays:
    """Returns plans for the foreseen tokens ``counts``, int32 ``[M, L, R, E]``: equal counts give equal plans.

    Raises PlanError if the shape of ``counts`` does not match ``layout``, and for an unknown planner.
    """
    if counts.ndim != 4 or counts.shape[2:] != (layout.ranks, layout.experts):
        raise PlanError(f"counts are {counts.shape}, expected [M, L, {layout.ranks}, {layout.experts}]")
    match options.planner:
        case "foremoe":
            return transport(counts, layout, choose_reach(counts, layout, options.time), options.time)
        case "shadow":
            return shadow(counts, layout)
        case "eplb" if options.expected is not None:
            return eplb_fixed_owners(counts, layout, options.expected)
        case "eplb" | "sequential":
            return sequential(counts, layout)
    raise PlanError(f"planner {options.planner!r} is not known: expected foremoe, eplb, shadow or sequential")
