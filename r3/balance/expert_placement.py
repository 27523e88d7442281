"""Stage 1: which rank is an expert's home, by the loads of whole steps; kept for many steps."""

from __future__ import annotations

import numpy as np

from r3.balance.plan import Grid, Ints


def measured_home(loads: Ints, grid: Grid) -> Ints:
    """``[L, E]`` home orders for :class:`Grid`, by ``loads`` ``[L, E]``: tokens of each expert over one or more steps.

    Machines first, then the ranks of each, take the heaviest expert that is left into the one with the least load that
    has room. A rank's experts ascend, so that equal loads give the contiguous order on one rank.
    """
    layers, each = len(loads), grid.ranks // grid.machines
    machine = _longest_first(loads, grid.machines)
    by_machine = np.argsort(machine, axis=1, kind="stable").reshape(layers * grid.machines, -1)
    inside = np.take_along_axis(loads, by_machine.reshape(layers, -1), axis=1).reshape(by_machine.shape)
    order = np.argsort(_longest_first(inside, each), axis=1, kind="stable")
    return np.take_along_axis(by_machine, order, axis=1).reshape(layers, -1).astype(np.int32)


def _longest_first(loads: Ints, bins: int) -> Ints:
    """``[B, E]``: the bin of each item of ``loads`` ``[B, E]``; every bin gets equally many."""
    at, room = np.arange(len(loads)), loads.shape[1] // bins
    bin_of = np.zeros(loads.shape, np.int64)
    restore, count = np.zeros((len(loads), bins), np.int64), np.zeros((len(loads), bins), np.int64)
    for item in np.argsort(-loads, axis=1, kind="stable").T:
        best = np.where(count < room, restore, np.iinfo(np.int64).max).argmin(axis=1)
        bin_of[at, item] = best
        restore[at, best] += loads[at, item]
        count[at, best] += 1
    return bin_of
