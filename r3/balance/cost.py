"""The cost of a plan: load of the fullest rank and traffic of the busiest link."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from r3.balance.plan import ExpertLayout, Ints, PlanArrays

Floats = NDArray[np.float64]


def rank_load(plans: PlanArrays) -> Ints:
    """Returns ``[M, L, R]``: tokens that each rank computes."""
    return plans.load.sum(axis=2)


def imbalance(load: Ints) -> Floats:
    """Returns the load of the fullest rank over the mean, for ``load`` ``[..., R]``; 1 without tokens."""
    mean = load.mean(axis=-1)
    return np.divide(load.max(axis=-1), mean, out=np.ones_like(mean), where=mean > 0)


def by_node(layout: ExpertLayout, ranks: Ints) -> Ints:
    """Sum ``[..., R]`` over the ranks of each node to ``[..., K]``."""
    return ranks.reshape(*ranks.shape[:-1], layout.nodes, -1).sum(axis=-1)


def traffic(supply: Ints, need: Ints) -> tuple[Ints, Ints]:
    """Returns the tokens that each node sends and receives, ``[..., K]``, from those of each expert that its ranks
    route (``supply``) and compute (``need``), ``[..., K, E]``: a node computes its own tokens first."""
    excess = supply.astype(np.int32) - need
    return np.maximum(excess, 0).sum(axis=-1), np.maximum(-excess, 0).sum(axis=-1)


def busiest_link(plans: PlanArrays) -> Ints:
    """Returns ``[M, L]``: tokens over the busiest link of a node to the others, in the direction with more."""
    supply = by_node(plans.layout, plans.counts.swapaxes(2, 3)).swapaxes(2, 3)
    sent, received = traffic(supply, by_node(plans.layout, plans.load).swapaxes(2, 3))
    return np.maximum(sent, received).max(axis=-1)


def borrowed(plans: PlanArrays) -> Floats:
    """Returns ``[M, L]``: mean number of experts that a rank borrows."""
    return (plans.borrowed >= 0).sum(axis=-1).mean(axis=-1)


def borrowed_by_reach(plans: PlanArrays) -> tuple[Ints, Ints]:
    """Returns ``[M, L]``: the most experts that a rank borrows or lends across nodes, and the most that a rank borrows
    from its own node."""
    layout, used = plans.layout, plans.borrowed >= 0
    owners = np.broadcast_to(layout.owner_rank, (plans.borrowed.shape[1], layout.experts))
    owner = owners[np.arange(len(owners))[:, None, None], np.where(used, plans.borrowed, 0)]
    node = np.array(layout.node_of_rank)
    far = used & (node[owner] != node[:, None])
    lent = np.zeros(plans.borrowed.shape[:3], np.int64)
    batch, layer, rank, slot = np.nonzero(far)
    np.add.at(lent, (batch, layer, owner[batch, layer, rank, slot]), 1)
    crossing = np.maximum(far.sum(axis=3), lent).max(axis=2)
    return crossing, (used & ~far).sum(axis=3).max(axis=2)
