"""What the planner is compared with. Each is batched over instances, and plans for ``counts`` ``[M, L, R, E]``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from r3.balance.cost import Floats
from r3.balance.plan import Grid, Ints, Plans


def sequential(counts: Ints, grid: Grid) -> Plans:
    """Every expert at home, as without balancing."""
    return Plans.identity(grid, counts)


def shadow(counts: Ints, grid: Grid) -> Plans:
    """As FasterMoE's shadowing: the heaviest expert of the fullest rank goes to all ranks, each of which computes its
    own tokens of it, as long as the fullest rank then has less, and at most X times."""
    seen = counts.reshape(-1, grid.ranks, grid.experts)
    at, total = np.arange(len(seen)), seen.sum(axis=1)
    plans = Plans.identity(grid, counts)
    load = plans.load.sum(axis=2).reshape(-1, grid.ranks)
    home_rank = np.broadcast_to(grid.home_rank, (*counts.shape[:2], grid.experts)).reshape(-1, grid.experts)
    shadowed = np.zeros(total.shape, bool)
    for _ in range(grid.slots):
        candidate = ~shadowed & (home_rank == load.argmax(axis=1)[:, None])
        expert = np.where(candidate, total, -1).argmax(axis=1)
        spread = load + seen[at, :, expert]
        spread[at, home_rank[at, expert]] -= total[at, expert]
        better = (spread.max(axis=1) < load.max(axis=1)) & candidate[at, expert]
        shadowed[at, expert] |= better
        load = np.where(better[:, None], spread, load)
    everywhere = shadowed.reshape(*counts.shape[:2], grid.experts, 1)
    load = np.where(everywhere, counts.swapaxes(2, 3), plans.load)
    return as_plans(load, np.broadcast_to(everywhere, load.shape), grid, counts)


def eplb(counts: Ints, grid: Grid, expected: Ints, redundant: int) -> Plans:
    """DeepSeek's expert-parallel load balancer: E + ``redundant`` * R replicas packed onto ranks by ``expected`` loads.

    ``expected``: ``[L, E]`` of the last step, or with foresight ``[M, L, E]``. The heaviest expert a replica gets one
    more until all are given out; replicas go, heaviest first, to the least loaded rank with a place; tokens are spread
    evenly over replicas, wherever they come from. Homes are not kept: a rank needs N + ``redundant`` borrowed slots.
    """
    nowhere = np.zeros((grid.experts, grid.ranks), bool)
    return _spread(counts, grid, replicas(expected, nowhere, redundant, grid.homes + redundant))


def eplb_around_homes(counts: Ints, grid: Grid, expected: Ints) -> Plans:
    """The same where every expert stays at home and only the replicas are packed, into the X borrowed slots."""
    return _spread(counts, grid, replicas(expected, grid.at_home, grid.slots, grid.homes + grid.slots))


def replicas(expected: Ints, fixed: NDArray[np.bool_], redundant: int, places: int) -> NDArray[np.bool_]:
    """``[..., E, R]``: the ranks that hold each expert. ``fixed``, of the same shape or without some of its
    first axes: replicas that have their rank already."""
    loads, shape = expected.reshape(-1, expected.shape[-1]), (*expected.shape, fixed.shape[-1])
    copies = _copies(loads, loads.shape[1] + redundant * shape[-1])
    held = np.broadcast_to(fixed, shape).reshape(-1, *shape[-2:]).copy()
    _pack(held, loads / copies, copies - held.sum(axis=2), places)
    return held.reshape(shape)


def _copies(loads: Ints, total: int) -> Ints:
    """``[B, E]``: how many replicas each expert gets."""
    copies, at = np.ones(loads.shape, np.int64), np.arange(len(loads))
    for _ in range(total - loads.shape[1]):
        copies[at, (loads / copies).argmax(axis=1)] += 1
    return copies


def _pack(held: NDArray[np.bool_], weight: Floats, copies: Ints, places: int) -> None:
    """Add to ``held`` ``[B, E, R]``, in place, ``copies`` ``[B, E]`` of each expert. A rank gets an expert twice only
    where no other has room; that replica is lost."""
    at = np.arange(len(weight))
    order = np.argsort(-weight, axis=1, kind="stable")
    experts = np.take_along_axis(order, _repeat(np.take_along_axis(copies, order, axis=1)), axis=1)
    used, load = held.sum(axis=1), (weight[..., None] * held).sum(axis=1)
    for expert in experts.T:
        blocked = held[at, expert] + 2.0 * (used >= places)
        rank = np.where(blocked > 0, 1e18 * blocked, load).argmin(axis=1)
        held[at, expert, rank] = True
        used[at, rank] += 1
        load[at, rank] += weight[at, expert]


def _repeat(copies: Ints) -> Ints:
    """``[B, total]``: each row's places 0, 1, ... as often as ``copies`` says; rows have one total."""
    return np.stack([np.repeat(np.arange(len(row)), row) for row in copies])


def _spread(counts: Ints, grid: Grid, held: NDArray[np.bool_]) -> Plans:
    """Each expert's tokens, evenly over the ranks that hold it: ``[M, L, E, R]``, or ``[L, E, R]`` for all M."""
    held = np.broadcast_to(held, (*counts.shape[:2], grid.experts, grid.ranks))
    total, holders = counts.sum(axis=2, dtype=np.int32)[..., None], held.sum(axis=3, keepdims=True)
    place = held.cumsum(axis=3) - 1
    return as_plans(np.where(held, (total + holders - 1 - place) // holders, 0), held, grid, counts)


def as_plans(load: Ints, held: NDArray[np.bool_], grid: Grid, counts: Ints) -> Plans:
    """Plans from the ``load`` and the holders of each expert, ``[M, L, E, R]`` or with both axes in one."""
    shape = (*counts.shape[:2], grid.experts, grid.ranks)
    away = held.reshape(shape) & ~grid.at_home
    return Plans(grid, _slots_of(away, grid), load.reshape(shape).astype(np.int32), counts)


def _slots_of(away: NDArray[np.bool_], grid: Grid) -> Ints:
    """``[M, L, R, X]``: the experts that ranks hold ``[M, L, E, R]`` and that are not at home there, in their slots."""
    borrowed = np.full((*away.shape[:2], grid.ranks, grid.slots), -1, np.int32)
    at, layer, rank, expert = np.nonzero(away.swapaxes(2, 3))
    slot = (away.cumsum(axis=2) - 1)[at, layer, expert, rank]
    borrowed[at, layer, rank, slot] = expert
    return borrowed
