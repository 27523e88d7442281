"""Baseline planners. Each plans for ``counts`` ``[M, L, R, E]``, batched over instances."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from r3.balance.cost import Floats
from r3.balance.plan import ExpertLayout, Ints, PlanArrays


def sequential(counts: Ints, layout: ExpertLayout) -> PlanArrays:
    """Returns plans without borrowing."""
    return PlanArrays.identity(layout, counts)


def shadow(counts: Ints, layout: ExpertLayout) -> PlanArrays:
    """FasterMoE's expert shadowing (He et al., PPoPP 2022): the heaviest expert of the fullest rank is copied to all
    ranks, each of which computes its own tokens of it. Repeats at most X times, while it lowers the maximum load."""
    seen = counts.reshape(-1, layout.ranks, layout.experts)
    rows, total = np.arange(len(seen)), seen.sum(axis=1)
    plans = PlanArrays.identity(layout, counts)
    load = plans.load.sum(axis=2).reshape(-1, layout.ranks)
    owner_rank = np.broadcast_to(layout.owner_rank, (*counts.shape[:2], layout.experts)).reshape(-1, layout.experts)
    shadowed = np.zeros(total.shape, bool)
    for _ in range(layout.slots):
        candidate = ~shadowed & (owner_rank == load.argmax(axis=1)[:, None])
        expert = np.where(candidate, total, -1).argmax(axis=1)
        new_load = load + seen[rows, :, expert]
        new_load[rows, owner_rank[rows, expert]] -= total[rows, expert]
        better = (new_load.max(axis=1) < load.max(axis=1)) & candidate[rows, expert]
        shadowed[rows, expert] |= better
        load = np.where(better[:, None], new_load, load)
    everywhere = shadowed.reshape(*counts.shape[:2], layout.experts, 1)
    load = np.where(everywhere, counts.swapaxes(2, 3), plans.load)
    return as_plans(load, np.broadcast_to(everywhere, load.shape), layout, counts)


def eplb(counts: Ints, layout: ExpertLayout, expected: Ints, redundant: int) -> PlanArrays:
    """DeepSeek's expert-parallel load balancer (EPLB): packs E + ``redundant`` * R replicas onto ranks by ``expected``
    loads.

    ``expected``: ``[L, E]`` of the last step, or ``[M, L, E]`` with foresight. Each further replica goes to the expert
    with the highest load per replica. Replicas are packed, heaviest first, onto the least loaded rank with an empty
    slot; tokens are spread evenly over the replicas, whatever their source. Owner ranks are ignored: a rank needs
    N + ``redundant`` borrowed slots.
    """
    none = np.zeros((layout.experts, layout.ranks), bool)
    return _spread(counts, layout, replicas(expected, none, redundant, layout.experts_per_rank + redundant))


def eplb_fixed_owners(counts: Ints, layout: ExpertLayout, expected: Ints) -> PlanArrays:
    """:func:`eplb` with every expert on its owner rank: only the replicas are packed, into the X borrowed slots."""
    return _spread(
        counts, layout, replicas(expected, layout.owner_mask, layout.slots, layout.experts_per_rank + layout.slots)
    )


def replicas(expected: Ints, fixed: NDArray[np.bool_], redundant: int, places: int) -> NDArray[np.bool_]:
    """Returns ``[..., E, R]``: the ranks that hold each expert. ``fixed``, of the same shape or without some leading
    axes: replicas whose rank is given. ``places``: slots per rank."""
    loads, shape = expected.reshape(-1, expected.shape[-1]), (*expected.shape, fixed.shape[-1])
    copies = _copies(loads, loads.shape[1] + redundant * shape[-1])
    holders = np.broadcast_to(fixed, shape).reshape(-1, *shape[-2:]).copy()
    _pack(holders, loads / copies, copies - holders.sum(axis=2), places)
    return holders.reshape(shape)


def _copies(loads: Ints, total: int) -> Ints:
    """Returns ``[B, E]``: the number of replicas of each expert."""
    copies, rows = np.ones(loads.shape, np.int64), np.arange(len(loads))
    for _ in range(total - loads.shape[1]):
        copies[rows, (loads / copies).argmax(axis=1)] += 1
    return copies


def _pack(holders: NDArray[np.bool_], weight: Floats, copies: Ints, places: int) -> None:
    """Add ``copies`` ``[B, E]`` of each expert to ``holders`` ``[B, E, R]``, in place. A rank gets an expert twice only
    if no other rank has an empty slot; that replica is lost."""
    rows = np.arange(len(weight))
    order = np.argsort(-weight, axis=1, kind="stable")
    experts = np.take_along_axis(order, _repeat(np.take_along_axis(copies, order, axis=1)), axis=1)
    used, load = holders.sum(axis=1), (weight[..., None] * holders).sum(axis=1)
    for expert in experts.T:
        blocked = holders[rows, expert] + 2.0 * (used >= places)
        rank = np.where(blocked > 0, 1e18 * blocked, load).argmin(axis=1)
        holders[rows, expert, rank] = True
        used[rows, rank] += 1
        load[rows, rank] += weight[rows, expert]


def _repeat(copies: Ints) -> Ints:
    """Returns ``[B, total]``: each row's column numbers, each repeated ``copies`` times; rows have one total."""
    return np.stack([np.repeat(np.arange(len(row)), row) for row in copies])


def _spread(counts: Ints, layout: ExpertLayout, holders: NDArray[np.bool_]) -> PlanArrays:
    """Spread each expert's tokens evenly over the ranks in ``holders`` ``[M, L, E, R]``, or ``[L, E, R]`` for all M."""
    holders = np.broadcast_to(holders, (*counts.shape[:2], layout.experts, layout.ranks))
    total, count = counts.sum(axis=2, dtype=np.int32)[..., None], holders.sum(axis=3, keepdims=True)
    index = holders.cumsum(axis=3) - 1
    return as_plans(np.where(holders, (total + count - 1 - index) // count, 0), holders, layout, counts)


def as_plans(load: Ints, holders: NDArray[np.bool_], layout: ExpertLayout, counts: Ints) -> PlanArrays:
    """Returns plans from the ``load`` and the ``holders`` of each expert, ``[M, L, E, R]`` or ``[M * L, E, R]``."""
    shape = (*counts.shape[:2], layout.experts, layout.ranks)
    borrowed = holders.reshape(shape) & ~layout.owner_mask
    return PlanArrays(layout, _fill_slots(borrowed, layout), load.reshape(shape).astype(np.int32), counts)


def _fill_slots(borrowed: NDArray[np.bool_], layout: ExpertLayout) -> Ints:
    """Returns the borrowed slots ``[M, L, R, X]`` from the mask of borrowed experts ``[M, L, E, R]``."""
    slots = np.full((*borrowed.shape[:2], layout.ranks, layout.slots), -1, np.int32)
    batch, layer, rank, expert = np.nonzero(borrowed.swapaxes(2, 3))
    slot = (borrowed.cumsum(axis=2) - 1)[batch, layer, expert, rank]
    slots[batch, layer, rank, slot] = expert
    return slots
