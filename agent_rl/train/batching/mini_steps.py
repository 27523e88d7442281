"""A global step's samples, split into the optimizer's updates (mini steps), each dealt out to the data ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agent_rl.train.batching.cost import TOKENS, SequenceCost, expert_loads
from agent_rl.train.batching.partition import deal
from agent_rl.types import Sample


@dataclass(frozen=True, slots=True)
class MiniStepShare:
    """A data rank's part of one optimizer update: its micro-batches (sample indices), and the update's sampled tokens
    and the trajectories with any over *all* ranks, which the loss is divided by."""

    micro_batches: tuple[tuple[int, ...], ...]
    sampled_tokens: int
    sequences: int


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
    """``shares[data_rank][mini_step]``: consecutive samples go to the same mini step, so groups stay together;
    all branches of a trajectory always do.

    Within a mini step they are dealt out by :func:`agent_rl.train.batching.partition.deal`, which looks at their routes
    where experts are spread over data ranks.
    """
    units = siblings(samples)
    parts = [part for part in np.array_split(np.arange(len(units)), mini_steps) if len(part)]
    shares: list[list[MiniStepShare]] = [[] for _ in range(ranks)]
    for part in parts:
        ids = [index for unit in part.tolist() for index in units[unit]]
        sampled = [int(samples[index].loss_mask[1:].sum()) for index in ids]
        trained = {index for index, count in zip(ids, sampled, strict=True) if count}
        sequences = sum(not trained.isdisjoint(units[unit]) for unit in part.tolist())
        routings = [routing for index in ids if (routing := samples[index].routing) is not None]
        loads = None
        if lockstep > 1 and len(routings) == len(ids):
            loads = [expert_loads(routing, expert_ranks) for routing in routings]
        lengths = [len(samples[index].tokens) for index in ids]
        dealt = deal(lengths, budget=budget, ranks=ranks, cost=cost, lockstep=lockstep, loads=loads)
        for rank, micro_batches in enumerate(dealt):
            named = tuple(tuple(ids[i] for i in micro) for micro in micro_batches)
            shares[rank].append(MiniStepShare(named, sum(sampled), sequences))
    return tuple(tuple(share) for share in shares)


def siblings(samples: Sequence[Sample]) -> list[list[int]]:
    """The samples' indices, those of one trajectory together, in the order of each trajectory's first."""
    units: dict[object, list[int]] = {}
    for index, sample in enumerate(samples):
        units.setdefault(("alone", index) if sample.trajectory is None else sample.trajectory, []).append(index)
    return list(units.values())
