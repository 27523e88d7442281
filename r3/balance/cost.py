"""What a plan costs: the fullest rank, the busiest link, and the time that follows from both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from r3.balance.plan import Grid, Ints, Plans

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cost:
    """T = n_c (alpha L_max + beta) + n_x (gamma C_max + delta), in seconds.

    ``alpha`` a token of expert compute and ``gamma`` a token over a link between machines, in seconds; ``beta`` and
    ``delta`` what a computation and an exchange take without tokens; n_c computations and n_x exchanges of a layer.
    """

    alpha: float
    gamma: float
    beta: float = 0.0
    delta: float = 0.0
    computations: int = 1
    exchanges: int = 2

    def seconds(self, plans: Plans) -> Floats:
        """``[M, L]``: of every micro-batch and layer."""
        compute = self.alpha * rank_load(plans).max(axis=-1) + self.beta
        link = self.gamma * busiest_link(plans) + self.delta
        return self.computations * compute + self.exchanges * link


def rank_load(plans: Plans) -> Ints:
    """``[M, L, R]``: tokens that each rank computes."""
    return plans.load.sum(axis=2)


def imbalance(load: Ints) -> Floats:
    """The fullest rank's load over the mean, of ``[..., R]``; 1 where there are no tokens."""
    mean = load.mean(axis=-1)
    return np.divide(load.max(axis=-1), mean, out=np.ones_like(mean), where=mean > 0)


def machine_floor(grid: Grid, counts: Ints) -> Floats:
    """``[M, L]``: the least imbalance that plans can have whose tokens stay on their expert's home machine."""
    load = by_machine(grid, Plans.identity(grid, counts).load).sum(axis=2)
    return imbalance(load)


def by_machine(grid: Grid, ranks: Ints) -> Ints:
    """``[..., R]`` summed to ``[..., K]``."""
    return ranks.reshape(*ranks.shape[:-1], grid.machines, -1).sum(axis=-1)


def links(plans: Plans) -> Ints:
    """``[M, L, K, K]``: tokens that cross from machine to machine (0 within one), as quotas send them."""
    supply = by_machine(plans.grid, plans.counts.swapaxes(2, 3))
    need = by_machine(plans.grid, plans.load)
    near = np.minimum(supply, need)
    starts, stops = _stretches(supply - near)
    others, ends = _stretches(need - near)
    crossing = np.minimum(stops[..., :, None], ends[..., None, :]) - np.maximum(
        starts[..., :, None], others[..., None, :]
    )
    return np.maximum(crossing, 0).sum(axis=2)


def busiest_link(plans: Plans) -> Ints:
    """``[M, L]``: tokens over the fullest link from one machine to another."""
    return links(plans).max(axis=(-2, -1))


def borrowed(plans: Plans) -> Floats:
    """``[M, L]``: experts that a rank borrows, in the mean."""
    return (plans.borrowed >= 0).sum(axis=-1).mean(axis=-1)


def _stretches(amounts: Ints) -> tuple[Ints, Ints]:
    """Where each of ``[..., K]`` starts and stops when they are laid end to end."""
    stops = amounts.cumsum(axis=-1)
    return stops - amounts, stops
