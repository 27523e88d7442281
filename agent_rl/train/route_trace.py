"""Tracing a step of the trainer (``r3.trace`` in the config): the driver orders it, every rank notes what it sees.

::

    driver   begin_trace: which micro-batches and samples, and what each rank should get of them
    rank     rank_trace ─> for each pass: model.observe(PassTrace) ─> shares, micro-batches, routers

Nothing here runs in a step that is not traced. Imports no torch: the driver has none. See :mod:`r3.trace.events` for
the records and :mod:`r3.trace.recorders` for what goes into them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from numpy.typing import NDArray

from agent_rl.config import RunConfig
from agent_rl.errors import ConfigError
from agent_rl.train.route_sharding import MicroBatches, RankInfo
from agent_rl.types import Sample
from r3.shard import RouteShard, ShardSpec, router_slice
from r3.trace.events import ReplayAction, Stage
from r3.trace.recorders import RankPlace, RankTracer, TraceRequest, order_trace, write_driver_trace

if TYPE_CHECKING:
    from torch import Tensor

    from agent_rl.train.megatron.packed_batch import PackedBatch
    from agent_rl.train.megatron.token_sharding import Layout


def check_trace(config: RunConfig) -> None:
    """Refuse to trace where the trainer does not replay the rollout's routes. Raises ConfigError."""
    if config.r3.trace.steps and config.train.replay != "r3":
        raise ConfigError(
            f"r3.trace.steps names {list(config.r3.trace.steps)} and train.replay is {config.train.replay}: only r3 "
            "brings the rollout's routes to the trainer; leave r3.trace.steps empty"
        )


def begin_trace(
    config: RunConfig,
    step: int | None,
    samples: Sequence[Sample],
    micro_batches: Sequence[MicroBatches],
    infos: Sequence[RankInfo],
) -> TraceRequest | None:
    """Write the driver's trace of ``step`` and say what the ranks are to trace; None where the step is not traced.

    ``micro_batches[data_rank]`` are all of the step's. The directory is absolute: all ranks must see it.
    """
    settings, layers = config.r3.trace, infos[0].layer_numbers
    if step is None or step not in settings.steps or not layers:
        return None
    order = order_trace(
        Path(os.path.abspath(settings.dir or config.run_dir / "r3_trace")),
        step,
        micro_batches,
        layers,
        samples=settings.samples,
        limit=settings.microbatches,
        previews=settings.previews,
        verify_forward=settings.verify_forward,
    )
    train = config.train
    write_driver_trace(
        order,
        [RankPlace(info.rank, info.data_rank, info.shard) for info in infos],
        [sample.tokens for sample in samples],
        [sample.routing for sample in samples],
        recompute=train.recompute == "full" or (train.recompute == "selective" and "moe" in train.recompute_modules),
    )
    return order


class PassTrace:
    """Told by a model what routes a pass brings to its routers and, as a :class:`r3.megatron_replay.ReplayObserver`,
    what those do with them; notes it where the micro-batch is traced. ``microbatch`` counts the pass' from 0."""

    def __init__(self, tracer: RankTracer) -> None:
        self._tracer = tracer

    def fetched(self, microbatch: int, batch: PackedBatch, layout: Layout, share: RouteShard) -> None:
        """``share`` came for ``batch``; nothing of it is checked yet."""
        if self._tracer.traces(microbatch):
            self._tracer.fetched(microbatch, _array(batch.tokens), layout.packing, share)

    def handed(
        self, microbatch: int, batch: PackedBatch, layout: Layout, experts: Tensor, pinned: Tensor, checked: int
    ) -> None:
        """``experts`` ``[R, C, K]`` go to the routers, the rows that are ``pinned`` to be used; ``checked`` rows were
        compared with their tokens."""
        if self._tracer.traces(microbatch):
            fed = layout.take(batch.tokens, 0)
            mine = _array(fed[router_slice(len(fed), layout.spec)])
            self._tracer.sharded(microbatch, layout.packing, mine, _array(experts), _array(pinned), checked)

    def assigned(self, layer_number: int, microbatch: int, experts: Tensor) -> None:
        if self._tracer.traces(microbatch):
            self._tracer.assigned(layer_number, microbatch, _array(experts))

    def action(self, layer_number: int, microbatch: int, action: str) -> None:
        if self._tracer.traces(microbatch):
            self._tracer.action(layer_number, microbatch, cast(ReplayAction, action))

    def forwarded(
        self, layer_number: int, microbatch: int, action: str, used: Tensor, expected: Tensor | None, fallback_rows: int
    ) -> None:
        if self._tracer.traces(microbatch) and self._tracer.verifies:
            asked = None if expected is None else _array(expected)
            self._tracer.used(
                layer_number, microbatch, cast(ReplayAction, action), _array(used), asked, fallback_rows
            )  # fmt: skip


class Observable(Protocol):
    """A model that tells a :class:`PassTrace`; None stops it."""

    def observe(self, trace: PassTrace | None) -> None: ...


def rank_trace(
    order: TraceRequest | None, rank: int, data_rank: int, spec: ShardSpec
) -> AbstractContextManager[RankTracer | None]:
    """Around a rank's share of a step: its tracer, or None where the step is not traced."""
    return nullcontext() if order is None else RankTracer(order, rank, data_rank, spec)


@contextmanager
def traced_pass(model: Observable, tracer: RankTracer | None, stage: Stage, first: int) -> Iterator[None]:
    """Around one pass of ``model``, over micro-batches that count from ``first`` in the rank's list."""
    if tracer is None:
        yield
        return
    tracer.begin(stage, first)
    model.observe(PassTrace(tracer))
    try:
        yield
    finally:
        model.observe(None)


def _array(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array
