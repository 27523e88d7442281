"""Assign sequences to optimizer updates, data ranks and micro-batches: even cost within a token budget. numpy only.

Data ranks wait for each other once per mini step, when gradients are reduced. Each rank therefore gets an even share of
the cost, in as few micro-batches as possible. Where experts are distributed over data ranks, these ranks exchange
tokens in every layer and work in lockstep on rows of micro-batches, one per rank. A row takes as long as its most
expensive micro-batch and its most loaded expert rank. There the micro-batches are made equal, and similar ones form a
row.

    sequences ─ differencing, by cost ─> groups of ranks in lockstep (1: a single rank)
              ─ longest first, to the cheapest micro-batch with capacity ─> micro-batches ─ sorted ─> rows ─> ranks
                                                                           expert loads, if known: swaps between rows

The result is deterministic.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from agent_rl.config import ParallelConfig
from agent_rl.errors import TrainerError
from agent_rl.train.batching.cost import TOKENS, SequenceCost, expert_loads
from agent_rl.types import Sample, drawn_mask

Partition = tuple[tuple[tuple[int, ...], ...], ...]
"""``partition[rank][micro_batch]``: indices of sequences. With few sequences a rank may have no micro-batch."""

Loads = Sequence[NDArray[np.float64]]
"""The (token, expert) pairs of each sequence, ``[moe_layers, expert_ranks]`` (:func:`.cost.expert_loads`)."""

Bin = list[int]


def partition_sequences(
    lengths: Sequence[int],
    *,
    budget: int,
    ranks: int,
    cost: SequenceCost = TOKENS,
    lockstep: int = 1,
    loads: Loads | None = None,
) -> Partition:
    """Assign sequences to ``ranks`` data ranks, in as few micro-batches of ``budget`` tokens as possible.

    ``lockstep`` neighbouring data ranks share their experts and get equal numbers of micro-batches (one fewer if the
    sequences do not fill the last row). ``loads``: how each sequence's tokens fall on the expert ranks. Raises
    TrainerError for a sequence of more than ``budget`` or fewer than 2 tokens, and for no sequences.
    """
    if not lengths:
        raise TrainerError("no sequences to train on")
    check_lengths(lengths, budget)
    if ranks % lockstep:
        raise ValueError(f"{ranks} data ranks cannot form groups of {lockstep} in lockstep")
    costs = cost.of(lengths)
    partition: list[tuple[tuple[int, ...], ...]] = []
    for members in differencing(costs, ranks // lockstep):
        rows = _rows(_bins(members, lengths, costs, budget, lockstep), costs, lockstep)
        if loads is not None and len(rows) > 1:
            _swap_between_rows(rows, costs, loads, cost.expert)
        for rank in range(lockstep):
            partition.append(tuple(tuple(row[rank]) for row in rows if row[rank]))
    return tuple(partition)


def lockstep_ranks(parallel: ParallelConfig) -> int:
    """The number of neighbouring data ranks that exchange tokens with each other's experts; 1 for none.

    Expert-parallel groups are neighbouring ranks of a pipeline stage, in which tensor and context peers come first.
    """
    peers = parallel.tensor * parallel.context
    if parallel.expert <= peers and peers % parallel.expert == 0:
        return 1
    if parallel.expert % peers == 0:
        return parallel.expert // peers
    return parallel.world_size // (parallel.pipeline * peers)  # groups across data ranks: all data ranks


def check_lengths(lengths: Sequence[int], budget: int) -> None:
    """Raises TrainerError for a sequence longer than ``budget`` or shorter than 2 tokens."""
    for index, length in enumerate(lengths):
        if length > budget:
            raise TrainerError(f"sequence {index} has {length} tokens and {over_budget(budget, length)}")
        if length < 2:
            raise TrainerError(f"sequence {index} has {length} token(s): at least 2 are needed to predict one")


def over_budget(budget: int, longest: int) -> str:
    """The error text about ``train.microbatch_tokens``, with its remedies."""
    return (
        f"train.microbatch_tokens is {budget}: raise it to {longest} or more (if memory does not allow that: "
        f"train.recompute=full, or train.parallel.context=c, whose ranks hold 1/c of it each), or lower "
        f"rollout.max_tokens"
    )


def differencing(costs: Sequence[float], parts: int) -> list[Bin]:
    """Divide items into ``parts`` of similar cost: the largest differencing method of Karmarkar and Karp (1982).

    It joins the two partial divisions with the largest internal difference, expensive parts of one with cheap parts of
    the other, until one division is left. Parts are sorted by falling cost.
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


def _bins(ids: Sequence[int], lengths: Sequence[int], costs: Sequence[float], budget: int, lockstep: int) -> list[Bin]:
    """As few micro-batches (a multiple of ``lockstep``) as possible for ``ids``, even in cost; some may be
    empty."""
    count = max(1, -(-sum(lengths[i] for i in ids) // (budget * lockstep)))
    while (bins := _fill(ids, lengths, costs, budget, count * lockstep)) is None:
        count += 1
    return bins


def _fill(
    ids: Sequence[int], lengths: Sequence[int], costs: Sequence[float], budget: int, count: int
) -> list[Bin] | None:
    """Place the longest first, each in the cheapest micro-batch with capacity; None where one does not fit."""
    bins: list[Bin] = [[] for _ in range(count)]
    spent, capacity = [0.0] * count, [budget] * count
    for index in sorted(ids, key=lambda i: (-lengths[i], i)):
        open_bins = [b for b in range(count) if capacity[b] >= lengths[index]]
        if not open_bins:
            return None
        target = min(open_bins, key=lambda b: spent[b])
        bins[target].append(index)
        spent[target] += costs[index]
        capacity[target] -= lengths[index]
    return bins


def _rows(bins: list[Bin], costs: Sequence[float], ranks: int) -> list[list[Bin]]:
    """Rows of micro-batches of similar cost, by falling cost."""
    bins = sorted(bins, key=lambda members: -sum(costs[i] for i in members))
    rows = [bins[start : start + ranks] for start in range(0, len(bins), ranks)]
    # Every other row is reversed, so that rank 0 does not get the most expensive batch of each row.
    return [row if index % 2 == 0 else row[::-1] for index, row in enumerate(rows)]


def _swap_between_rows(rows: list[list[Bin]], costs: Sequence[float], loads: Loads, expert: float) -> None:
    """Swap micro-batches between rows, in place, while that lowers the sum of the row costs.

    A row costs the FLOPs outside the experts of its most expensive micro-batch, and per layer those of its most loaded
    expert rank.
    """

    def dense(members: Bin) -> float:
        return sum(costs[i] - expert * float(loads[i].sum()) for i in members)

    def load(members: Bin) -> NDArray[np.float64]:
        return sum((loads[i] for i in members), np.zeros_like(loads[0]))

    def row_cost(row: Sequence[tuple[float, NDArray[np.float64]]]) -> float:
        total = np.sum([part for _, part in row], axis=0)
        return max(part for part, _ in row) + expert * float(total.max(axis=-1).sum())

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


@dataclass(frozen=True, slots=True)
class MiniStepShare:
    """A data rank's share of one optimizer update: its micro-batches (sample indices). ``sampled_tokens`` (those of
    :func:`agent_rl.types.drawn_mask`), ``sequences`` (trajectories with such a token) and ``weight`` (these tokens' sum
    of sample weights) count over *all* ranks; the loss is divided by one of them, and the loss of ``observed`` tokens
    by their number."""

    micro_batches: tuple[tuple[int, ...], ...]
    sampled_tokens: int
    sequences: int
    weight: float
    observed: int = 0


def split_step(
    samples: Sequence[Sample],
    *,
    mini_steps: int,
    budget: int,
    ranks: int,
    cost: SequenceCost = TOKENS,
    lockstep: int = 1,
    expert_ranks: int = 1,
) -> tuple[tuple[MiniStepShare, ...], ...]:
    """``shares[data_rank][mini_step]``: consecutive samples go to the same mini step, so groups stay together. All
    branches of a trajectory stay together.

    :func:`partition_sequences` distributes each mini step, by the samples' routes where experts are distributed over
    data ranks.
    """
    units = group_by_trajectory(samples)
    mini_step_units = [part for part in np.array_split(np.arange(len(units)), mini_steps) if len(part)]
    shares: list[list[MiniStepShare]] = [[] for _ in range(ranks)]
    for part in mini_step_units:
        ids = [index for unit in part.tolist() for index in units[unit]]
        sampled = [int(drawn_mask(samples[index]).sum()) for index in ids]
        trained = {index for index, count in zip(ids, sampled, strict=True) if count}
        sequences = sum(not trained.isdisjoint(units[unit]) for unit in part.tolist())
        weight = sum(samples[index].weight * count for index, count in zip(ids, sampled, strict=True))
        observed = sum(int(np.sum(mask)) for index in ids if (mask := samples[index].observed) is not None)
        routings = [routing for index in ids if (routing := samples[index].routing) is not None]
        loads = None
        if lockstep > 1 and len(routings) == len(ids):
            loads = [expert_loads(routing, expert_ranks) for routing in routings]
        lengths = [len(samples[index].tokens) for index in ids]
        partition = partition_sequences(lengths, budget=budget, ranks=ranks, cost=cost, lockstep=lockstep, loads=loads)
        for rank, micro_batches in enumerate(partition):
            named = tuple(tuple(ids[i] for i in micro) for micro in micro_batches)
            shares[rank].append(MiniStepShare(named, sum(sampled), sequences, weight, observed))
    return tuple(tuple(share) for share in shares)


def group_by_trajectory(samples: Sequence[Sample]) -> list[list[int]]:
    """The indices of the samples grouped by trajectory, in the order of each trajectory's first sample."""
    units: dict[object, list[int]] = {}
    for index, sample in enumerate(samples):
        units.setdefault(("alone", index) if sample.trajectory is None else sample.trajectory, []).append(index)
    return list(units.values())
