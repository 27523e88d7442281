"""Ablations of the routes between rollout and trainer (``r3.ablation``), which measure the cost of a fault.

Pure functions of a rank's rows. The config refuses layouts that divide sequences, so the rows are the packed tokens of
a micro-batch. Row i was computed with token i as the input and sampled token i + 1. The old-log-prob pass is still
compared with the unchanged routes, so ``r3/router_mismatch`` shows every ablation of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from agent_rl.config import Ablation
from agent_rl.train.batching.packing import MicroBatch
from r3.shard import RouteShard

Shards = Sequence[RouteShard]


def ablated_routes(
    ablation: Ablation, routes: Shards, batches: Sequence[MicroBatch]
) -> tuple[Shards | None, Shards | None]:
    """The routes of the old-log-prob pass and those of the update, one per batch; None: no replay in that pass."""
    if ablation == "old_logprob_only":
        return routes, None
    if ablation == "update_only":
        return None, routes
    change = _CHANGES[ablation]
    changed = [change(shard, batch) for shard, batch in zip(routes, batches, strict=True)]
    return changed, changed


def _as_it_is(shard: RouteShard, batch: MicroBatch) -> RouteShard:
    return shard


def _sampled_only(shard: RouteShard, batch: MicroBatch) -> RouteShard:
    """Keep the rows that sampled a token; prompts and observations are not replayed."""
    return replace(shard, present=shard.present & _of_next(batch.mask_T))


def _fresh_only(shard: RouteShard, batch: MicroBatch) -> RouteShard:
    """Drop the rows that sampled a token with older weights."""
    return replace(shard, present=shard.present & ~_of_next(batch.lag_T > 0))


def _shifted(shard: RouteShard, batch: MicroBatch) -> RouteShard:
    """Give every token the row of the token before; a sequence's first token has none."""
    present = np.roll(shard.present, 1)
    present[batch.cu_seqlens[:-1]] = False
    return replace(shard, experts=np.roll(shard.experts, 1, axis=0), present=present)


def _alternate_layers(shard: RouteShard, batch: MicroBatch) -> RouteShard:
    """Keep every other MoE layer, starting with the first."""
    even = np.array(shard.columns) % 2 == 0
    return replace(shard, present=shard.present[:, None] & even)


def _of_next(values_T: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The value of each row's next token. A sequence's first token is never sampled, so the last row of the sequence
    before it has False."""
    return np.append(values_T[1:], False)


_CHANGES: Mapping[Ablation, Callable[[RouteShard, MicroBatch], RouteShard]] = {
    "none": _as_it_is,
    "sampled_only": _sampled_only,
    "fresh_only": _fresh_only,
    "shifted": _shifted,
    "alternate_layers": _alternate_layers,
}
