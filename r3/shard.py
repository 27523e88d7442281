"""Selects the rows and columns of a micro-batch's routes for a rank's routers, and reverses it. Pure; numpy only.

A worked example: sequences of 6 and 3 tokens, 2 context ranks (zig-zag), 2 tensor ranks; lengths padded to a multiple
of ``2 * 2 * 2 = 8``. ``.`` is padding; the numbers are tokens of the packed batch::

    packed        0 1 2 3 4 5 | 6 7 8
    padded        0 1 2 3 4 5 . . | 6 7 8 . . . . .
    context 0     0 1     . .     | 6 7         . .      chunks 0 and 3 of each sequence
    context 1         2 3 4 5     |     8 . . .          chunks 1 and 2
    context 0, tensor 0 sees  0 1 . .         tensor 1 sees  6 7 . .
    context 1, tensor 0 sees  2 3 4 5         tensor 1 sees  8 . . .

All indices (*places*) refer to the padded row: ``Packing`` gives the token at each place, ``context_places`` and
``router_places`` the places of a rank, and :func:`unshard` reassembles the ranks' rows, each exactly once. Columns are
the MoE layers of a rank's pipeline stages (:func:`stage_layers`, :func:`moe_columns`).

Axes: ``P`` places of the padded row, ``R`` rows of a rank, ``L`` MoE layers, ``C`` columns of a rank, ``K`` experts a
token, ``E`` experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from r3.routing import Routing, RoutingError

Cut = Literal["zigzag", "contiguous"]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """The part of the routes that a rank's routers need: rows of its context and tensor rank, and ``columns`` of
    layers.

    ``columns`` count the model's MoE layers from 0 and rise. ``cut``: how a sequence is split over context ranks,
    ``zigzag`` (chunks r and ``2 * size - 1 - r`` of ``2 * size``, so that causal attention is even work) or
    ``contiguous``. Raises RoutingError for a rank outside its size and for columns that do not rise.
    """

    columns: tuple[int, ...]
    context_rank: int = 0
    context_size: int = 1
    tensor_rank: int = 0
    tensor_size: int = 1
    cut: Cut = "zigzag"

    def __post_init__(self) -> None:
        for name, rank, size in (
            ("context", self.context_rank, self.context_size),
            ("tensor", self.tensor_rank, self.tensor_size),
        ):
            if not 0 <= rank < size:
                raise RoutingError(f"{name} rank {rank} of {size} does not exist")
        if any(column < 0 for column in self.columns) or list(self.columns) != sorted(set(self.columns)):
            raise RoutingError(f"columns {self.columns} do not rise from 0")

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunks of every sequence that this context rank holds, out of :attr:`chunks_total`.

        >>> ShardSpec((0,), context_rank=1, context_size=4).chunks
        (1, 6)
        """
        if self.chunks_total == self.context_size:
            return (self.context_rank,)
        return (self.context_rank, 2 * self.context_size - 1 - self.context_rank)

    @property
    def chunks_total(self) -> int:
        return 2 * self.context_size if self.cut == "zigzag" and self.context_size > 1 else self.context_size

    @property
    def multiple(self) -> int:
        """Every sequence is padded to a multiple of this, so that all ranks have the same number of rows."""
        return self.chunks_total * self.tensor_size


@dataclass(frozen=True, slots=True)
class Packing:
    """Sequences of ``lengths`` tokens laid end to end, each padded at its end to a multiple of ``multiple``.

    >>> Packing((6, 3), 4).cu_seqlens.tolist(), Packing((6, 3), 4).cu_padded.tolist()
    ([0, 6, 9], [0, 8, 12])
    >>> Packing((6, 3), 4).source.tolist()
    [0, 1, 2, 3, 4, 5, -1, -1, 6, 7, 8, -1]
    >>> Packing((6, 3), 4).positions.tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    """

    lengths: tuple[int, ...]
    multiple: int = 1

    def __post_init__(self) -> None:
        if self.multiple < 1 or any(length < 1 for length in self.lengths):
            raise RoutingError(f"can't pack lengths {self.lengths} to a multiple of {self.multiple}: all must be >= 1")

    @property
    def padded_lengths(self) -> tuple[int, ...]:
        return tuple(-(-length // self.multiple) * self.multiple for length in self.lengths)

    @property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """Bounds of the sequences without padding, ``[n + 1]``."""
        return np.cumsum([0, *self.lengths], dtype=np.int32)

    @property
    def cu_padded(self) -> NDArray[np.int32]:
        """Bounds of the sequences with padding, ``[n + 1]``."""
        return np.cumsum([0, *self.padded_lengths], dtype=np.int32)

    def rows(self, places: Index) -> Rows:
        """Returns the tokens at ``places``."""
        sequence = np.searchsorted(self.cu_padded, places, side="right") - 1
        positions = places - self.cu_padded.astype(np.int64)[sequence]
        real = positions < np.asarray(self.lengths, np.int64)[sequence]
        return Rows(sequence, positions, np.where(real, self.cu_seqlens.astype(np.int64)[sequence] + positions, -1))

    def _all(self) -> Rows:
        return self.rows(np.arange(self.cu_padded[-1], dtype=np.int64))

    @property
    def sequence(self) -> Index:
        """``[P]``: which sequence each place belongs to."""
        return self._all().sequence

    @property
    def positions(self) -> Index:
        """``[P]``: each place's position in its sequence; padding continues the count."""
        return self._all().positions

    @property
    def source(self) -> Index:
        """``[P]``: the token of the packed batch at each place, -1 for padding."""
        return self._all().source


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The values of :class:`Packing`'s properties of the same names at some places, ``[R]`` each."""

    sequence: Index
    positions: Index
    source: Index


@dataclass(frozen=True, slots=True, eq=False)
class RouteShard:
    """A rank's shard of one micro-batch's routes, in the order of its routers' tokens.

    ``experts`` ``[R, C, K]``: ids; padding and absent rows have distinct filler experts.
    ``present`` bool ``[R]``: rows the engine recorded (``[R, C]`` if an experiment withholds some layers).
    ``identity`` uint32 ``[R]``: each row's token (:func:`identify`); ``columns``: which MoE layers these are, as in
    :class:`ShardSpec`.
    """

    experts: NDArray[np.integer]
    present: NDArray[np.bool_]
    identity: NDArray[np.uint32]
    columns: tuple[int, ...]


def context_places(packing: Packing, spec: ShardSpec) -> Index:
    """Returns the places of a context rank, sequence by sequence.

    >>> packing = Packing((6, 3), 4)
    >>> context_places(packing, ShardSpec((0,), context_rank=0, context_size=2)).tolist()
    [0, 1, 6, 7, 8, 11]
    >>> context_places(packing, ShardSpec((0,), context_rank=1, context_size=2, cut="contiguous")).tolist()
    [4, 5, 6, 7, 10, 11]
    """
    if packing.multiple % spec.multiple:
        raise RoutingError(f"sequences padded to a multiple of {packing.multiple}, this cut needs {spec.multiple}")
    parts = [np.zeros(0, np.int64)]
    for start, length in zip(packing.cu_padded.tolist(), packing.padded_lengths, strict=False):
        size = length // spec.chunks_total
        parts += [np.arange(start + chunk * size, start + (chunk + 1) * size) for chunk in spec.chunks]
    return np.concatenate(parts)


def router_slice(rows: int, spec: ShardSpec) -> slice:
    """Returns the part of a context rank's ``rows`` for a tensor rank's routers (they run sequence-parallel).

    >>> router_slice(12, ShardSpec((0,), tensor_rank=1, tensor_size=4))
    slice(3, 6, None)
    """
    if rows % spec.tensor_size:
        raise RoutingError(f"{rows} rows can't be shared by {spec.tensor_size} tensor ranks")
    size = rows // spec.tensor_size
    return slice(spec.tensor_rank * size, (spec.tensor_rank + 1) * size)


def router_places(packing: Packing, spec: ShardSpec) -> Index:
    """Returns the places of the tokens of a rank's routers, ``[R]``."""
    places = context_places(packing, spec)
    return places[router_slice(len(places), spec)]


def context_order(packing: Packing, spec: ShardSpec) -> Index:
    """Inverse of :func:`context_places`: index into all context ranks' rows, one rank behind the other, that gives the
    padded row, ``[P]``.

    >>> context_order(Packing((6, 3), 4), ShardSpec((0,), context_size=2)).tolist()
    [0, 1, 6, 7, 8, 9, 2, 3, 4, 10, 11, 5]
    """
    ranks = [replace(spec, context_rank=rank) for rank in range(spec.context_size)]
    return np.argsort(np.concatenate([context_places(packing, rank) for rank in ranks]))


def identify(sample: Any, position: Any, token: Any) -> NDArray[np.uint32]:
    """32 bits mixed from a row's sample (its index), its position there and its token id (-1 for padding).

    Two rows of different tokens have equal bits with probability 2 ** -32.
    Three rounds of the splitmix64 finaliser (Steele et al., "Fast splittable pseudorandom number generators", 2014).
    """
    state = np.zeros(np.broadcast(sample, position, token).shape, np.uint64)
    for value in (sample, position, token):
        state = state + np.uint64(0x9E3779B97F4A7C15) ^ np.asarray(value).astype(np.uint64)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(32)).astype(np.uint32)


def _identities(rows: Rows, samples: Sequence[int], tokens: NDArray[np.integer]) -> NDArray[np.uint32]:
    """:func:`identify` of ``rows``; ``samples`` names the sequences, ``tokens`` is packed."""
    token = np.where(rows.source < 0, -1, np.asarray(tokens)[rows.source])
    return identify(np.asarray(samples)[rows.sequence], rows.positions, token)


def cut_routes(
    routings: Sequence[Routing], samples: Sequence[int], tokens: NDArray[np.integer], packing: Packing, spec: ShardSpec
) -> RouteShard:
    """Returns a rank's shard of the routes of the sequences in ``packing``, without copying other rows.

    ``samples[n]`` is the index of sequence n in the whole batch, ``tokens`` the packed token ids. Raises RoutingError
    if the routes do not match the packed lengths, or are not of one model.
    """
    _check_routings(routings, packing, spec)
    rows, first = packing.rows(router_places(packing, spec)), routings[0]
    experts = np.empty((len(rows.source), len(spec.columns), first.top_k), first.experts.dtype)
    present = np.zeros(len(rows.source), np.bool_)
    columns = _runs(np.array(spec.columns, np.int64))
    bounds = np.searchsorted(rows.sequence, np.arange(len(routings) + 1)).tolist()
    for routing, start, stop in zip(routings, bounds[:-1], bounds[1:], strict=True):
        at = rows.positions[start:stop]
        for places, rows_given in _runs(at[at < routing.tokens]):
            here = slice(start + places.start, start + places.stop)
            present[here] = routing.present[rows_given]
            for to, of in columns:
                experts[here, to] = routing.experts[rows_given, of]
    experts[~present] = filler(int((~present).sum()), len(spec.columns), first.top_k, first.num_experts)
    return RouteShard(experts, present, _identities(rows, samples, tokens), spec.columns)


def own_routes(
    experts: NDArray[np.integer], samples: Sequence[int], tokens: NDArray[np.integer], packing: Packing, spec: ShardSpec
) -> RouteShard:
    """Returns the experts that a rank's routers used, ``[R, C, K]``, as routes for replay; all but padding is
    present."""
    rows = packing.rows(router_places(packing, spec))
    return RouteShard(experts, rows.source >= 0, _identities(rows, samples, tokens), spec.columns)


def _check_routings(routings: Sequence[Routing], packing: Packing, spec: ShardSpec) -> None:
    if tuple(lengths := [routing.tokens for routing in routings]) != packing.lengths or not lengths:
        raise RoutingError(f"routes of {lengths} rows for sequences of {list(packing.lengths)} tokens")
    if len(shapes := {(r.moe_layers, r.top_k, r.num_experts) for r in routings}) > 1:
        raise RoutingError(f"routes of different shapes in one micro-batch (layers, top-k, experts): {sorted(shapes)}")
    if spec.columns and spec.columns[-1] >= routings[0].moe_layers:
        raise RoutingError(f"column {spec.columns[-1]} asked of routes of {routings[0].moe_layers} MoE layers")


def _runs(values: Index) -> list[tuple[slice, slice]]:
    """Returns runs of consecutive values, as slices of indices and of values, so that whole runs can be copied.

    >>> _runs(np.array([4, 5, 6, 9]))
    [(slice(0, 3, None), slice(4, 7, None)), (slice(3, 4, None), slice(9, 10, None))]
    """
    bounds = [0, *(np.flatnonzero(np.diff(values) != 1) + 1).tolist(), len(values)]
    return [
        (slice(start, stop), slice(int(values[start]), int(values[start]) + stop - start))
        for start, stop in pairwise(bounds)
        if stop > start
    ]


def check_identity(
    shard: RouteShard, samples: Sequence[int], tokens: NDArray[np.integer], packing: Packing, spec: ShardSpec
) -> int:
    """Check that every row belongs to the token at its place, and that the layers are this rank's. Returns the number
    of compared rows.

    Raises RoutingError with the sample and the token of the first mismatch.
    """
    rows = packing.rows(router_places(packing, spec))
    wanted = _identities(rows, samples, tokens)
    if shard.columns != spec.columns or shard.experts.shape[1] != len(spec.columns):
        raise RoutingError(
            f"samples {list(samples)}: routes came for the MoE layers {list(shard.columns)}, this rank has "
            f"{list(spec.columns)} (counted from 0)"
        )
    if {len(shard.experts), len(shard.present), len(shard.identity)} != {len(wanted)}:
        raise RoutingError(
            f"samples {list(samples)}: {len(shard.experts)} rows of routes came for the {len(wanted)} tokens (with "
            f"padding) of this rank"
        )
    if len(wrong := np.flatnonzero(wanted != shard.identity)):
        sequence, position, source = rows.sequence[wrong[0]], rows.positions[wrong[0]], rows.source[wrong[0]]
        what = "padding" if source < 0 else f"token {position} (id {tokens[source]})"
        raise RoutingError(
            f"sample {samples[sequence]}, {what}: the routes that came for it belong to another token "
            f"({len(wrong)} of {len(wanted)} rows do)"
        )
    return len(wanted)


def unshard(packing: Packing, specs: Sequence[ShardSpec], parts: Sequence[NDArray], layers: int) -> NDArray:
    """Reassemble the ranks' rows ``[R, C, ...]`` into ``[T, L, ...]`` without padding.

    Raises RoutingError unless every (token, layer) is held by exactly one rank.
    """
    tokens = sum(packing.lengths)
    routes = np.zeros((tokens, layers, *parts[0].shape[2:]), parts[0].dtype)
    times = np.zeros((tokens, layers), np.uint8)
    for spec, part in zip(specs, parts, strict=True):
        source = packing.rows(router_places(packing, spec)).source
        if part.shape[:2] != (len(source), len(spec.columns)):
            raise RoutingError(f"{spec} should hold {[len(source), len(spec.columns)]} rows and columns, it holds "
                               f"{list(part.shape[:2])}")  # fmt: skip
        real, columns = source >= 0, _runs(np.array(spec.columns, np.int64))
        values = part if real.all() else part[real]
        for places, rows in _runs(source[real]):
            for of, to in columns:
                routes[rows, to] = values[places, of]
                times[rows, to] += 1
    if (times != 1).any():
        token, layer = np.argwhere(times != 1)[0].tolist()
        raise RoutingError(f"token {token}, MoE layer {layer} is held by {times[token, layer]} ranks, expected one")
    return routes


def stage_layers(layers: int, pipeline_size: int = 1, virtual_size: int = 1) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Returns ``[pipeline rank][model chunk]``: the 1-based numbers of its layers. Where chunks do not divide the
    layers, the first chunks have one more: the last one also has the output layer. Raises RoutingError for fewer layers
    than chunks.

    >>> stage_layers(8, pipeline_size=2)
    (((1, 2, 3, 4),), ((5, 6, 7, 8),))
    >>> stage_layers(7, pipeline_size=2, virtual_size=2)
    (((1, 2), (5, 6)), ((3, 4), (7,)))
    """
    chunks = pipeline_size * virtual_size
    if layers < chunks:
        raise RoutingError(f"{layers} layers can't be spread over {pipeline_size} stages of {virtual_size} chunks")
    size, longer = divmod(layers, chunks)
    ends = [(chunk + 1) * size + min(chunk + 1, longer) for chunk in range(chunks)]
    numbers = [tuple(range(start + 1, end + 1)) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return tuple(tuple(numbers[rank::pipeline_size]) for rank in range(pipeline_size))


def moe_columns(layers: Sequence[int], moe_layers: Sequence[int]) -> tuple[int, ...]:
    """Returns the columns of the routes for ``layers``; ``moe_layers``: the 1-based numbers of the MoE layers.

    A model whose first three of eight layers are dense, its second stage:

    >>> moe_columns((5, 6, 7, 8), moe_layers=(4, 5, 6, 7, 8))
    (1, 2, 3, 4)
    """
    selected = set(layers)
    return tuple(column for column, number in enumerate(moe_layers) if number in selected)


def filler(rows: int, layers: int, top_k: int, num_experts: int) -> NDArray[np.int64]:
    """Returns distinct experts for rows without routes, ``[rows, layers, top_k]``, spread evenly over all experts.

    >>> filler(2, 1, 2, 3).tolist()
    [[[0, 1]], [[2, 0]]]
    """
    if top_k > num_experts:
        raise RoutingError(f"top-{top_k} of {num_experts} experts can't be distinct")
    start = np.arange(rows)[:, None, None] * top_k + np.arange(layers)[None, :, None]
    return (start + np.arange(top_k)) % num_experts
