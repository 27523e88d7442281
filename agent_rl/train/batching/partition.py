"""Which sequences share a micro-batch, and which data rank gets it: even in cost, within a token budget. numpy only.

Data ranks wait for each other once a mini step, when gradients are summed; so each gets as even a share of the whole
cost as can be, in as few micro-batches as hold it. Where experts are spread over data ranks, those ranks exchange
tokens in every layer: they work in lockstep on rows of micro-batches, one a rank, and a row takes as long as its
dearest micro-batch and its fullest expert rank. So there the micro-batches are made equal, and neighbours in cost meet
in a row.

    sequences ─ differencing, by cost ─> groups of ranks in lockstep (1: a rank by itself)
              ─ longest first onto the cheapest micro-batch with room ─> micro-batches ─ sorted ─> rows ─> ranks
                                                                          expert loads, where known: swaps between rows

Everything here is deterministic.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from agent_rl.config import ParallelConfig
from agent_rl.errors import TrainerError
from agent_rl.train.batching.cost import TOKENS, SequenceCost

Deal = tuple[tuple[tuple[int, ...], ...], ...]
"""``deal[rank][micro_batch]`` = the sequences packed there. A rank may have none, where there are few sequences."""

Loads = Sequence[NDArray[np.float64]]
"""A sequence's (token, expert) pairs, ``[moe_layers, expert_ranks]`` (:func:`.cost.expert_loads`)."""

Bin = list[int]


def deal(
    lengths: Sequence[int],
    *,
    budget: int,
    ranks: int,
    cost: SequenceCost = TOKENS,
    lockstep: int = 1,
    loads: Loads | None = None,
) -> Deal:
    """Spread sequences over ``ranks`` data ranks and over as few micro-batches of ``budget`` tokens as hold them.

    ``lockstep`` neighbouring data ranks share their experts: they get equally many micro-batches (one fewer where
    sequences are too few to fill the last row). ``loads`` says how the sequences' tokens fall to the expert ranks.
    Raises TrainerError for a sequence longer than ``budget`` tokens or shorter than 2, and for none at all.
    """
    if not lengths:
        raise TrainerError("no sequences to train on")
    check_lengths(lengths, budget)
    if ranks % lockstep:
        raise ValueError(f"{ranks} data ranks are not groups of {lockstep} in lockstep")
    costs = cost.of(lengths)
    dealt: list[tuple[tuple[int, ...], ...]] = []
    for members in differencing(costs, ranks // lockstep):
        rows = _rows(_bins(members, lengths, costs, budget, lockstep), costs, lockstep)
        if loads is not None and len(rows) > 1:
            _swap_between_rows(rows, costs, loads, cost.expert)
        for rank in range(lockstep):
            dealt.append(tuple(tuple(row[rank]) for row in rows if row[rank]))
    return tuple(dealt)


def lockstep_ranks(parallel: ParallelConfig) -> int:
    """How many neighbouring data ranks exchange tokens with each other's experts; 1: none.

    Expert-parallel groups are neighbouring ranks of a pipeline stage, whose tensor and context peers come first.
    """
    peers = parallel.tensor * parallel.context
    if parallel.expert <= peers and peers % parallel.expert == 0:
        return 1
    if parallel.expert % peers == 0:
        return parallel.expert // peers
    return parallel.world_size // (parallel.pipeline * peers)  # groups that straddle data ranks: all of them


def check_lengths(lengths: Sequence[int], budget: int) -> None:
    """Raises TrainerError for a sequence that no micro-batch can hold, or that holds nothing to predict."""
    for index, length in enumerate(lengths):
        if length > budget:
            raise TrainerError(f"sequence {index} has {length} tokens and {over_budget(budget, length)}")
        if length < 2:
            raise TrainerError(f"sequence {index} has {length} token(s): at least 2 are needed to predict one")


def over_budget(budget: int, longest: int) -> str:
    """What is wrong with ``train.microbatch_tokens``, and what would be right."""
    return (
        f"train.microbatch_tokens is {budget}: raise it to {longest} or more (if memory does not allow that: "
        f"train.recompute=full, or train.parallel.context=c, whose ranks hold 1/c of it each), or lower "
        f"rollout.max_tokens"
    )


def differencing(costs: Sequence[float], parts: int) -> list[Bin]:
    """Divide items into ``parts`` of nearly equal cost: Karmarkar and Karp's largest differencing method (1982).

    The two partial divisions that differ most within themselves are joined, the dear parts of one with the cheap parts
    of the other, until one is left. The parts come dearest first.
    """
    if parts == 1:
        return [list(range(len(costs)))]
    heap: list[tuple[float, int, list[tuple[float, Bin]]]] = [
        (-item, index, [(item, [index]), *((0.0, Bin()) for _ in range(parts - 1))]) for index, item in enumerate(costs)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, order, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], order, joined))
    return [sorted(members) for _, members in heap[0][2]]


def _bins(
    members: Sequence[int], lengths: Sequence[int], costs: Sequence[float], budget: int, lockstep: int
) -> list[Bin]:
    """As few micro-batches (a multiple of ``lockstep``) as hold ``members``, even in cost; some may be empty."""
    count = max(1, -(-sum(lengths[i] for i in members) // (budget * lockstep)))
    while (bins := _fill(members, lengths, costs, budget, count * lockstep)) is None:
        count += 1
    return bins


def _fill(
    members: Sequence[int], lengths: Sequence[int], costs: Sequence[float], budget: int, count: int
) -> list[Bin] | None:
    """Longest first, each onto the cheapest of the micro-batches that have room for it; None where none has."""
    bins: list[Bin] = [[] for _ in range(count)]
    spent, room = [0.0] * count, [budget] * count
    for index in sorted(members, key=lambda i: (-lengths[i], i)):
        open_bins = [b for b in range(count) if room[b] >= lengths[index]]
        if not open_bins:
            return None
        target = min(open_bins, key=lambda b: spent[b])
        bins[target].append(index)
        spent[target] += costs[index]
        room[target] -= lengths[index]
    return bins


def _rows(bins: list[Bin], costs: Sequence[float], ranks: int) -> list[list[Bin]]:
    """Neighbours in cost side by side, the dearest first."""
    bins = sorted(bins, key=lambda members: -sum(costs[i] for i in members))
    rows = [bins[start : start + ranks] for start in range(0, len(bins), ranks)]
    # Every other row is turned round: rank 0 must not get the dearest of each row.
    return [row if index % 2 == 0 else row[::-1] for index, row in enumerate(rows)]


def _swap_between_rows(rows: list[list[Bin]], costs: Sequence[float], loads: Loads, expert: float) -> None:
    """Exchange micro-batches between rows wherever that lowers the sum of the rows' costs, in place.

    A row costs its dearest micro-batch's FLOPs outside the experts and, a layer, those of its fullest expert rank.
    """

    def dense(members: Bin) -> float:
        return sum(costs[i] - expert * float(loads[i].sum()) for i in members)

    def load(members: Bin) -> NDArray[np.float64]:
        return sum((loads[i] for i in members), np.zeros_like(loads[0]))

    def row_cost(row: Sequence[tuple[float, NDArray[np.float64]]]) -> float:
        held = np.sum([part for _, part in row], axis=0)
        return max(part for part, _ in row) + expert * float(held.max(axis=-1).sum())

    known = [[(dense(members), load(members)) for members in row] for row in rows]
    current = [row_cost(row) for row in known]
    for a, b in combinations(range(len(rows)), 2):
        for i in range(len(rows[a])):
            for j in range(len(rows[b])):
                one = [*known[a][:i], known[b][j], *known[a][i + 1 :]]
                other = [*known[b][:j], known[a][i], *known[b][j + 1 :]]
                swapped = row_cost(one), row_cost(other)
                if sum(swapped) < (current[a] + current[b]) * (1 - 1e-9):
                    known[a], known[b], (current[a], current[b]) = one, other, swapped
                    rows[a][i], rows[b][j] = rows[b][j], rows[a][i]
