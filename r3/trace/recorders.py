"""Records a traced step at each hand-over, on the driver and on the ranks. numpy only; see :mod:`.events`.

::

    driver   request_trace ──> TraceRequest ──(sent with the step)──> ranks
             write_driver_trace: the plan, and each rank's part of the traced samples, from the rollout's rows
    rank     RankTracer: fetched -> sharded -> assigned -> used, a micro-batch at a time

The driver does not use :func:`r3.shard.cut_routes`, because the ranks use it: it selects each sample's rows by the
positions that a rank should have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from r3.routing import Routing
from r3.shard import Packing, RouteShard, ShardSpec, identify, router_places
from r3.trace.events import (
    FETCH_STAGE,
    Action,
    Assignment,
    Fetch,
    ForwardVerify,
    Payload,
    RankPlan,
    ReplayAction,
    Shard,
    Stage,
    TracePlan,
    TraceWriter,
    canonical,
    layer_sha256,
    remove_step,
    runs,
    sample_rows,
    sha256,
    sorted_sha256,
    tensor_record,
)

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """What to trace in a step. ``micro_batches[data_rank]``: the samples of its first micro-batches; ``samples``: those
    traced individually; ``moe_layers``: the 1-based numbers of the MoE layers."""

    directory: Path
    step: int
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    samples: frozenset[int]
    moe_layers: tuple[int, ...]
    previews: int
    verify_forward: bool


def request_trace(
    directory: Path,
    step: int,
    micro_batches: Sequence[Sequence[Sequence[int]]],
    moe_layers: Sequence[int],
    *,
    samples: int,
    limit: int,
    previews: int,
    verify_forward: bool,
) -> TraceRequest:
    """Request a trace of the first ``limit`` micro-batches of every data rank, and of their first ``samples``
    samples."""
    first = [[tuple(ids) for ids in batches[:limit]] for batches in micro_batches]
    followed = [index for batches in first for index in [i for ids in batches for i in ids][:samples]]
    traced = tuple(tuple(batches) for batches in first)
    return TraceRequest(directory, step, traced, frozenset(followed), tuple(moe_layers), previews, verify_forward)


@dataclass(frozen=True, slots=True)
class TracedRank:
    """A rank, its data-parallel rank and its shard."""

    rank: int
    data_rank: int
    spec: ShardSpec


def write_driver_trace(
    order: TraceRequest,
    ranks: Sequence[TracedRank],
    tokens: Sequence[NDArray[np.integer]],
    routings: Sequence[Routing | None],
    *,
    recompute: bool,
) -> None:
    """Write the driver's file and remove the trace of an earlier attempt of this step.

    ``tokens`` and ``routings``: of all samples of the step. ``recompute``: routers run again under the backward pass.
    """
    remove_step(order.directory, order.step)
    with TraceWriter(order.directory, order.step, None, order.previews) as writer:
        writer.add(
            TracePlan,
            layers=order.moe_layers,
            recompute=recompute,
            verify_forward=order.verify_forward,
            ranks=tuple(
                RankPlan(
                    rank=place.rank,
                    data_rank=place.data_rank,
                    layers=_layer_numbers(order, place.spec),
                    micro_batches=len(order.micro_batches[place.data_rank]),
                )
                for place in ranks
            ),
        )
        for place in ranks:
            for index, ids in enumerate(order.micro_batches[place.data_rank]):
                _add_payloads(writer, order, place, index, ids, tokens, routings)


def _add_payloads(
    writer: TraceWriter,
    order: TraceRequest,
    place: TracedRank,
    index: int,
    ids: Sequence[int],
    tokens: Sequence[NDArray[np.integer]],
    routings: Sequence[Routing | None],
) -> None:
    packing = Packing(tuple(len(tokens[sample]) for sample in ids), place.spec.multiple)
    for _, sample, _, positions in _traced_samples(order, packing, place.spec, ids):
        routing = routings[sample]
        assert routing is not None
        experts = routing.experts[positions][:, list(place.spec.columns)]
        fed = tokens[sample][positions]
        fields = sample_rows(
            _key(order.step, sample, place.rank),
            positions,
            _layer_numbers(order, place.spec),
            fed,
            experts,
            routing.present[positions],
            identify(sample, positions, fed),
            full_shape=routing.experts.shape,
            previews=order.previews,
        )
        writer.add(
            Payload,
            sample_idx=sample,
            valid_length=len(positions),
            microbatch_idx=index,
            to_rank=place.rank,
            sample_length=len(tokens[sample]),
            **fields,
        )


class RankTracer:
    """Records the micro-batches of one rank that it :meth:`traces`. Arrays have this rank's rows.

    A context manager: the file is written when it closes.
    """

    def __init__(self, order: TraceRequest, rank: int, data_rank: int, spec: ShardSpec) -> None:
        self._order, self._rank, self._spec = order, rank, spec
        self._writer = TraceWriter(order.directory, order.step, rank, order.previews)
        self._micro_batches = order.micro_batches[data_rank]
        self._layers = _layer_numbers(order, spec)
        self._stage: Stage = "prev-logprob"
        self._first = 0
        self._pass_routes: dict[int, tuple[NDArray[np.int32], NDArray[np.bool_]]] = {}

    def __enter__(self) -> RankTracer:
        return self

    def __exit__(self, *error: Any) -> None:
        self._writer.__exit__(*error)

    def begin(self, stage: Stage, first: int) -> None:
        """Start a pass over micro-batches that count from ``first`` in this rank's list."""
        self._stage, self._first = stage, first
        self._pass_routes.clear()

    def traces(self, microbatch: int) -> bool:
        """Whether to trace this micro-batch of the pass."""
        return bool(self._layers) and self._first + microbatch < len(self._micro_batches)

    @property
    def verifies(self) -> bool:
        """Whether to call :meth:`used`."""
        return self._order.verify_forward

    def fetched(self, microbatch: int, tokens: NDArray[np.integer], packing: Packing, shard: RouteShard) -> None:
        """Record what the rank has at the start of the pass: packed ``tokens`` and its shard of their routes."""
        index = self._first + microbatch
        starts = packing.cu_seqlens
        for sequence, sample, local, positions in self._parts(index, packing):
            fields = sample_rows(
                _key(self._order.step, sample, self._rank),
                positions,
                [self._order.moe_layers[column] for column in shard.columns],
                tokens[starts[sequence] + positions],
                shard.experts[local],
                shard.present[local],
                shard.identity[local],
                full_shape=shard.experts.shape,
                previews=self._order.previews,
            )
            self._writer.add(
                Fetch,
                stage=FETCH_STAGE[self._stage],
                sample_idx=sample,
                valid_length=len(positions),
                microbatch_idx=index,
                **fields,
            )

    def sharded(
        self,
        microbatch: int,
        packing: Packing,
        fed: NDArray[np.integer],
        experts: NDArray[np.integer],
        pinned: NDArray[np.bool_],
        checked: int,
    ) -> None:
        """Record the routers' input: ``experts`` ``[R, C, K]``, the rows ``pinned`` to them, and the tokens ``fed`` at
        these rows. ``checked``: number of rows that were compared with their tokens."""
        index = self._first + microbatch
        routes = canonical(experts, pinned)
        self._pass_routes[index] = routes, pinned
        identity = self._identity(index, packing, fed)
        segments = []
        for _, sample, local, positions in self._parts(index, packing):
            fields = sample_rows(
                _key(self._order.step, sample, self._rank),
                positions,
                self._layers,
                fed[local],
                experts[local],
                pinned[local],
                identity[local],
                full_shape=experts.shape,
                previews=self._order.previews,
            )
            segments.append({**fields, "local": runs(local)})
        previews = self._order.previews
        self._writer.add(
            Shard,
            stage=self._stage,
            microbatch_idx=index,
            cp_rank=self._spec.context_rank,
            cp_size=self._spec.context_size,
            tensor=tensor_record(routes, previews),
            token_identity=tensor_record(identity, previews),
            input_ids=tensor_record(fed, previews),
            cp_token_identity_verified_count=checked,
            missing_rows=int((~pinned).sum()),
            layers=self._layers,
            layer_sha256=layer_sha256(routes),
            segments=tuple(segments),
        )

    def assigned(self, layer: int, microbatch: int, experts: NDArray[np.integer]) -> None:
        """Record that layer ``layer`` (1-based) received ``experts`` ``[R, K]``."""
        index = self._first + microbatch
        routes, pinned = self._pass_routes[index]
        given = canonical(experts[:, None], pinned)[:, 0]
        self._writer.add(
            Assignment,
            stage=self._stage,
            microbatch_idx=index,
            layer_number=layer,
            payload_idx=self._order.moe_layers.index(layer),
            tensor=tensor_record(given, self._order.previews),
            sorted_sha256=sorted_sha256(given),
            differs_at=_first_difference(given, routes[:, self._layers.index(layer)]),
        )

    def action(self, layer: int, microbatch: int, action: ReplayAction) -> None:
        """Record that the layer's router was switched to ``action``."""
        index = self._first + microbatch
        self._writer.add(Action, stage=self._stage, microbatch_idx=index, layer_number=layer, action=action)

    def used(
        self,
        layer: int,
        microbatch: int,
        action: ReplayAction,
        used: NDArray[np.integer],
        expected: NDArray[np.integer] | None,
        fallback_rows: int,
    ) -> None:
        """Record a run of the layer's router; ``used`` and ``expected`` ``[R, K]``, each row ascending."""
        index = self._first + microbatch
        pinned = self._pass_routes[index][1]
        actual = used.astype("<i4")
        requested = None if expected is None else expected.astype("<i4")
        differs_at = None if requested is None else _first_difference(actual, requested)
        previews = self._order.previews
        self._writer.add(
            ForwardVerify,
            stage=self._stage,
            microbatch_idx=index,
            action=action,
            layer_number=layer,
            topk=used.shape[1],
            actual=tensor_record(actual, previews),
            expected=None if requested is None else tensor_record(requested, previews),
            matches_expected=requested is not None and differs_at is None,
            fallback_rows=fallback_rows,
            given_sha256=sha256(canonical(actual[:, None], pinned)[:, 0]),
            differs_at=differs_at,
        )

    def _parts(self, index: int, packing: Packing) -> Iterator[tuple[int, int, Rows, Rows]]:
        return _traced_samples(self._order, packing, self._spec, self._micro_batches[index])

    def _identity(self, index: int, packing: Packing, fed: NDArray[np.integer]) -> NDArray[np.uint32]:
        """Returns the identity of each row, from the tokens fed to the model."""
        places = router_places(packing, self._spec)
        samples = np.asarray(self._micro_batches[index])[packing.sequence[places]]
        token = np.where(packing.source[places] < 0, -1, fed)
        return identify(samples, packing.positions[places], token)


def _traced_samples(
    order: TraceRequest, packing: Packing, spec: ShardSpec, ids: Sequence[int]
) -> Iterator[tuple[int, int, Rows, Rows]]:
    """Yields each traced sample of a micro-batch with rows on a rank: its sequence number, its index, the indices of
    its rows in the rank's shard, and the positions of these rows in the sample."""
    if not spec.columns:
        return
    places = router_places(packing, spec)
    sequence, real = packing.sequence[places], packing.source[places] >= 0
    for number, sample in enumerate(ids):
        local = np.flatnonzero((sequence == number) & real)
        if sample in order.samples and len(local):
            yield number, sample, local, packing.positions[places[local]]


def _layer_numbers(order: TraceRequest, spec: ShardSpec) -> tuple[int, ...]:
    return tuple(order.moe_layers[column] for column in spec.columns)


def _key(step: int, sample: int, rank: int) -> str:
    return f"step-{step}/sample-{sample}/rank-{rank}"


def _first_difference(left: NDArray[np.integer], right: NDArray[np.integer]) -> int | None:
    if left.shape != right.shape:
        return 0
    wrong = np.flatnonzero((left != right).any(axis=-1))
    return int(wrong[0]) if len(wrong) else None
