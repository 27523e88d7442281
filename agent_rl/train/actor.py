"""The Ray actor of one trainer worker. torch and Megatron load inside the actor's process.

``@ray.method`` gives a method a typed ``remote``, which mypy checks. Ray resolves arguments that are references into
its object store; the methods here resolve references inside a list.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray import ObjectRef

from agent_rl.errors import TrainerError
from agent_rl.train.batching.partition import MiniStepShare
from agent_rl.train.expert_balancing.report import BalanceReport
from agent_rl.train.hf_index import LoadProgress
from agent_rl.train.reports import ForwardResult, RankReport, RouteDifferences, Update, WeightedSequences
from agent_rl.train.requests import OptimizerSpec, StepRequest, WorkerRequest
from agent_rl.train.route_sharding import WorkerInfo
from agent_rl.types import Sample
from agent_rl.utils.imports import quick_imports
from agent_rl.utils.sockets import LOOPBACK_INTERFACE, is_loopback, listen_at, on_loopback
from agent_rl.weight_sync.requests import PublishReport, PublishRequest
from r3.shard import RouteShard

if TYPE_CHECKING:
    from agent_rl.train.checkpoint.directory import Manifest
    from agent_rl.train.worker import TrainerWorker

BACKGROUND_GROUP = "background"
"""The concurrency group of :meth:`WorkerActor.written` and ``loading``, which run beside other calls."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address of rank 0: its host, and the port on which it listens."""

    host: str
    port: int


class WorkerActor:
    """One worker in its own process; wrap with ``ray.remote``. :class:`agent_rl.train.worker.TrainerWorker` documents
    the methods."""

    def __init__(self) -> None:
        self._started: TrainerWorker | None = None
        self._progress = LoadProgress()
        self._host = str(ray.util.get_node_ip_address())
        self._listener = listen_at(self._host)

    @property
    def _worker(self) -> TrainerWorker:
        if self._started is None:
            raise TrainerError("the worker was not started")
        return self._started

    @ray.method
    def rendezvous(self) -> Rendezvous:
        """The address where other workers can meet this one."""
        return Rendezvous(self._host, int(self._listener.getsockname()[1]))

    @ray.method
    def start(self, request: WorkerRequest, optimizer: OptimizerSpec, rank: int, rendezvous: Rendezvous) -> WorkerInfo:
        """Build the worker. Collective: all workers start at once."""
        if not request.config.async_rollout.depth and "GOMP_SPINCOUNT" not in os.environ:
            # Engines wait during passes. Threads that never spin double the time of narrow layers, and threads that
            # spin for long slow the worker 10 times beside another busy process. A process with more threads than
            # cores, as this one, spins only where the policy is ACTIVE. OpenMP reads both when torch loads.
            os.environ.update(OMP_WAIT_POLICY="ACTIVE", GOMP_SPINCOUNT="1000")
        with quick_imports():
            from agent_rl.train.worker import TrainerWorker

        engine = request.config.engine
        # A file of URLs may name engines on other nodes later.
        if is_loopback(self._host) and engine.urls_file is None and on_loopback(engine.urls):
            for name, interface in LOOPBACK_INTERFACE.items():
                os.environ.setdefault(name, interface)
        # Rank 0 hands its listening socket to the rendezvous; the other workers close theirs.
        listener = self._listener.detach()
        if rank != 0:
            os.close(listener)
        self._started = TrainerWorker(
            request,
            optimizer,
            rank,
            master_addr=rendezvous.host,
            master_port=rendezvous.port,
            listener=listener if rank == 0 else None,
            progress=self._progress,
        )
        return self._started.info()

    @ray.method(concurrency_group=BACKGROUND_GROUP)
    def loading(self) -> LoadProgress:
        """The progress of reading weights during the start."""
        return self._progress

    @ray.method
    def set_optimizer(self, spec: OptimizerSpec) -> None:
        self._worker.set_optimizer(spec)

    @ray.method
    def grpo(
        self,
        samples: Mapping[int, Sample],
        shares: Sequence[MiniStepShare],
        request: StepRequest,
        routes: Sequence[ObjectRef[RouteShard]],
    ) -> tuple[RankReport | None, RouteDifferences | None, BalanceReport | None]:
        return self._worker.grpo(samples, shares, request, ray.get(list(routes)))

    @ray.method
    def logprobs(
        self,
        samples: Mapping[int, Sample],
        micro_batches: Sequence[Sequence[int]],
        temperature: float,
        record: bool,
        routes: Sequence[ObjectRef[RouteShard]],
    ) -> ForwardResult:
        return self._worker.logprobs(samples, micro_batches, temperature, record, ray.get(list(routes)))

    @ray.method
    def supervise(
        self,
        sequences: WeightedSequences,
        shares: Sequence[Sequence[Sequence[int]]],
        batch_weight: float,
        spike_norm: float | None,
    ) -> tuple[float, Update]:
        return self._worker.supervise(sequences, shares, batch_weight, spike_norm)

    @ray.method
    def save(self, partial: Path) -> tuple[int, dict[str, int]]:
        return self._worker.save(partial)

    @ray.method(concurrency_group=BACKGROUND_GROUP)
    def written(self) -> int:
        return self._worker.written()

    @ray.method
    def load(self, directory: Path, manifest: Manifest) -> None:
        self._worker.load(directory, manifest)

    @ray.method
    def export(self, directory: Path) -> None:
        self._worker.export(directory)

    @ray.method
    def stage(self, request: PublishRequest) -> Mapping[str, str] | None:
        return self._worker.stage(request)

    @ray.method
    def publish(self, request: PublishRequest) -> PublishReport | None:
        return self._worker.publish(request)
