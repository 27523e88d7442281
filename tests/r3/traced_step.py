"""A training step whose ranks are loops. Routes are planned, cut and traced by the product; routers use what they get.

A :class:`Fault` may change the routes between any two hand-overs, as a defect of a trainer would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from r3.routing import Routing, narrowest_dtype
from r3.shard import Packing, RouteShard, ShardSpec, cut_routes, router_places
from r3.trace.events import STAGES, Stage
from r3.trace.recorders import RankTracer, TracedRank, request_trace, write_driver_trace

MOE_LAYERS = (2, 3, 5, 6)  # layers 1 and 4 of this model are dense
TOP_K, EXPERTS, STEP = 2, 300, 7
LENGTHS = (11, 6, 17, 2, 9)
MICRO_BATCHES = (((0, 1), (2,)), ((4, 3),))
"""``[data_rank][micro_batch]``"""


@dataclass(frozen=True)
class Fault:
    """What goes wrong; by default nothing. ``micro_batch`` counts from 0 on each data rank."""

    shares: Callable[[Stage, dict[int, RouteShard], int], dict[int, RouteShard]] = lambda stage, shares, batch: shares
    """Shares of the ranks of one data rank as a pass begins: (stage, rank -> share, micro_batch)."""
    given: Callable[[Stage, int, int, NDArray], NDArray] = lambda stage, rank, batch, experts: experts
    """What a rank hands to its routers, ``[R, C, K]``: (stage, rank, micro_batch, experts)."""
    assigned: Callable[[Stage, int, int, NDArray], NDArray] = lambda stage, rank, layer, experts: experts
    """What one router receives, ``[R, K]``: (stage, rank, layer, experts)."""
    used: Callable[[Stage, str, int, int, NDArray], NDArray] = lambda stage, action, rank, layer, experts: experts
    """What it uses, ``[R, K]``: (stage, action, rank, layer, experts)."""


@dataclass(frozen=True)
class Layout:
    """How many ranks share a data rank, and how."""

    context: int = 1
    tensor: int = 1
    pipeline: int = 1

    def specs(self) -> list[ShardSpec]:
        stages = np.array_split(np.arange(len(MOE_LAYERS)), self.pipeline)
        return [
            ShardSpec(tuple(stage.tolist()), c, self.context, t, self.tensor)
            for stage, c, t in product(stages, range(self.context), range(self.tensor))
        ]

    def places(self) -> list[TracedRank]:
        specs = self.specs()
        return [
            TracedRank(data_rank * len(specs) + at, data_rank, spec)
            for data_rank in range(len(MICRO_BATCHES))
            for at, spec in enumerate(specs)
        ]


def tokens_of(sample: int) -> NDArray[np.int32]:
    return (np.arange(LENGTHS[sample]) + 100 * sample).astype(np.int32)


def routing_of(sample: int, missing: Sequence[int] = ()) -> Routing:
    """Every (sample, row, layer) has other experts; the last row and ``missing`` are absent and hold garbage."""
    generator = np.random.default_rng(sample)
    drawn = generator.random((LENGTHS[sample], len(MOE_LAYERS), EXPERTS)).argsort(axis=-1)[..., :TOP_K]
    present = np.ones(LENGTHS[sample], bool)
    present[[*missing, -1]] = False
    return Routing(drawn.astype(narrowest_dtype(EXPERTS)), present, (), EXPERTS)


def trace_step(
    directory: Path,
    layout: Layout,
    fault: Fault = Fault(),
    *,
    recompute: bool = True,
    verify: bool = True,
    samples: int = 8,
    limit: int = 8,
    step: int = STEP,
) -> None:
    """Write the traces of all ranks of a step."""
    tokens = [tokens_of(sample) for sample in range(len(LENGTHS))]
    routings = [routing_of(sample, (1,) if sample == 2 else ()) for sample in range(len(LENGTHS))]
    order = request_trace(
        directory, step, MICRO_BATCHES, MOE_LAYERS, samples=samples, limit=limit, previews=3, verify_forward=verify
    )
    places = layout.places()
    write_driver_trace(order, places, tokens, routings, recompute=recompute)
    tracers = {place.rank: RankTracer(order, place.rank, place.data_rank, place.spec) for place in places}
    for stage, (data_rank, batches) in product(STAGES, enumerate(MICRO_BATCHES)):
        ranks = [place for place in places if place.data_rank == data_rank]
        for place in ranks:
            tracers[place.rank].begin(stage, 0)
        for micro_batch, ids in enumerate(batches):
            packing = Packing(tuple(LENGTHS[index] for index in ids), ranks[0].spec.multiple)
            packed = np.concatenate([tokens[index] for index in ids])
            step_pass = Pass(stage, micro_batch, packing, packed, fault, recompute)
            chosen = [routings[index] for index in ids]
            shares = {place.rank: cut_routes(chosen, ids, packed, packing, place.spec) for place in ranks}
            for rank, share in fault.shares(stage, shares, micro_batch).items():
                if tracers[rank].traces(micro_batch):
                    run_rank(tracers[rank], next(place for place in ranks if place.rank == rank), step_pass, share)
    for tracer in tracers.values():
        tracer.__exit__(None, None, None)


@dataclass(frozen=True)
class Pass:
    """One pass over a micro-batch."""

    stage: Stage
    micro_batch: int
    packing: Packing
    tokens: NDArray[np.integer]
    fault: Fault
    recompute: bool


def run_rank(tracer: RankTracer, place: TracedRank, at: Pass, share: RouteShard) -> None:
    """What a rank does with its share in one pass."""
    stage, batch, fault = at.stage, at.micro_batch, at.fault
    tracer.fetched(batch, at.tokens, at.packing, share)
    source = at.packing.source[router_places(at.packing, place.spec)]
    pinned = share.present | (source < 0)
    experts = fault.given(stage, place.rank, batch, share.experts.copy())
    tracer.sharded(batch, at.packing, np.where(source < 0, 0, at.tokens[source]), experts, pinned, len(experts))
    own = np.tile(np.arange(EXPERTS - TOP_K, EXPERTS), (len(experts), 1))
    for column, layer in enumerate(MOE_LAYERS[index] for index in place.spec.columns):
        given = fault.assigned(stage, place.rank, layer, experts[:, column].copy())
        tracer.assigned(layer, batch, given)
        expected = np.sort(np.where(pinned[:, None], given, own), axis=-1)
        for action in ("replay_forward", "replay_backward") if stage == "train" else ("replay_forward",):
            tracer.action(layer, batch, action)
            if tracer.verifies and (action == "replay_forward" or at.recompute):
                used = np.sort(fault.used(stage, action, place.rank, layer, expected.copy()), axis=-1)
                tracer.used(layer, batch, action, used, expected, int((~pinned).sum()))


def shifted(share: RouteShard) -> RouteShard:
    """The rows one place further on."""
    return replace(share, experts=np.roll(share.experts, 1, axis=0))
