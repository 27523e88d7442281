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


def links(plans: PlanArrays) -> Ints:
    """Returns ``[M, L, K, K]``: tokens sent from node to node (0 within a node), as the quotas of a plan send them."""
    supply = by_node(plans.layout, plans.counts.swapaxes(2, 3))
    need = by_node(plans.layout, plans.load)
    within = np.minimum(supply, need)
    supply_start, supply_stop = _intervals(supply - within)
    need_start, need_stop = _intervals(need - within)
    stop = np.minimum(supply_stop[..., :, None], need_stop[..., None, :])
    start = np.maximum(supply_start[..., :, None], need_start[..., None, :])
    return np.maximum(stop - start, 0).sum(axis=2)


def busiest_link(plans: PlanArrays) -> Ints:
    """Returns ``[M, L]``: tokens over the busiest link from one node to another."""
    return links(plans).max(axis=(-2, -1))


def borrowed(plans: PlanArrays) -> Floats:
    """Returns ``[M, L]``: mean number of experts that a rank borrows."""
    return (plans.borrowed >= 0).sum(axis=-1).mean(axis=-1)


def _intervals(amounts: Ints) -> tuple[Ints, Ints]:
    """Returns the start and stop of each of ``[..., K]`` amounts laid end to end."""
    stops = amounts.cumsum(axis=-1)
    return stops - amounts, stops
