"""How a rank's parameter is made of Hugging Face tensors: one class for each kind of cut. Pure; imports no torch.

A cut maps every region of the tensors to a region of the parameter (:class:`Piece`). Loading copies it one way, export
the other way, with the same pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

Ranks = Literal["", "tensor", "expert"]


@dataclass(frozen=True, slots=True)
class HfTensor:
    """A tensor of a Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Place:
    """A rank among those that share a parameter. ``experts``: the rank's experts, in the order of its parameters."""

    tensor_rank: int = 0
    tensor_size: int = 1
    experts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ParamShard:
    """Part ``index`` of ``count`` equal ones of parameter ``name``, cut along ``axis``; ``shape`` is the part's own."""

    name: str
    shape: tuple[int, ...]
    axis: int = 0
    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """A region of a Hugging Face tensor, and the region of a rank's parameter that holds the same numbers.

    The tensor's region has ``length`` entries from ``start`` on ``axis`` (0, or 1 of a matrix); the parameter's is the
    one that ``target`` indexes. ``interleaved``: entries of the parameter's two halves alternate along the tensor's
    last axis. ``transposed``: the parameter's first two axes (after ``target``) are swapped in the tensor.
    """

    tensor: HfTensor
    target: tuple[int | slice, ...]
    axis: int
    start: int
    length: int
    interleaved: bool = False
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor's region."""
        return *self.tensor.shape[: self.axis], self.length, *self.tensor.shape[self.axis + 1 :]


Tensors = Sequence[HfTensor]


@dataclass(frozen=True, slots=True)
class Replicated:
    """The same on every rank."""

    ranks: ClassVar[Ranks] = ""

    def pieces(self, tensors: Tensors, place: Place) -> Iterator[Piece]:
        """The pieces of the rank at ``place``."""
        (tensor,) = tensors
        yield Piece(tensor, (), 0, 0, tensor.shape[0])

    def shards(self, tensors: Tensors, shape: tuple[int, ...], place: Place) -> Iterator[ParamShard]:
        """The shards that a rank's parameter of ``shape`` consists of, one after the other in its memory. No layout
        changes their names and what they are parts of."""
        yield ParamShard(tensors[0].name, shape)


@dataclass(frozen=True, slots=True)
class Columns:
    """Cut along axis 1 over tensor ranks."""

    ranks: ClassVar[Ranks] = "tensor"

    def pieces(self, tensors: Tensors, place: Place) -> Iterator[Piece]:
        """See :class:`Replicated`."""
        (tensor,) = tensors
        width = tensor.shape[1] // place.tensor_size
        yield Piece(tensor, (), 1, place.tensor_rank * width, width)

    def shards(self, tensors: Tensors, shape: tuple[int, ...], place: Place) -> Iterator[ParamShard]:
        """See :class:`Replicated`."""
        yield ParamShard(tensors[0].name, shape, 1, place.tensor_rank, place.tensor_size)


@dataclass(frozen=True, slots=True)
class Rows:
    """Cut along axis 0 over tensor ranks.

    Every tensor is one part; ``parts``, for a single tensor, are the numbers of rows of its several parts. The
    parameter consists of ``groups`` groups of rows: each group has an equal share of every part, part after part. A
    rank has equally many groups. ``groups`` 0: one for each rank, as of gate over up.
    """

    groups: int = 0
    parts: tuple[int, ...] = ()
    ranks: ClassVar[Ranks] = "tensor"

    def pieces(self, tensors: Tensors, place: Place) -> Iterator[Piece]:
        """See :class:`Replicated`."""
        groups, row = self.groups or place.tensor_size, 0
        own = groups // place.tensor_size
        for group in range(place.tensor_rank * own, (place.tensor_rank + 1) * own):
            for tensor, first, rows in self._parts(tensors):
                count = rows // groups
                yield Piece(tensor, (slice(row, row + count),), 0, first + group * count, count)
                row += count

    def shards(self, tensors: Tensors, shape: tuple[int, ...], place: Place) -> Iterator[ParamShard]:
        """See :class:`Replicated`."""
        parts = list(self._parts(tensors))
        if self.groups or len(parts) == 1:
            yield ParamShard(tensors[0].name, shape, 0, place.tensor_rank, place.tensor_size)
            return
        for number, (_, _, rows) in enumerate(parts):
            own = (rows // place.tensor_size, *shape[1:])
            yield ParamShard(f"{tensors[0].name}:{number}", own, 0, place.tensor_rank, place.tensor_size)

    def _parts(self, tensors: Tensors) -> Iterator[tuple[HfTensor, int, int]]:
        """Each part: its tensor, first row and number of rows."""
        if not self.parts:
            yield from ((tensor, 0, tensor.shape[0]) for tensor in tensors)
            return
        (tensor,) = tensors
        for number, rows in enumerate(self.parts):
            yield tensor, sum(self.parts[:number]), rows


@dataclass(frozen=True, slots=True)
class Experts:
    """Stacked over the experts of an expert rank, of ``count`` in all.

    Every expert has as many tensors, whose rows follow each other. ``stacked``: instead one tensor holds all experts
    along axis 0. ``interleaved``, ``transposed``: of that tensor, see :class:`Piece`.
    """

    count: int
    stacked: bool = False
    interleaved: bool = False
    transposed: bool = False
    ranks: ClassVar[Ranks] = "expert"

    def pieces(self, tensors: Tensors, place: Place) -> Iterator[Piece]:
        """See :class:`Replicated`."""
        each = len(tensors) // self.count
        for position, expert in enumerate(place.experts):
            if self.stacked:
                yield Piece(tensors[0], (position,), 0, expert, 1, self.interleaved, self.transposed)
                continue
            row = 0
            for tensor in tensors[expert * each : (expert + 1) * each]:
                rows = tensor.shape[0]
                yield Piece(tensor, (position, slice(row, row + rows)), 0, 0, rows)
                row += rows

    def shards(self, tensors: Tensors, shape: tuple[int, ...], place: Place) -> Iterator[ParamShard]:
        """See :class:`Replicated`."""
        name, own = tensors[0].name, place.experts
        if own == tuple(range(own[0], own[0] + len(own))) and own[0] % len(own) == 0:
            yield ParamShard(name, shape, 0, own[0] // len(own), self.count // len(own))
            return
        yield from (ParamShard(name, (1, *shape[1:]), 0, expert, self.count) for expert in own)


Cut = Replicated | Columns | Rows | Experts
