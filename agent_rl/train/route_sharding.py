"""The driver's side of the routes: every rank's share is cut out before a byte travels, and what ranks report of their
shares is put together again. numpy only.

::

    samples ─ routes ─> cut for (data rank, context rank, tensor rank, pipeline stages) ─> one object a micro-batch
            └ the rest ─> one object a data rank
    experts used, or where they differ <─ put together ── every rank's own rows and layers

Axes: ``T`` packed tokens, ``L`` MoE layers, ``R`` rows and ``C`` columns of a rank, ``K`` experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import numpy as np
from numpy.typing import NDArray

from agent_rl.errors import TrainerError
from agent_rl.train.reports import Differing, RouteCounts, count_routes
from agent_rl.types import Sample
from r3.routing import Routing, RoutingError
from r3.shard import Packing, RouteShard, ShardSpec, cut_routes, unshard

MicroBatches = Sequence[Sequence[int]]

TakeDiffering = Callable[[Sequence[int], NDArray[np.bool_]], None]
"""Given the samples' indices of a micro-batch, and where their routers differ, ``[T, L]``."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Where a rank stands: it gets the batches of its ``data_rank`` and, of their routes, what ``shard`` says.

    ``lead``: of the ranks that share a data rank, the one that reports what all of them know. ``moe_layers`` are the
    whole model's, ``layer_numbers`` those layers' numbers, from 1. ``notes``: lines for the user about its start.
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
    """Whether samples come with routes. Raises TrainerError where only some do, or where they don't line up."""
    given = [(index, sample, sample.routing) for index, sample in enumerate(samples) if sample.routing is not None]
    if given and len(given) != len(samples):
        raise TrainerError(f"{len(samples) - len(given)} of {len(samples)} samples have no routes")
    for index, sample, routing in given:
        if routing.tokens != len(sample.tokens):
            raise TrainerError(f"sample {index} has {len(sample.tokens)} tokens and {routing.tokens} rows of routes")
        if routing.moe_layers != moe_layers:
            raise TrainerError(
                f"sample {index} has routes of {routing.moe_layers} MoE layers, the trainer's model has {moe_layers}"
            )
    if len(shapes := {(r.top_k, r.num_experts, str(r.experts.dtype)) for _, _, r in given}) > 1:
        raise TrainerError(f"samples have routes of different shapes (top-k, experts, dtype): {sorted(shapes)}")
    return bool(given)


def without_routes(samples: Sequence[Sample], micro_batches: MicroBatches) -> dict[int, Sample]:
    """The samples of ``micro_batches`` by index, as they travel."""
    return {index: _bare(samples[index]) for ids in micro_batches for index in ids}


def _bare(sample: Sample) -> Sample:
    return replace(sample, routing=None)


def cut(samples: Sequence[Sample], ids: Sequence[int], spec: ShardSpec) -> RouteShard:
    """A rank's share of the routes of the micro-batch ``ids``."""
    tokens_T = np.concatenate([samples[index].tokens for index in ids])
    return cut_routes([_routing(samples[index]) for index in ids], ids, tokens_T, _packing(samples, ids, spec), spec)


def put_together(
    samples: Sequence[Sample], ids: Sequence[int], infos: Sequence[RankInfo], parts: Sequence[NDArray]
) -> NDArray:
    """What the ranks of one data rank hold of micro-batch ``ids``, ``[R, C, ...]`` each, as ``[T, L, ...]``.

    Raises TrainerError unless every token and layer is there exactly once.
    """
    specs = [info.shard for info in infos]
    try:
        return unshard(_packing(samples, ids, specs[0]), specs, parts, infos[0].moe_layers)
    except RoutingError as error:
        raise TrainerError(f"the ranks' routes don't fit together: {error}") from None


def count_differing(
    samples: Sequence[Sample],
    micro_batches: MicroBatches,
    infos: Sequence[RankInfo],
    differs: Sequence[Sequence[NDArray[np.bool_]]],
    take: TakeDiffering | None = None,
) -> RouteCounts:
    """The counts of one data rank; ``differs[rank][micro_batch]`` bool ``[R, C]``: experts unlike the rollout's.
    ``take`` is given those of each micro-batch, put together."""
    total = RouteCounts.none(infos[0].moe_layers)
    for at, ids in enumerate(micro_batches):
        differs_TL = put_together(samples, ids, infos, [rank[at] for rank in differs])
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
    infos: Sequence[RankInfo],
    differs: Sequence[Differing | None],
    take: TakeDiffering | None = None,
    take_without_replay: TakeDiffering | None = None,
) -> tuple[RouteCounts | None, RouteCounts | None]:
    """The counts over all ranks, with the configured replay and without any; ``differs[rank]`` is a rank's answer.
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
    """Packed values of a micro-batch, ``[T, ...]``, sample by sample."""
    bounds = np.cumsum([len(samples[index].tokens) for index in ids])[:-1]
    return dict(zip(ids, np.split(values_T, bounds), strict=True))


def _packing(samples: Sequence[Sample], ids: Sequence[int], spec: ShardSpec) -> Packing:
    return Packing(tuple(len(samples[index].tokens) for index in ids), spec.multiple)


def _routing(sample: Sample) -> Routing:
    assert sample.routing is not None
    return sample.routing
