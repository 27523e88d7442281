"""Trace a step of the trainer (``r3.trace`` in the config): the driver requests it, every rank records.

::

    driver   begin_trace: which micro-batches and samples, and the shard that each rank should receive
    rank     rank_trace ─> for each pass: model.observe(PassTrace) ─> shards, micro-batches, routers

Nothing here runs in a step without tracing. Imports no torch, which the driver lacks. :mod:`r3.trace.events` has the
records, :mod:`r3.trace.recorders` what goes into them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from numpy.typing import NDArray

from agent_rl.config import Replay, RunConfig, TraceConfig
from agent_rl.errors import ConfigError
from agent_rl.train.route_sharding import MicroBatches, WorkerInfo
from agent_rl.types import Sample
from r3.shard import RouteShard, ShardSpec, router_slice
from r3.trace.events import ReplayAction, Stage
from r3.trace.recorders import RankTracer, TracedRank, TraceRequest, request_trace, write_driver_trace

if TYPE_CHECKING:
    from torch import Tensor

    from agent_rl.train.megatron.packed_batch import PackedBatch
    from agent_rl.train.megatron.token_sharding import Layout


def check_trace(trace: TraceConfig, replay: Replay) -> None:
    """Raises ConfigError where ``r3.trace`` is set and the trainer does not replay the rollout's routes."""
    if trace.steps and replay != "r3":
        raise ConfigError(
            f"r3.trace.steps names {list(trace.steps)} and train.replay is {replay}: only r3 "
            "brings the rollout's routes to the trainer; leave r3.trace.steps empty"
        )


def begin_trace(
    config: RunConfig,
    step: int | None,
    samples: Sequence[Sample],
    micro_batches: Sequence[MicroBatches],
    infos: Sequence[WorkerInfo],
) -> TraceRequest | None:
    """Write the driver's trace of ``step`` and return the request to the ranks; None for a step without tracing.

    ``micro_batches[data_rank]``: those of the whole step. The directory is absolute; all ranks must see it.
    """
    settings, layers = config.r3.trace, infos[0].layer_numbers
    if step is None or step not in settings.steps or not layers:
        return None
    request = request_trace(
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
        request,
        [TracedRank(info.rank, info.data_rank, info.shard) for info in infos],
        [sample.tokens for sample in samples],
        [sample.routing for sample in samples],
        recompute=train.recompute == "full" or (train.recompute == "selective" and "moe" in train.recompute_modules),
    )
    return request


class PassTrace:
    """Receives the routes of a pass from the model and, as a :class:`r3.megatron_replay.ReplayObserver`, what the
    routers do with them. Records traced micro-batches; ``microbatch`` counts from 0 in the pass."""

    def __init__(self, tracer: RankTracer) -> None:
        self._tracer = tracer

    def fetched(self, microbatch: int, batch: PackedBatch, layout: Layout, share: RouteShard) -> None:
        """``share`` arrived for ``batch``, before any check."""
        if self._tracer.traces(microbatch):
            self._tracer.fetched(microbatch, _array(batch.tokens), layout.packing, share)

    def handed(
        self, microbatch: int, batch: PackedBatch, layout: Layout, experts: Tensor, pinned: Tensor, checked: int
    ) -> None:
        """``experts`` ``[R, C, K]`` go to the routers, which use the ``pinned`` rows. ``checked``: number of rows that
        were compared with their tokens."""
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
            replayed = None if expected is None else _array(expected)
            self._tracer.used(
                layer_number, microbatch, cast(ReplayAction, action), _array(used), replayed, fallback_rows
            )  # fmt: skip


class TracedModel(Protocol):
    """A model that reports the routes of its passes to a :class:`PassTrace`; None stops it."""

    def observe(self, trace: PassTrace | None) -> None: ...


def rank_trace(
    request: TraceRequest | None, rank: int, data_rank: int, spec: ShardSpec
) -> AbstractContextManager[RankTracer | None]:
    """A context around a rank's share of a step: its tracer, or None for a step without tracing."""
    return nullcontext() if request is None else RankTracer(request, rank, data_rank, spec)


@contextmanager
def traced_pass(model: TracedModel, tracer: RankTracer | None, stage: Stage, first: int) -> Iterator[None]:
    """A context around one pass of ``model``; ``first``: the number of its first micro-batch in the rank's list."""
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
