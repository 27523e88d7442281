"""What a plan is: which experts every rank borrows, and how many tokens of each expert every rank computes.

Slots are counted over the expert group: slot ``rank * (N + X) + local`` is a home slot where ``local < N``, it holds
the parameters; the others are borrowed. A rank holds an expert at most once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.signedinteger]


class PlanError(ValueError):
    """A grid or a plan that cannot be: the message names what, where, and what would be right."""


@dataclass(frozen=True, eq=False)
class Grid:
    """Where experts live. ``machine``: of every rank, ascending from 0, equally many ranks each (empty: one machine).

    ``home``: int32 ``[E]``, the logical expert in home slot ``rank * N + i`` (empty: ``arange(E)``, contiguous), or
    ``[L, E]`` where layers differ; :meth:`layer` is the grid of one. Raises PlanError for what does not fit together.
    """

    experts: int
    ranks: int
    slots: int
    machine: tuple[int, ...] = ()
    home: Ints = field(default_factory=lambda: np.zeros(0, np.int32))

    def __post_init__(self) -> None:
        home = np.array(self.home if len(self.home) else np.arange(self.experts), np.int32)
        home.flags.writeable = False
        object.__setattr__(self, "home", home)
        object.__setattr__(self, "machine", tuple(self.machine) or (0,) * self.ranks)
        self._check()

    def _check(self) -> None:
        if self.ranks < 1 or self.experts < 1 or self.experts % self.ranks or self.slots < 0:
            raise PlanError(
                f"{self.experts} experts on {self.ranks} ranks with {self.slots} borrowed slots: expected experts "
                "that divide evenly over the ranks and no negative number of slots"
            )
        each = self.ranks // self.machines
        if list(self.machine) != [rank // each for rank in range(self.ranks)]:
            raise PlanError(
                f"machines of ranks {self.machine}: expected {self.ranks} that ascend from 0, equally many ranks each"
            )
        expected = np.broadcast_to(np.arange(self.experts), (*self.home.shape[:-1], self.experts))
        if self.home.ndim > 2 or not np.array_equal(np.sort(self.home), expected):
            raise PlanError(f"home order {self.home.shape}: expected each of {self.experts} experts exactly once")

    @property
    def homes(self) -> int:
        """N, home experts a rank."""
        return self.experts // self.ranks

    @property
    def machines(self) -> int:
        """K."""
        return max(1, len(set(self.machine)))

    @cached_property
    def home_rank(self) -> Ints:
        """``[E]`` (or ``[L, E]``): the rank that holds each expert's parameters."""
        return (np.argsort(self.home) // self.homes).astype(np.int32)

    @cached_property
    def at_home(self) -> NDArray[np.bool_]:
        """``[E, R]`` (or ``[L, E, R]``): the same as a mask."""
        return self.home_rank[..., None] == np.arange(self.ranks)

    def layer(self, column: int) -> Grid:
        """The grid of one layer, whose ``home`` is ``[E]``."""
        return self if self.home.ndim == 1 else self._by_layer[column]

    @cached_property
    def _by_layer(self) -> list[Grid]:
        return [replace(self, home=home) for home in self.home]


@dataclass(frozen=True, eq=False)
class Plan:
    """One micro-batch of one layer, on that layer's grid. All arrays are int32 and must not be changed.

    ``borrowed`` ``[R, X]``: the expert in each borrowed slot, -1 where it is empty. ``load`` ``[E, R]``: foreseen
    tokens of an expert by target. ``counts`` ``[R, E]``: the same tokens by source.
    """

    grid: Grid
    borrowed: Ints
    load: Ints
    counts: Ints

    @staticmethod
    def identity(grid: Grid, counts: Ints | None = None) -> Plan:
        """Nothing is borrowed, every token is computed at its expert's home. ``counts`` None: no token is foreseen."""
        seen = np.zeros((grid.ranks, grid.experts), np.int32) if counts is None else counts
        return Plans.identity(grid, seen[None, None]).of(0, 0)

    def quota(self, source: int) -> Ints:
        """``[E, R]``: how many of ``source``'s tokens of each expert go to each target; rows sum to its counts.

        A target takes its own tokens first, then its machine's, then those of other machines, in the order of ranks.
        """
        own = np.minimum(self.counts.T, self.load)
        quota = np.zeros_like(self.load)
        quota[:, source] = own[:, source]
        supply, need = self.counts.T - own, self.load - own
        for group in sorted({self.grid.ranks // self.grid.machines, self.grid.ranks}):
            _add_share(quota, supply, need, source, group)
            supply, need = _rest(supply, need, group), _rest(need, supply, group)
        return quota

    @cached_property
    def slot_of(self) -> Ints:
        """``[E, R]``: the slot in which a rank holds an expert, -1 where it does not."""
        grid, slots = self.grid, np.full(self.load.shape, -1, np.int32)
        places = np.arange(grid.experts)
        slots[grid.home, places // grid.homes] = places + places // grid.homes * grid.slots
        ranks, local = np.nonzero(self.borrowed >= 0)
        slots[self.borrowed[ranks, local], ranks] = ranks * (grid.homes + grid.slots) + grid.homes + local
        return slots

    @cached_property
    def fallback_slot(self) -> Ints:
        """``[E]``: where tokens go that were not foreseen: the last slot that has load, home where none has."""
        last = np.where(self.load > 0, self.slot_of, -1).max(axis=1)
        home = self.slot_of[np.arange(self.grid.experts), self.grid.home_rank]
        return np.where(last >= 0, last, home)

    def check(self) -> None:
        """Raise PlanError unless every token has one target, and that target holds the token's expert once."""
        Plans(self.grid, *(array[None, None] for array in (self.borrowed, self.load, self.counts))).check()


@dataclass(frozen=True, eq=False)
class Plans:
    """A pass: the arrays of :class:`Plan` with ``[M, L]`` in front."""

    grid: Grid
    borrowed: Ints
    load: Ints
    counts: Ints

    @staticmethod
    def identity(grid: Grid, counts: Ints) -> Plans:
        """Every token of ``counts`` ``[M, L, R, E]`` is computed at its expert's home."""
        shape = counts.shape[:2]
        load = np.where(grid.at_home, counts.sum(axis=2, dtype=np.int32)[..., None], 0).astype(np.int32)
        return Plans(grid, np.full((*shape, grid.ranks, grid.slots), -1, np.int32), load, counts.astype(np.int32))

    @staticmethod
    def join(parts: Sequence[Plans]) -> Plans:
        """The plans of consecutive micro-batches, one after the other. They must be on one grid."""
        arrays = ([getattr(part, name) for part in parts] for name in ("borrowed", "load", "counts"))
        return Plans(parts[0].grid, *(np.concatenate(list(array)) for array in arrays))

    def of(self, microbatch: int, column: int) -> Plan:
        """The plan of one micro-batch and one column of the routes."""
        at = (microbatch, column)
        return Plan(self.grid.layer(column), self.borrowed[at], self.load[at], self.counts[at])

    def checksum(self) -> NDArray[np.int64]:
        """``[L]``, over all micro-batches: ranks whose numbers differ would compute different plans of that layer."""
        layers = range(self.load.shape[1])
        return np.array([self._digest(layer) for layer in layers], np.int64)

    def _digest(self, layer: int) -> int:
        digest = hashlib.blake2b(repr((self.grid.machine, self.grid.slots)).encode(), digest_size=8)
        digest.update(self.grid.layer(layer).home.data)
        for array in (self.borrowed, self.load, self.counts):
            digest.update(np.ascontiguousarray(array[:, layer], "<i4").data)
        return int.from_bytes(digest.digest(), "little", signed=True)

    def check(self) -> None:
        """Raise PlanError unless every token has one target, and that target holds the token's expert once."""
        self._check_slots()
        held = _held(self.grid, self.borrowed)
        lost = self.counts.sum(axis=2) != self.load.sum(axis=3)
        for wrong, what in (
            (held > 1, "is held twice by rank"),
            (self.load < 0, "has a negative load on rank"),
            ((self.load > 0) & (held == 0), "is not held, but computed, by rank"),
            (lost[..., None], "does not compute each of its tokens once, from rank"),
        ):
            if wrong.any():
                at, layer, expert, rank = np.argwhere(wrong)[0].tolist()
                raise PlanError(f"micro-batch {at}, MoE layer {layer}: expert {expert} {what} {rank}")

    def _check_slots(self) -> None:
        grid, lead = self.grid, self.load.shape[:2]
        shapes = ((grid.ranks, grid.slots), (grid.experts, grid.ranks), (grid.ranks, grid.experts))
        for name, shape in zip(("borrowed", "load", "counts"), shapes, strict=True):
            if getattr(self, name).shape != (*lead, *shape):
                raise PlanError(f"plans: {name} is {getattr(self, name).shape}, expected {(*lead, *shape)}")
        if self.borrowed.size and not -1 <= self.borrowed.min() <= self.borrowed.max() < grid.experts:
            raise PlanError(f"plans: borrowed experts must be in [-1, {grid.experts})")


def _held(grid: Grid, borrowed: Ints) -> Ints:
    """``[M, L, E, R]``: how many slots of a rank hold an expert."""
    held = np.zeros((*borrowed.shape[:2], grid.experts, grid.ranks), np.int32) + grid.at_home
    at, layer, rank, slot = np.nonzero(borrowed >= 0)
    np.add.at(held, (at, layer, borrowed[at, layer, rank, slot], rank), 1)
    return held


def _add_share(quota: Ints, supply: Ints, need: Ints, source: int, group: int) -> None:
    """Add to ``quota`` what ``source`` gives when the supplies and needs ``[E, R]`` of its group of ranks are laid side
    by side, both in the order of ranks: where its stretch and a target's overlap."""
    first = source // group * group
    mates = slice(first, first + group)
    start = supply[:, first:source].sum(axis=1, keepdims=True)
    stop = start + supply[:, source, None]
    stops = need[:, mates].cumsum(axis=1)
    starts = stops - need[:, mates]
    quota[:, mates] += np.maximum(np.minimum(stop, stops) - np.maximum(start, starts), 0).astype(np.int32)


def _rest(amounts: Ints, met: Ints, group: int) -> Ints:
    """What is left of ``amounts`` ``[E, R]`` when each group of ranks has met the ``met`` of the same group."""
    grouped = amounts.reshape(len(amounts), -1, group)
    taken = met.reshape(grouped.shape).sum(axis=2, keepdims=True)
    return np.clip(grouped.cumsum(axis=2) - taken, 0, grouped).reshape(amounts.shape).astype(np.int32)
