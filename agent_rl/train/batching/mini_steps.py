"""A global step's samples, split into the optimizer's updates (mini steps), each dealt out to the data ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agent_rl.train.batching.cost import TOKENS, SequenceCost, expert_loads
from agent_rl.train.batching.dealing import deal
from agent_rl.types import Sample


@dataclass(frozen=True, slots=True)
class MiniStepShare:
    """A data rank's part of one optimizer update: its micro-batches (sample indices), and the update's sampled tokens
    and sequences with any over *all* ranks, which the loss is divided by."""

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
    """``shares[data_rank][mini_step]``: consecutive samples go to the same mini step, so groups stay together.

    Within a mini step they are dealt out by :func:`agent_rl.train.batching.dealing.deal`, which looks at their routes
    where experts are spread over data ranks.
    """
    parts = [part for part in np.array_split(np.arange(len(samples)), mini_steps) if len(part)]
    shares: list[list[MiniStepShare]] = [[] for _ in range(ranks)]
    for part in parts:
        ids = part.tolist()
        sampled = [int(samples[index].loss_mask[1:].sum()) for index in ids]
        routings = [routing for index in ids if (routing := samples[index].routing) is not None]
        loads = None
        if lockstep > 1 and len(routings) == len(ids):
            loads = [expert_loads(routing, expert_ranks) for routing in routings]
        lengths = [len(samples[index].tokens) for index in ids]
        dealt = deal(lengths, budget=budget, ranks=ranks, cost=cost, lockstep=lockstep, loads=loads)
        for rank, micro_batches in enumerate(dealt):
            named = tuple(tuple(ids[i] for i in micro) for micro in micro_batches)
            shares[rank].append(MiniStepShare(named, sum(sampled), sum(map(bool, sampled))))
    return tuple(tuple(share) for share in shares)
