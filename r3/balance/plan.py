"""Expert layouts and plans: which experts each rank borrows, and how many tokens of each expert each rank computes.

Slots are numbered over the expert group: slot ``rank * (N + X) + local`` is a parameter slot if ``local < N`` (its rank
owns the expert), else a borrowed slot. A rank holds an expert at most once.
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
    """An impossible layout or plan; the message says what, where and what is expected."""


@dataclass(frozen=True, eq=False)
class ExpertLayout:
    """How experts are spread over an expert-parallel group, with ``slots`` borrowed slots per rank (X).

    ``node_of_rank``: ascending from 0, equally many ranks per node (empty: one node). ``placement``: int32 ``[E]``, the
    logical expert in parameter slot ``rank * N + i`` (empty: ``arange(E)``), or ``[L, E]`` if layers differ;
    :meth:`layer` is the layout of one. Raises PlanError if the values do not fit together.
    """

    experts: int
    ranks: int
    slots: int
    node_of_rank: tuple[int, ...] = ()
    placement: Ints = field(default_factory=lambda: np.zeros(0, np.int32))

    def __post_init__(self) -> None:
        placement = np.array(self.placement if len(self.placement) else np.arange(self.experts), np.int32)
        placement.flags.writeable = False
        object.__setattr__(self, "placement", placement)
        object.__setattr__(self, "node_of_rank", tuple(self.node_of_rank) or (0,) * self.ranks)
        self._check()

    def _check(self) -> None:
        if self.ranks < 1 or self.experts < 1 or self.experts % self.ranks or self.slots < 0:
            raise PlanError(
                f"{self.experts} experts on {self.ranks} ranks with {self.slots} borrowed slots: expected experts "
                "that divide evenly over the ranks and no negative number of slots"
            )
        each = self.ranks // self.nodes
        if list(self.node_of_rank) != [rank // each for rank in range(self.ranks)]:
            raise PlanError(
                f"nodes of ranks {self.node_of_rank}: expected {self.ranks} numbers that ascend from 0, equally many "
                "ranks per node"
            )
        expected = np.broadcast_to(np.arange(self.experts), (*self.placement.shape[:-1], self.experts))
        if self.placement.ndim > 2 or not np.array_equal(np.sort(self.placement), expected):
            raise PlanError(f"placement {self.placement.shape}: expected each of {self.experts} experts exactly once")

    @property
    def experts_per_rank(self) -> int:
        """N, the experts that a rank owns."""
        return self.experts // self.ranks

    @property
    def nodes(self) -> int:
        """K."""
        return max(1, len(set(self.node_of_rank)))

    @cached_property
    def owner_rank(self) -> Ints:
        """``[E]`` (or ``[L, E]``): the rank that owns each expert's parameters."""
        return (np.argsort(self.placement) // self.experts_per_rank).astype(np.int32)

    @cached_property
    def owner_mask(self) -> NDArray[np.bool_]:
        """``[E, R]`` (or ``[L, E, R]``): :attr:`owner_rank` as a mask."""
        return self.owner_rank[..., None] == np.arange(self.ranks)

    def layer(self, column: int) -> ExpertLayout:
        """Returns the layout of one layer, whose ``placement`` is ``[E]``."""
        return self if self.placement.ndim == 1 else self._by_layer[column]

    @cached_property
    def _by_layer(self) -> list[ExpertLayout]:
        return [replace(self, placement=placement) for placement in self.placement]


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """The plan of one micro-batch of one layer, on that layer's layout. All arrays are int32 and read-only.

    ``borrowed`` ``[R, X]``: the expert in each borrowed slot, -1 if empty. ``load`` ``[E, R]``: foreseen tokens of an
    expert by target rank. ``counts`` ``[R, E]``: the same tokens by source rank.
    """

    layout: ExpertLayout
    borrowed: Ints
    load: Ints
    counts: Ints

    @staticmethod
    def identity(layout: ExpertLayout, counts: Ints | None = None) -> LayerPlan:
        """Returns the plan without borrowing: the owner rank computes every token. ``counts`` None: no tokens."""
        seen = np.zeros((layout.ranks, layout.experts), np.int32) if counts is None else counts
        return PlanArrays.identity(layout, seen[None, None]).layer_plan(0, 0)

    def quota(self, source: int) -> Ints:
        """Returns ``[E, R]``: how many of ``source``'s tokens of each expert go to each target; rows sum to its counts.

        A target takes its own tokens first, then those of its node, then those of other nodes, in the order of ranks.
        """
        own = np.minimum(self.counts.T, self.load)
        quota = np.zeros_like(self.load)
        quota[:, source] = own[:, source]
        supply, need = self.counts.T - own, self.load - own
        for group in sorted({self.layout.ranks // self.layout.nodes, self.layout.ranks}):
            _add_share(quota, supply, need, source, group)
            supply, need = _rest(supply, need, group), _rest(need, supply, group)
        return quota

    @cached_property
    def slot_of(self) -> Ints:
        """``[E, R]``: the slot in which a rank holds an expert, -1 if it does not hold it."""
        layout, slots = self.layout, np.full(self.load.shape, -1, np.int32)
        indices = np.arange(layout.experts)
        owners = indices // layout.experts_per_rank
        slots[layout.placement, owners] = indices + owners * layout.slots
        ranks, local = np.nonzero(self.borrowed >= 0)
        slots[self.borrowed[ranks, local], ranks] = (
            ranks * (layout.experts_per_rank + layout.slots) + layout.experts_per_rank + local
        )
        return slots

    @cached_property
    def fallback_slot(self) -> Ints:
        """``[E]``: the slot of tokens that were not foreseen: the last slot with load, or the parameter slot."""
        last = np.where(self.load > 0, self.slot_of, -1).max(axis=1)
        parameter_slot = self.slot_of[np.arange(self.layout.experts), self.layout.owner_rank]
        return np.where(last >= 0, last, parameter_slot)

    def check(self) -> None:
        """Raises PlanError unless every token has one target that holds its expert once."""
        PlanArrays(self.layout, *(array[None, None] for array in (self.borrowed, self.load, self.counts))).check()


@dataclass(frozen=True, eq=False)
class PlanArrays:
    """The plans of a pass: the arrays of :class:`LayerPlan` with leading axes ``[M, L]``."""

    layout: ExpertLayout
    borrowed: Ints
    load: Ints
    counts: Ints

    @staticmethod
    def identity(layout: ExpertLayout, counts: Ints) -> PlanArrays:
        """Returns plans without borrowing: owner ranks compute all tokens of ``counts`` ``[M, L, R, E]``."""
        shape = counts.shape[:2]
        load = np.where(layout.owner_mask, counts.sum(axis=2, dtype=np.int32)[..., None], 0).astype(np.int32)
        return PlanArrays(
            layout, np.full((*shape, layout.ranks, layout.slots), -1, np.int32), load, counts.astype(np.int32)
        )

    @staticmethod
    def concatenate(parts: Sequence[PlanArrays]) -> PlanArrays:
        """Concatenate the plans of consecutive micro-batches on one layout."""
        arrays = ([getattr(part, name) for part in parts] for name in ("borrowed", "load", "counts"))
        return PlanArrays(parts[0].layout, *(np.concatenate(list(array)) for array in arrays))

    def layer_plan(self, microbatch: int, column: int) -> LayerPlan:
        """Returns the plan of one micro-batch and one column of the routes."""
        index = (microbatch, column)
        return LayerPlan(self.layout.layer(column), self.borrowed[index], self.load[index], self.counts[index])

    def checksum(self) -> NDArray[np.int64]:
        """Returns ``[L]``, over all micro-batches: ranks with different numbers have different plans of that layer."""
        layers = range(self.load.shape[1])
        return np.array([self._digest(layer) for layer in layers], np.int64)

    def _digest(self, layer: int) -> int:
        digest = hashlib.blake2b(repr((self.layout.node_of_rank, self.layout.slots)).encode(), digest_size=8)
        digest.update(self.layout.layer(layer).placement.data)
        for array in (self.borrowed, self.load, self.counts):
            digest.update(np.ascontiguousarray(array[:, layer], "<i4").data)
        return int.from_bytes(digest.digest(), "little", signed=True)

    def check(self) -> None:
        """Raises PlanError unless every token has one target that holds its expert once."""
        self._check_slots()
        copies = _copies_per_rank(self.layout, self.borrowed)
        lost = self.counts.sum(axis=2) != self.load.sum(axis=3)
        for wrong, what in (
            (copies > 1, "is held twice by rank"),
            (self.load < 0, "has a negative load on rank"),
            ((self.load > 0) & (copies == 0), "is computed, but not held, by rank"),
            (lost[..., None], "does not compute each of its tokens once, from rank"),
        ):
            if wrong.any():
                batch, layer, expert, rank = np.argwhere(wrong)[0].tolist()
                raise PlanError(f"micro-batch {batch}, MoE layer {layer}: expert {expert} {what} {rank}")

    def _check_slots(self) -> None:
        layout, lead = self.layout, self.load.shape[:2]
        shapes = ((layout.ranks, layout.slots), (layout.experts, layout.ranks), (layout.ranks, layout.experts))
        for name, shape in zip(("borrowed", "load", "counts"), shapes, strict=True):
            if getattr(self, name).shape != (*lead, *shape):
                raise PlanError(f"plans: {name} is {getattr(self, name).shape}, expected {(*lead, *shape)}")
        if self.borrowed.size and not -1 <= self.borrowed.min() <= self.borrowed.max() < layout.experts:
            raise PlanError(f"plans: borrowed experts must be in [-1, {layout.experts})")


def _copies_per_rank(layout: ExpertLayout, borrowed: Ints) -> Ints:
    """Returns ``[M, L, E, R]``: how many slots of a rank hold an expert."""
    copies = np.zeros((*borrowed.shape[:2], layout.experts, layout.ranks), np.int32) + layout.owner_mask
    batch, layer, rank, slot = np.nonzero(borrowed >= 0)
    np.add.at(copies, (batch, layer, borrowed[batch, layer, rank, slot], rank), 1)
    return copies


def _add_share(quota: Ints, supply: Ints, need: Ints, source: int, group: int) -> None:
    """Add the tokens that ``source`` sends within its group of ranks to ``quota``: supplies and needs ``[E, R]`` are
    laid end to end in the order of ranks, and the overlap of two intervals is what a source sends to a target."""
    first = source // group * group
    members = slice(first, first + group)
    start = supply[:, first:source].sum(axis=1, keepdims=True)
    stop = start + supply[:, source, None]
    stops = need[:, members].cumsum(axis=1)
    starts = stops - need[:, members]
    quota[:, members] += np.maximum(np.minimum(stop, stops) - np.maximum(start, starts), 0).astype(np.int32)


def _rest(amounts: Ints, met: Ints, group: int) -> Ints:
    """Returns the rest of ``amounts`` ``[E, R]`` after each group of ranks has given what it can to ``met``."""
    grouped = amounts.reshape(len(amounts), -1, group)
    taken = met.reshape(grouped.shape).sum(axis=2, keepdims=True)
    return np.clip(grouped.cumsum(axis=2) - taken, 0, grouped).reshape(amounts.shape).astype(np.int32)
