"""The driver's side of routes: shard them for every rank before they travel, reassemble what ranks report. numpy only.

::

    samples ─ routes ─> shard for (data rank, context rank, tensor rank, pipeline stages) ─> one object per micro-batch
            └ the rest ─> one object per data rank
    experts used, or where they differ <─ reassembled ── rows and layers of every rank

Axes: ``T`` packed tokens, ``L`` MoE layers, ``R`` rows and ``C`` columns of a rank, ``K`` experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import numpy as np
from numpy.typing import NDArray

from agent_rl.errors import TrainerError
from agent_rl.train.reports import RouteCounts, RouteDifferences, count_routes
from agent_rl.types import Sample
from r3.routing import Routing, RoutingError
from r3.shard import Packing, RouteShard, ShardSpec, cut_routes, unshard

MicroBatches = Sequence[Sequence[int]]

TakeDiffering = Callable[[Sequence[int], NDArray[np.bool_]], None]
"""Called with the sample indices of a micro-batch, and bool ``[T, L]``: where its routers differ."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The position of a worker. It gets the batches of its ``data_rank`` and the shard ``shard`` of their routes.

    ``lead``: it reports for all ranks of its data rank. ``moe_layers``: number of MoE layers of the full model;
    ``layer_numbers``: their numbers, from 1. ``notes``: lines for the user about the start.
    """

    rank: int
    data_rank: int
    data_size: int
    lead: bool
    shard: ShardSpec
    moe_layers: int
    layer_numbers: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def have_routes(samples: Sequence[Sample], moe_layers: int) -> bool:
    """Whether the samples have routes. Raises TrainerError where only some have, or where shapes do not match."""
    routed = [(index, sample, sample.routing) for index, sample in enumerate(samples) if sample.routing is not None]
    if routed and len(routed) != len(samples):
        raise TrainerError(f"{len(samples) - len(routed)} of {len(samples)} samples have no routes")
    for index, sample, routing in routed:
        if routing.tokens != len(sample.tokens):
            raise TrainerError(f"sample {index} has {len(sample.tokens)} tokens and {routing.tokens} rows of routes")
        if routing.moe_layers != moe_layers:
            raise TrainerError(
                f"sample {index} has routes of {routing.moe_layers} MoE layers, the trainer's model has {moe_layers}"
            )
    if len(shapes := {(r.top_k, r.num_experts, str(r.experts.dtype)) for _, _, r in routed}) > 1:
        raise TrainerError(f"samples have routes of different shapes (top-k, experts, dtype): {sorted(shapes)}")
    return bool(routed)


def without_routes(samples: Sequence[Sample], micro_batches: MicroBatches) -> dict[int, Sample]:
    """The samples of ``micro_batches`` by index, without routes."""
    return {index: replace(samples[index], routing=None) for ids in micro_batches for index in ids}


def shard_routes(samples: Sequence[Sample], ids: Sequence[int], spec: ShardSpec) -> RouteShard:
    """A rank's shard of the routes of micro-batch ``ids``."""
    tokens_T = np.concatenate([samples[index].tokens for index in ids])
    return cut_routes([_routing(samples[index]) for index in ids], ids, tokens_T, _packing(samples, ids, spec), spec)


def reassemble(
    samples: Sequence[Sample], ids: Sequence[int], infos: Sequence[WorkerInfo], parts: Sequence[NDArray]
) -> NDArray:
    """Reassemble the ranks' parts ``[R, C, ...]`` of micro-batch ``ids`` into ``[T, L, ...]``; ``infos``: one data
    rank.

    Raises TrainerError unless every token and layer appears exactly once.
    """
    specs = [info.shard for info in infos]
    try:
        return unshard(_packing(samples, ids, specs[0]), specs, parts, infos[0].moe_layers)
    except RoutingError as error:
        raise TrainerError(f"the ranks' routes do not fit together: {error}") from None


def count_differing(
    samples: Sequence[Sample],
    micro_batches: MicroBatches,
    infos: Sequence[WorkerInfo],
    differs: Sequence[Sequence[NDArray[np.bool_]]],
    take: TakeDiffering | None = None,
) -> RouteCounts:
    """The counts of one data rank. ``differs[rank][micro_batch]`` bool ``[R, C]``: experts unlike the rollout's.
    ``take`` receives the reassembled differences of each micro-batch."""
    total = RouteCounts.none(infos[0].moe_layers)
    for number, ids in enumerate(micro_batches):
        differs_TL = reassemble(samples, ids, infos, [rank[number] for rank in differs])
        if take is not None:
            take(ids, differs_TL)
        routings = [_routing(samples[index]) for index in ids]
        present_T = np.concatenate([routing.present for routing in routings])
        cu_seqlens = _packing(samples, ids, infos[0].shard).cu_seqlens
        stored = sum(routing.experts.nbytes for routing in routings)
        total += count_routes(differs_TL, present_T, cu_seqlens, stored_bytes=stored)
    return total


def count_all_differing(
    samples: Sequence[Sample],
    micro_batches: Sequence[MicroBatches],
    infos: Sequence[WorkerInfo],
    differs: Sequence[RouteDifferences | None],
    take: TakeDiffering | None = None,
    take_without_replay: TakeDiffering | None = None,
) -> tuple[RouteCounts | None, RouteCounts | None]:
    """The counts over all ranks, with the configured replay and without replay. ``differs[rank]``: a worker's result.
    ``take`` and ``take_without_replay``: as in :func:`count_differing`."""
    replayed: list[RouteCounts] = []
    unreplayed: list[RouteCounts] = []
    for data_rank, batches in enumerate(micro_batches):
        peers = [info for info in infos if info.data_rank == data_rank]
        parts = [part for info in peers if (part := differs[info.rank]) is not None]
        if parts:
            unpacked = [part.unpacked(part.replayed) for part in parts]
            replayed.append(count_differing(samples, batches, peers, unpacked, take))
        without_replay = [part.unpacked(part.without_replay) for part in parts if part.without_replay is not None]
        if without_replay:
            unreplayed.append(count_differing(samples, batches, peers, without_replay, take_without_replay))
    return _total(replayed), _total(unreplayed)


def _total(counts: Sequence[RouteCounts]) -> RouteCounts | None:
    return reduce(add, counts) if counts else None


def by_sample(samples: Sequence[Sample], ids: Sequence[int], values_T: NDArray) -> Mapping[int, NDArray]:
    """Split packed values of a micro-batch ``[T, ...]`` by sample."""
    bounds = np.cumsum([len(samples[index].tokens) for index in ids])[:-1]
    return dict(zip(ids, np.split(values_T, bounds), strict=True))


def _packing(samples: Sequence[Sample], ids: Sequence[int], spec: ShardSpec) -> Packing:
    return Packing(tuple(len(samples[index].tokens) for index in ids), spec.multiple)


def _routing(sample: Sample) -> Routing:
    assert sample.routing is not None
    return sample.routing
