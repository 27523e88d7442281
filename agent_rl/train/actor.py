"""The Ray actor around one trainer rank. torch and Megatron load inside the actor's process.

``@ray.method`` gives a method a typed ``remote``: mypy checks what the driver passes and what it gets. An argument may
be a reference into Ray's object store, which Ray resolves; references inside a list are resolved here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray import ObjectRef

from agent_rl.errors import TrainerError
from agent_rl.train.batching.mini_steps import MiniStepShare
from agent_rl.train.expert_balancing.report import BalanceReport
from agent_rl.train.hf_index import LoadProgress
from agent_rl.train.reports import Differing, ForwardAnswer, RankReport, Update, WeightedSequences
from agent_rl.train.requests import OptimizerSpec, StepRequest, WorkerRequest
from agent_rl.train.route_sharding import RankInfo
from agent_rl.types import Sample
from agent_rl.weight_sync.order import PublishReport, PublishRequest
from r3.shard import RouteShard

if TYPE_CHECKING:
    from agent_rl.train.checkpoint.directory import Manifest
    from agent_rl.train.worker import TrainerRank

BESIDE = "beside"
"""The concurrency group of what runs beside whatever else the actor does: :meth:`RankActor.written` and ``loading``."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks meet: rank 0's host, and the port that it listens on there."""

    host: str
    port: int


class RankActor:
    """One rank in a process of its own; wrap with ``ray.remote``. Its methods are those of
    :class:`agent_rl.train.worker.TrainerRank`, which says what each does."""

    def __init__(self) -> None:
        self._started: TrainerRank | None = None
        self._progress = LoadProgress()
        self._listener = socket.create_server(("", 0))

    @property
    def _rank(self) -> TrainerRank:
        if self._started is None:
            raise TrainerError("the rank was not started")
        return self._started

    @ray.method
    def rendezvous(self) -> Rendezvous:
        """Where the others would meet this one."""
        return Rendezvous(ray.util.get_node_ip_address(), int(self._listener.getsockname()[1]))

    @ray.method
    def start(self, order: WorkerRequest, optimizer: OptimizerSpec, rank: int, meeting: Rendezvous) -> RankInfo:
        """Build the rank; all ranks are started at once."""
        from agent_rl.train.worker import TrainerRank

        # The rendezvous takes the listening socket over where it is used, and nobody needs it where it is not.
        listener = self._listener.detach()
        if rank != 0:
            os.close(listener)
        self._started = TrainerRank(
            order,
            optimizer,
            rank,
            master_addr=meeting.host,
            master_port=meeting.port,
            listener=listener if rank == 0 else None,
            progress=self._progress,
        )
        return self._started.info()

    @ray.method(concurrency_group=BESIDE)
    def loading(self) -> LoadProgress:
        """How far it is with reading weights; while it starts."""
        return self._progress

    @ray.method
    def set_optimizer(self, spec: OptimizerSpec) -> None:
        self._rank.set_optimizer(spec)

    @ray.method
    def grpo(
        self,
        samples: Mapping[int, Sample],
        shares: Sequence[MiniStepShare],
        order: StepRequest,
        routes: Sequence[ObjectRef[RouteShard]],
    ) -> tuple[RankReport | None, Differing | None, BalanceReport | None]:
        return self._rank.grpo(samples, shares, order, ray.get(list(routes)))

    @ray.method
    def logprobs(
        self,
        samples: Mapping[int, Sample],
        micro_batches: Sequence[Sequence[int]],
        temperature: float,
        record: bool,
        routes: Sequence[ObjectRef[RouteShard]],
    ) -> ForwardAnswer:
        return self._rank.logprobs(samples, micro_batches, temperature, record, ray.get(list(routes)))

    @ray.method
    def supervise(
        self, sequences: WeightedSequences, shares: Sequence[Sequence[Sequence[int]]], batch_weight: float
    ) -> tuple[float, Update]:
        return self._rank.supervise(sequences, shares, batch_weight)

    @ray.method
    def save(self, partial: Path) -> tuple[int, dict[str, int]]:
        return self._rank.save(partial)

    @ray.method(concurrency_group=BESIDE)
    def written(self) -> int:
        return self._rank.written()

    @ray.method
    def load(self, directory: Path, manifest: Manifest) -> None:
        self._rank.load(directory, manifest)

    @ray.method
    def export(self, directory: Path) -> None:
        self._rank.export(directory)

    @ray.method
    def publish(self, order: PublishRequest) -> PublishReport | None:
        return self._rank.publish(order)
