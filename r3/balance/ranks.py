"""The second level of transport: an even load of the ranks of one machine.

Each machine of each instance is a problem of its own, P of them at once; a machine has r ranks and every rank
S = N + X slots. Experts are named by their home slot (``rank * N + i``), -1 where a slot is empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from r3.balance.plan import Ints


@dataclass(frozen=True, eq=False)
class Slots:
    """What ranks hold and compute, changed in place: ``expert`` and ``tokens`` ``[P, r, S]``, ``load`` ``[P, r]``."""

    expert: Ints
    tokens: Ints
    load: Ints
    homes: int

    @staticmethod
    def of_homes(expert: Ints, tokens: Ints, slots: int) -> Slots:
        """Ranks with their home experts ``[P, r, N]`` alone, and ``slots`` empty slots each."""
        empty = (*tokens.shape[:2], slots)
        return Slots(
            np.concatenate([expert, np.full(empty, -1, np.int32)], axis=2),
            np.concatenate([tokens, np.zeros(empty, np.int32)], axis=2),
            tokens.sum(axis=2, dtype=np.int32),
            tokens.shape[2],
        )

    def add(self, rows: Ints, rank: Ints, expert: Ints, tokens: Ints) -> None:
        """Give ``tokens`` of ``expert`` to one rank of each row: to its slot with that expert, or to an empty one."""
        held = self.expert[rows, rank]
        same = held == expert[:, None]
        slot = np.where(same.any(axis=1), same.argmax(axis=1), (held < 0).argmax(axis=1))
        self.expert[rows, rank, slot] = expert
        self.tokens[rows, rank, slot] += tokens
        self.load[rows, rank] += tokens

    def take(self, rows: Ints, rank: Ints, slot: Ints, tokens: Ints) -> None:
        """Take ``tokens`` from a slot of each row; a borrowed slot without tokens is empty again."""
        self.tokens[rows, rank, slot] -= tokens
        self.load[rows, rank] -= tokens
        idle = (self.tokens[rows, rank, slot] == 0) & (slot >= self.homes)
        self.expert[rows[idle], rank[idle], slot[idle]] = -1

    def has_room(self, rows: Ints) -> NDArray[np.bool_]:
        """Bool ``[rows, r]``: ranks with an empty slot."""
        return np.any(self.expert[rows] < 0, axis=2)


def place(slots: Slots, expert: Ints, tokens: Ints) -> None:
    """Borrow the experts ``[P, n]`` that have tokens, in this order, each on the least loaded rank with two empty slots
    (the second is for :func:`level`), or with one where no rank has two."""
    free = (slots.expert < 0).sum(axis=2)
    for turn in range(tokens.shape[1]):
        rows = np.flatnonzero(tokens[:, turn])
        crowded = np.maximum(2 - free[rows], 0) << 32
        rank = (slots.load[rows] + crowded).argmin(axis=1)
        slots.add(rows, rank, expert[rows, turn], tokens[rows, turn])
        free[rows, rank] -= 1


def level(slots: Slots) -> None:
    """Fill the emptiest rank up to its share with one expert of a rank that has too much, until no rank is over.

    As in the alias method of sampling, the giver may be left with too little and is filled in its turn: with experts
    large enough, every rank borrows at most one.
    """
    ranks = slots.load.shape[1]
    total = slots.load.sum(axis=1, keepdims=True)
    share = (total + np.arange(ranks)[::-1]) // ranks
    rows = np.arange(len(total))
    while len(rows):
        at = np.arange(len(rows))
        over = slots.load[rows] - share[rows]
        room = np.where(slots.has_room(rows), -over, 0)
        target = room.argmax(axis=1)
        largest = slots.tokens[rows].max(axis=2)
        fill = np.minimum(largest, room[at, target, None]).astype(np.int64) << 32
        source = np.where(over > 0, fill + over, -1).argmax(axis=1)
        slot = slots.tokens[rows, source].argmax(axis=1)
        amount = np.minimum(room[at, target], slots.tokens[rows, source, slot])
        amount = np.where(over[at, source] > 0, amount, 0).astype(np.int32)
        going = amount > 0
        rows, source, target, slot, amount = (a[going] for a in (rows, source, target, slot, amount))
        expert = slots.expert[rows, source, slot]
        slots.take(rows, source, slot, amount)
        slots.add(rows, target, expert, amount)
