"""Expert layouts, counts and plans for the tests of balancing."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from r3.balance import ExpertLayout, PlanArrays
from r3.balance.plan import Ints


@st.composite
def layouts(draw: st.DrawFn) -> ExpertLayout:
    """Up to 3 nodes of up to 4 ranks; any placement, one for both layers or one for each."""
    nodes, each, per_rank = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ranks = nodes * each
    orders = [draw(st.permutations(range(ranks * per_rank))) for _ in range(draw(st.integers(1, 2)))]
    placement = np.array(orders[0] if len(orders) == 1 else orders, np.int32)
    node_of_rank = tuple(rank // each for rank in range(ranks))
    return ExpertLayout(ranks * per_rank, ranks, draw(st.integers(0, 3)), node_of_rank, placement)


def skewed_counts(layout: ExpertLayout, seed: int, shape: tuple[int, int] = (2, 2), tokens: int = 2000) -> Ints:
    """Counts ``[M, L, R, E]``: skewed experts, some without tokens; ranks with different numbers of tokens."""
    rng = np.random.default_rng(seed)
    weight = rng.gamma(0.4, size=(*shape, 1, layout.experts)) * rng.gamma(2, size=(*shape, layout.ranks, 1))
    weight *= rng.random(weight.shape) < 0.9
    return (weight / weight.sum(axis=(2, 3), keepdims=True).clip(1e-9) * tokens).astype(np.int32)


def any_plans(layout: ExpertLayout, counts: Ints, seed: int) -> PlanArrays:
    """Random plans: random borrowers, and each expert's tokens split at random between its ranks."""
    rng = np.random.default_rng(seed)
    plans = PlanArrays.identity(layout, counts)
    borrowed, load = plans.borrowed.copy(), np.zeros_like(plans.load)
    for at in np.ndindex(*counts.shape[:2]):
        owner_rank = layout.layer(at[1]).owner_rank
        holders = [[int(rank)] for rank in owner_rank]
        for rank in range(layout.ranks):
            foreign = rng.permutation(np.flatnonzero(owner_rank != rank))[: rng.integers(0, layout.slots + 1)]
            borrowed[at][rank, : len(foreign)] = foreign
            for expert in foreign:
                holders[expert].append(rank)
        for expert, ranks in enumerate(holders):
            share = rng.dirichlet(np.ones(len(ranks)) * 0.5)
            load[at][expert, ranks] = rng.multinomial(counts[at][:, expert].sum(), share)
    return PlanArrays(layout, borrowed, load, counts)
