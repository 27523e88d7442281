"""The planner ``foremoe``: transport on two levels, batched over instances, in integers.

First between machines (:mod:`r3.balance.machines`): each borrows the experts of others that most of its own tokens go
to, which spares the links, and the machines' loads are made even. Then between the ranks of each machine
(:mod:`r3.balance.ranks`).
"""

from __future__ import annotations

import numpy as np

from r3.balance.machines import even_demand, home_demand, own_experts
from r3.balance.plan import Grid, Ints, Plans
from r3.balance.ranks import Slots, level, place


def transport(counts: Ints, grid: Grid, *, link_slots: int, within_machine: bool) -> Plans:
    """Plans for ``counts`` ``[M, L, R, E]``. ``link_slots``: of a rank's borrowed slots, how many spare the links.

    ``within_machine``: no expert is borrowed from another machine.
    """
    each = grid.ranks // grid.machines
    sources = counts.reshape(-1, grid.machines, each, grid.experts).sum(axis=2, dtype=np.int32)[..., grid.home]
    demand = home_demand(sources) if within_machine else even_demand(sources, link_slots * each, grid.slots * each)
    return as_plans(rank_slots(demand, grid), grid, counts)


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
    expert, tokens = (a.reshape(-1, grid.ranks, grid.homes + grid.slots) for a in (slots.expert, slots.tokens))
    logical = np.where(expert < 0, -1, grid.home[expert]).astype(np.int32)
    load = np.zeros((len(expert), grid.experts, grid.ranks), np.int32)
    at, rank, slot = np.nonzero(tokens)
    load[at, logical[at, rank, slot], rank] = tokens[at, rank, slot]
    borrowed, lead = logical[:, :, grid.homes :], counts.shape[:2]
    return Plans(grid, borrowed.reshape(*lead, grid.ranks, -1), load.reshape(*lead, *load.shape[1:]), counts)
