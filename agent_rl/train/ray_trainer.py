"""The trainer as the controller uses it. Its workers are Ray actors, on this node or on a cluster.

::

    step(samples) ── samples of each data rank, route shards of each worker ──> Ray's object store ──> workers
                  <── sums, log-probs of sampled tokens, route differences: merged into metrics ──

:mod:`agent_rl.train.worker_group` calls the workers and handles failures. Work on routes or tokens of a step runs in a
thread: it takes seconds for 512 long trajectories, and the event loop also serves the engines.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from agent_rl.config import RunConfig
from agent_rl.errors import TrainerError
from agent_rl.models.spec import ModelSpec, read_model_spec
from agent_rl.train.batching.cost import TOKENS, sequence_cost
from agent_rl.train.batching.partition import MiniStepShare, Partition, lockstep_ranks, partition_sequences, split_step
from agent_rl.train.checkpoint.directory import Manifest
from agent_rl.train.checkpoint.driver import CheckpointDriver, absolute
from agent_rl.train.expert_balancing.report import BalanceReport, balance_metrics, write_balance
from agent_rl.train.parallel_checks import check_layout
from agent_rl.train.ray_launch import threads_per_rank
from agent_rl.train.reports import ForwardResult, RankReport, RouteDifferences, WeightedSequences
from agent_rl.train.requests import OptimizerSpec, StepRequest, WorkerRequest
from agent_rl.train.route_sharding import (
    MicroBatches,
    WorkerInfo,
    by_sample,
    count_all_differing,
    have_routes,
    reassemble,
    shard_routes,
    without_routes,
)
from agent_rl.train.route_trace import begin_trace, check_trace
from agent_rl.train.step_metrics import RouteDifferenceBits, sft_metrics, step_metrics, token_details
from agent_rl.train.worker_group import WorkerGroup
from agent_rl.types import Sample, TokenDetail
from agent_rl.utils.concurrency import shielded
from agent_rl.weight_sync.requests import PUBLISH_SECONDS, PublishReport, PublishRequest
from r3.shard import RouteShard
from r3.trace.recorders import TraceRequest

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.util.placement_group import PlacementGroup
DISPATCH_THREADS = min(8, os.cpu_count() or 1)

Shares = tuple[tuple[MiniStepShare, ...], ...]
"""``shares[data_rank][mini_step]``"""

DetailSink = Callable[[Mapping[int, TokenDetail]], None]

WorkerStepResult = tuple[RankReport | None, RouteDifferences | None, BalanceReport | None]
"""The result of a step on one worker."""


class RayTrainer:
    """Owns the training weights, optimizer and schedule. An async context manager, or call start() and close().

    ``model_spec``: the architecture of ``config.model``; None reads its ``config.json``. ``optimizer`` replaces the
    optimizer of the config (supervised training has its own). ``placement_group``: the workers' reservation on Ray.
    ``note`` receives progress lines of the start.
    """

    def __init__(
        self,
        config: RunConfig,
        model_spec: ModelSpec | None = None,
        *,
        optimizer: OptimizerSpec | None = None,
        placement_group: PlacementGroup | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        check_layout(config, model_spec)
        check_trace(config.r3.trace, config.train.replay)
        self.config, self._model_spec, self._reference = config, model_spec, config.reference_dir
        self._optimizer = optimizer or OptimizerSpec.of(config.train)
        self._ray, self._placement_group = ExitStack(), placement_group
        self._note = note or _silent
        self._new_workers()
        self._cost = TOKENS  # start() replaces it by the cost of the model

    async def start(self) -> RayTrainer:
        """Start Ray and the workers, and build the model in each. Raises TrainerError or UserError."""
        try:
            model_spec = self._model_spec or read_model_spec(self.config.model)
            self._cost = sequence_cost(model_spec)
            config, reference = self.config, self._reference
            device = await self.workers.launch(config.train, config.hardware.gpu_memory_gb)
            request = WorkerRequest(
                config,
                model_spec,
                model=config.model.absolute(),
                reference=None if reference is None else reference.absolute(),
                device=device,
                threads=threads_per_rank(config.train.parallel.world_size),
            )
            await self.workers.start(request, self._optimizer, self._note)
        except BaseException:
            await self.close()
            raise
        return self

    async def restart(self) -> RayTrainer:
        """Replace all workers by new ones with the weights of ``config.model``; Ray stays. Raises as :meth:`start`."""
        await shielded(self._end_workers())
        self._new_workers()
        return await self.start()

    def _new_workers(self) -> None:
        self.workers = WorkerGroup(self._ray, self._placement_group)
        self._checkpoints = CheckpointDriver(self.workers, self.config.train)

    @property
    def data_size(self) -> int:
        """The number of data-parallel ranks."""
        return self.workers.infos[0].data_size

    async def step(
        self,
        samples: Sequence[Sample],
        *,
        measure_without_replay: bool,
        measure_mismatch: bool = True,
        step: int | None = None,
        spike_norm: float | None = None,
        on_detail: DetailSink | None = None,
    ) -> Mapping[str, float]:
        """Run one GRPO global step: old log-probs, then the updates. Without a sampled token there is no update.

        ``measure_mismatch`` runs the pass before the update, which every config but some with
        ``train.old_logprob.source`` rollout or rescore runs anyway. ``measure_without_replay`` also runs one without
        replay, for the ``mismatch_without_replay/*`` metrics, in steps with the other.
        ``step``: the number of the step in ``r3.trace.steps`` and in ``balance.jsonl``. ``guard.on_spike`` says what
        happens to an update with a gradient norm above ``spike_norm``. ``on_detail`` receives the token details of
        every sample by index. Returns metrics under the names of docs/reference/metrics.md.
        """
        if not any(sample.loss_mask[1:].any() for sample in samples):
            return {"train/updates": 0.0, "time/old_logprob": 0.0, "time/update": 0.0}
        self.workers.check_running()
        shares, trace, dispatched = await asyncio.to_thread(self._dispatch, samples, step)
        request = StepRequest(
            self.config, measure_without_replay, spike_norm, trace, on_detail is not None, measure_mismatch
        )
        results = await self.workers.call_each(
            lambda actor, info: actor.grpo.remote(
                dispatched[info.rank].samples, shares[info.data_rank], request, dispatched[info.rank].routes
            )
        )
        dispatched.clear()  # frees the routes in the object store
        return await asyncio.to_thread(self._merge_results, samples, shares, results, step, on_detail)

    async def supervise(self, sequences: WeightedSequences, *, spike_norm: float | None = None) -> dict[str, float]:
        """Run one supervised update. The loss is the mean negative log-likelihood of the tokens, by their weights.

        ``guard.on_spike`` says what happens to a gradient norm above ``spike_norm``. Returns metrics. Raises
        TrainerError for a sequence that is too long or has another number of weights than of tokens.
        """
        self.workers.check_running()
        started = time.perf_counter()
        partition = self.partition_sequences([len(tokens) for tokens, _ in sequences])
        weight = sum(float(np.sum(weights[1:], dtype=np.float64)) for _, weights in sequences)
        stored = self.workers.put(sequences)
        parts = await self.workers.call(
            lambda actor: actor.supervise.remote(stored, partition, max(weight, 1e-9), spike_norm)
        )
        loss = sum(part for info, (part, _) in zip(self.workers.infos, parts, strict=True) if info.lead)
        tokens = sum(int(np.count_nonzero(weights[1:])) for _, weights in sequences)
        return sft_metrics(parts[0][1], loss, tokens) | {"time/update": time.perf_counter() - started}

    def _dispatch(
        self, samples: Sequence[Sample], step: int | None
    ) -> tuple[Shares, TraceRequest | None, list[DispatchedStep]]:
        """Partition the samples, begin a trace if one is due, and put every worker's data into the object store."""
        infos, moe_layers = self.workers.infos, self.workers.infos[0].moe_layers
        routes = have_routes(samples, moe_layers)
        if self.config.train.replay == "r3" and not routes and moe_layers:
            raise TrainerError(
                "train.replay is r3 and the samples have no routes: set it to r2 or off, or capture routes"
            )
        shares = self._split(samples)
        micro_batches = _micro_batches(shares)
        trace = begin_trace(self.config, step, samples, micro_batches, infos)
        return shares, trace, dispatch(self.workers, samples, micro_batches, routes=routes)

    def _merge_results(
        self,
        samples: Sequence[Sample],
        shares: Shares,
        results: Sequence[WorkerStepResult],
        step: int | None,
        on_detail: DetailSink | None,
    ) -> dict[str, float]:
        """Merge the workers' results into the metrics of the step."""
        infos, micro_batches = self.workers.infos, _micro_batches(shares)
        reports = [report for report, _, _ in results if report is not None]
        differences = [item for _, item, _ in results]
        if on_detail is None:
            counts = count_all_differing(samples, micro_batches, infos, differences)
        else:
            bits = RouteDifferenceBits(samples), RouteDifferenceBits(samples)
            counts = count_all_differing(samples, micro_batches, infos, differences, *(part.take for part in bits))
            leads = zip(infos, results, strict=True)
            by_rank = {info.data_rank: report for info, (report, _, _) in leads if report is not None}
            on_detail(token_details(samples, micro_batches, by_rank, *bits))
        balanced = [balance for _, _, balance in results if balance is not None]
        if balanced and step is not None:
            write_balance(self.config.run_dir, step, balanced)
        return step_metrics(reports, *counts, self.config.train.clip) | balance_metrics(balanced)

    def _split(self, samples: Sequence[Sample]) -> Shares:
        train = self.config.train
        return split_step(
            samples,
            mini_steps=train.mini_steps,
            budget=train.microbatch_tokens,
            ranks=self.data_size,
            cost=self._cost,
            lockstep=lockstep_ranks(train.parallel),
            expert_ranks=train.parallel.expert,
        )

    def partition_sequences(self, lengths: Sequence[int]) -> Partition:
        """Partition sequences of these lengths into data ranks and micro-batches. Raises TrainerError for a sequence
        longer than ``train.microbatch_tokens``."""
        train = self.config.train
        return partition_sequences(
            lengths,
            budget=train.microbatch_tokens,
            ranks=self.data_size,
            cost=self._cost,
            lockstep=lockstep_ranks(train.parallel),
        )

    async def logprobs(
        self, samples: Sequence[Sample], *, replay: bool, temperature: float = 1.0
    ) -> Sequence[Sequence[float]]:
        """Log-probs of every token given those before it (0 for the first), one list per sample."""
        results, _ = await self._forward(samples, temperature, replay=replay, record=False)
        by_index = {index: values for logprobs, _ in results for index, values in logprobs.items()}
        return [by_index[index].tolist() for index in range(len(samples))]

    async def routes(
        self, samples: Sequence[Sample], *, replay: bool, temperature: float = 1.0
    ) -> list[tuple[NDArray[np.float32], NDArray[np.unsignedinteger]]]:
        """As :meth:`logprobs`, at ``temperature``, with the experts used at every token: ``(logprobs [S], experts
        [S, moe_layers, top_k])`` per sample. With ``replay`` they are the samples' own routes in rows that are
        present."""
        results, partition = await self._forward(samples, temperature, replay=replay, record=True)
        logprobs = {index: values for by_sample_id, _ in results for index, values in by_sample_id.items()}
        experts: dict[int, NDArray[np.unsignedinteger]] = {}
        for data_rank, batches in enumerate(partition):
            infos = [info for info in self.workers.infos if info.data_rank == data_rank]
            for number, ids in enumerate(batches):
                used = reassemble(samples, ids, infos, [results[info.rank][1][number] for info in infos])
                experts |= by_sample(samples, ids, used)
        return [(logprobs[index], experts[index]) for index in range(len(samples))]

    async def _forward(
        self, samples: Sequence[Sample], temperature: float, *, replay: bool, record: bool
    ) -> tuple[list[ForwardResult], Partition]:
        """A pass without gradients over all samples: the results by rank, and the partition of the samples."""
        self.workers.check_running()
        if replay and not have_routes(samples, self.workers.infos[0].moe_layers):
            raise TrainerError("the samples have no routes to replay")
        partition = self.partition_sequences([len(sample.tokens) for sample in samples])
        stored = await asyncio.to_thread(dispatch, self.workers, samples, partition, routes=replay)
        results = await self.workers.call_each(
            lambda actor, info: actor.logprobs.remote(
                stored[info.rank].samples, partition[info.data_rank], temperature, record, stored[info.rank].routes
            )
        )
        return results, partition

    async def set_optimizer(self, spec: OptimizerSpec) -> None:
        """Replace optimizer and schedule by new ones; the weights stay."""
        await self.workers.call(lambda actor: actor.set_optimizer.remote(spec))

    async def stage(self, engine_urls: Sequence[str], weight_version: str) -> Mapping[str, str]:
        """Send what changed in the weights to the engines, which prove it while they sample (``engine.weight_sync:
        delta``). Returns the reason by URL of each engine that needs all weights instead."""
        request = self._publish_request(engine_urls, weight_version)
        reasons = await self.workers.call(lambda actor: actor.stage.remote(request), timeout=PUBLISH_SECONDS)
        assert reasons[0] is not None, "rank 0 reports"
        return reasons[0]

    def _publish_request(
        self, engine_urls: Sequence[str], weight_version: str, gpus: Sequence[Sequence[str]] = ()
    ) -> PublishRequest:
        engine = self.config.engine
        return PublishRequest(tuple(engine_urls), weight_version, engine, gpus, engine.headers)

    async def publish(
        self, engine_urls: Sequence[str], weight_version: str, gpus: Sequence[Sequence[str]] = ()
    ) -> PublishReport:
        """Send the weights to every engine as ``weight_version``; the report names those that failed. ``gpus``: as in
        :class:`PublishRequest`."""
        request = self._publish_request(engine_urls, weight_version, gpus)
        reports = await self.workers.call(lambda actor: actor.publish.remote(request), timeout=PUBLISH_SECONDS)
        assert reports[0] is not None, "rank 0 reports"
        return reports[0]

    async def save(self, directory: Path, run: Mapping[str, object] | None = None) -> None:
        """As :meth:`begin_save`; returns when the checkpoint is complete."""
        await (await self.begin_save(directory, run))

    async def begin_save(self, directory: Path, run: Mapping[str, object] | None = None) -> asyncio.Task[None]:
        """Begin to write a checkpoint from which :meth:`load` resumes exactly. All workers must see ``directory``.

        Waits for an earlier save, and returns when every worker has copied its state to host memory: training can
        continue. The returned task ends when the directory is complete. It raises UserError where the disk is full,
        TrainerError for other failures, and then leaves no directory. The manifest stores ``run``.
        """
        return await self._checkpoints.begin(directory, run or {})

    async def load(self, directory: Path) -> Manifest:
        """Resume from a checkpoint of any parallel layout; returns its manifest. Raises ConfigError where it is
        incomplete or has another format, TrainerError where it is damaged or belongs to another model."""
        return await self._checkpoints.load(directory)

    async def export(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint."""
        target = absolute(directory)
        await self.workers.call(lambda actor: actor.export.remote(target))

    async def close(self) -> None:
        """Stop the workers, and a Ray that this process started. Idempotent. A cancellation waits for the end."""
        self.workers.end("the trainer was closed")
        await shielded(self._close())

    async def _close(self) -> None:
        await self._end_workers()
        await asyncio.to_thread(self._ray.close)

    async def _end_workers(self) -> None:
        await asyncio.to_thread(self.workers.kill)
        await self._checkpoints.stop()

    async def __aenter__(self) -> RayTrainer:
        return await self.start()

    async def __aexit__(self, *error: object) -> None:
        await self.close()


@dataclass(frozen=True, slots=True)
class DispatchedStep:
    """A worker's data in Ray's object store: its samples by index, and its shard of the routes of every micro-batch, in
    order, or none. The data stays there as long as this object lives."""

    samples: ObjectRef[Mapping[int, Sample]]
    routes: list[ObjectRef[RouteShard]]


def dispatch(
    workers: WorkerGroup, samples: Sequence[Sample], micro_batches: Sequence[MicroBatches], *, routes: bool
) -> list[DispatchedStep]:
    """Put the data of ``micro_batches[data_rank]`` into the object store, for every worker. Blocks. Each thread shards
    the routes of one micro-batch at a time, so they are never copied as a whole. NumPy and Ray copy them without the
    interpreter's lock."""
    stored: list[ObjectRef[Mapping[int, Sample]]] = [
        workers.put(without_routes(samples, batches)) for batches in micro_batches
    ]

    def for_worker(info: WorkerInfo) -> DispatchedStep:
        batches = micro_batches[info.data_rank] if routes else ()
        shards = [workers.put(shard_routes(samples, ids, info.shard)) for ids in batches]
        return DispatchedStep(stored[info.data_rank], shards)

    with ThreadPoolExecutor(DISPATCH_THREADS, thread_name_prefix="dispatch") as threads:
        return list(threads.map(for_worker, workers.infos))


def _silent(_: str) -> None: ...


def _micro_batches(shares: Shares) -> list[MicroBatches]:
    """The micro-batches of a step by data rank."""
    return [[ids for share in rank for ids in share.micro_batches] for rank in shares]
