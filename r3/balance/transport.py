"""The planner ``foremoe``: transport on two levels, batched over instances, in integers.

First between machines (:mod:`r3.balance.machines`): each borrows the experts of others that most of its own tokens go
to, which spares the links, and the machines' loads are made even. Then between the ranks of each machine
(:mod:`r3.balance.ranks`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from r3.balance.machines import even_demand, home_demand, own_experts
from r3.balance.plan import Grid, Ints, Plans
from r3.balance.ranks import Slots, level, place

EVEN = 101
"""The fullest rank's load, in percent of the mean, up to which borrowing costs a pass more than it saves
(benchmarks/bench_balance_step.py)."""


def transport(counts: Ints, grid: Grid, *, link_slots: int, within_node: bool) -> Plans:
    """Plans for ``counts`` ``[M, L, R, E]``. ``link_slots``: of a rank's borrowed slots, how many spare the links.

    ``within_node``: no expert is borrowed from another machine. Nothing is borrowed where too few slots would leave
    the fullest rank fuller than at home, nor, where no link can be spared, of ranks that are even (``EVEN``).
    """
    each = grid.ranks // grid.machines
    sources = counts.reshape(*counts.shape[:2], grid.machines, each, grid.experts).sum(axis=3, dtype=np.int32)
    by_slot = np.broadcast_to(grid.home, (counts.shape[1], grid.experts))[:, None]
    sources = np.take_along_axis(sources, by_slot[None], axis=3).reshape(-1, *sources.shape[2:])
    demand = home_demand(sources) if within_node else even_demand(sources, link_slots * each, grid.slots * each)
    slots = rank_slots(demand, grid)
    plans = as_plans(slots, grid, counts)
    at_home = sources.sum(axis=1).reshape(len(sources), grid.ranks, -1).sum(axis=2).max(axis=1)
    stay = slots.load.reshape(len(sources), -1).max(axis=1) > at_home
    if within_node or grid.machines == 1:
        total = sources.reshape(len(sources), -1).sum(axis=1, dtype=np.int64)
        stay |= 100 * grid.ranks * at_home.astype(np.int64) <= EVEN * total
    at = stay.reshape(*counts.shape[:2], 1, 1)
    return _mixed(at, Plans.identity(grid, counts), plans) if stay.any() else plans


def rank_slots(demand: Ints, grid: Grid) -> Slots:
    """The machines' demand ``[B, K, E]`` on their ranks, made even; P = B * K, experts are named by home slot."""
    each, own = grid.ranks // grid.machines, own_experts(demand)
    expert = np.arange(grid.experts, dtype=np.int32).reshape(grid.machines, each, grid.homes)
    slots = Slots.of_homes(
        np.tile(expert, (len(demand), 1, 1)), demand[:, own].reshape(-1, each, grid.homes), grid.slots
    )
    foreign = np.where(own, 0, demand).reshape(-1, grid.experts)
    borrowed = int((foreign > 0).sum(axis=1).max(initial=0))
    largest = np.argsort(-foreign, axis=1, kind="stable")[:, :borrowed].astype(np.int32)
    place(slots, largest, np.take_along_axis(foreign, largest, axis=1))
    level(slots)
    return slots


def as_plans(slots: Slots, grid: Grid, counts: Ints) -> Plans:
    """The same by logical experts, for ``counts`` ``[M, L, R, E]``."""
    lead = (*counts.shape[:2], grid.ranks, grid.homes + grid.slots)
    expert, tokens = slots.expert.reshape(lead), slots.tokens.reshape(lead)
    home = np.broadcast_to(grid.home, (lead[1], grid.experts))
    logical = np.where(expert < 0, -1, home[np.arange(lead[1])[:, None, None], expert])
    load = np.zeros((*lead[:2], grid.experts, grid.ranks), np.int32)
    at, layer, rank, slot = np.nonzero(tokens)
    load[at, layer, logical[at, layer, rank, slot], rank] = tokens[at, layer, rank, slot]
    return Plans(grid, np.ascontiguousarray(logical[..., grid.homes :]), load, counts)


def _mixed(where: NDArray[np.bool_], some: Plans, others: Plans) -> Plans:
    """``some`` plans ``where`` ``[M, L, 1, 1]`` says so, ``others`` elsewhere."""
    borrowed, load = np.where(where, some.borrowed, others.borrowed), np.where(where, some.load, others.load)
    return Plans(some.grid, borrowed, load, some.counts)
