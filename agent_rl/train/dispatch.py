"""What each rank gets of a batch: its data rank's samples, and its own share of their routes, in Ray's object store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent_rl.train.route_sharding import MicroBatches, cut, without_routes
from agent_rl.train.worker_group import Ranks
from agent_rl.types import Sample

if TYPE_CHECKING:
    from ray import ObjectRef

    from r3.shard import RouteShard


@dataclass(frozen=True, slots=True)
class DispatchedStep:
    """A rank's references: its samples by index, and a share of the routes for every micro-batch, in order, or none.
    What they refer to stays in the object store as long as this lives."""

    samples: ObjectRef[Mapping[int, Sample]]
    routes: list[ObjectRef[RouteShard]]


def dispatch(
    ranks: Ranks, samples: Sequence[Sample], micro_batches: Sequence[MicroBatches], *, routes: bool
) -> list[DispatchedStep]:
    """For every rank, of ``micro_batches[data_rank]``. Blocks. A micro-batch at a time is cut, so nothing else of the
    routes is ever copied."""
    stored: list[ObjectRef[Mapping[int, Sample]]] = [
        ranks.put(without_routes(samples, batches)) for batches in micro_batches
    ]
    return [
        DispatchedStep(
            stored[info.data_rank],
            [ranks.put(cut(samples, ids, info.shard)) for ids in micro_batches[info.data_rank]] if routes else [],
        )
        for info in ranks.infos
    ]
