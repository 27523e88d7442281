"""Grids, counts and plans to test with."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from r3.balance import Grid, Plans
from r3.balance.plan import Ints


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Up to 3 machines of up to 4 ranks, any home order, for two layers the same or one each."""
    machines, each, homes = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ranks = machines * each
    orders = [draw(st.permutations(range(ranks * homes))) for _ in range(draw(st.integers(1, 2)))]
    home = np.array(orders[0] if len(orders) == 1 else orders, np.int32)
    machine = tuple(rank // each for rank in range(ranks))
    return Grid(ranks * homes, ranks, draw(st.integers(0, 3)), machine, home)


def skewed_counts(grid: Grid, seed: int, shape: tuple[int, int] = (2, 2), tokens: int = 2000) -> Ints:
    """``[M, L, R, E]``: experts of very different weight, some of them idle, ranks with different numbers of tokens."""
    rng = np.random.default_rng(seed)
    weight = rng.gamma(0.4, size=(*shape, 1, grid.experts)) * rng.gamma(2, size=(*shape, grid.ranks, 1))
    weight *= rng.random(weight.shape) < 0.9
    return (weight / weight.sum(axis=(2, 3), keepdims=True).clip(1e-9) * tokens).astype(np.int32)


def any_plans(grid: Grid, counts: Ints, seed: int) -> Plans:
    """Plans that no planner would make: borrowers at random, and each expert's tokens cut at random among its ranks."""
    rng = np.random.default_rng(seed)
    plans = Plans.identity(grid, counts)
    borrowed, load = plans.borrowed.copy(), np.zeros_like(plans.load)
    for at in np.ndindex(*counts.shape[:2]):
        home_rank = grid.layer(at[1]).home_rank
        holders = [[int(rank)] for rank in home_rank]
        for rank in range(grid.ranks):
            foreign = rng.permutation(np.flatnonzero(home_rank != rank))[: rng.integers(0, grid.slots + 1)]
            borrowed[at][rank, : len(foreign)] = foreign
            for expert in foreign:
                holders[expert].append(rank)
        for expert, ranks in enumerate(holders):
            share = rng.dirichlet(np.ones(len(ranks)) * 0.5)
            load[at][expert, ranks] = rng.multinomial(counts[at][:, expert].sum(), share)
    return Plans(grid, borrowed, load, counts)
