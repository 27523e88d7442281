"""The trainer as the controller drives it: its ranks are Ray actors, on this machine or on a cluster.

::

    step(samples) ── a data rank's samples, and each rank's own routes ──> Ray's object store ──> the ranks
                  <── sums, the sampled tokens' log-probs, where routes differ: merged into metrics ──

Every call reaches all ranks at once, since they meet in collectives. A rank that fails or dies leaves the others
waiting there, so the first failure ends the trainer: later calls raise the same reason. An engine that refuses weights
(WeightSyncError) is no such failure.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_rl.config import RunConfig
from agent_rl.errors import AgentRlError, TrainerError, WeightSyncError
from agent_rl.model_facts import read_facts
from agent_rl.train.batching.cost import TOKENS, SequenceCost, expert_loads, sequence_cost
from agent_rl.train.batching.dealing import Plan, check_lengths, lockstep_ranks, plan
from agent_rl.train.checkpoint import folder as checkpoint
from agent_rl.train.layouts import check_layout
from agent_rl.train.orders import OptimizerSpec, RankOrder, StepOrder
from agent_rl.train.reports import Differing, MiniStepShare, RouteCounts
from agent_rl.train.route_shares import (
    MicroBatches,
    RankInfo,
    by_sample,
    count_differing,
    cut,
    have_routes,
    put_together,
    without_routes,
)
from agent_rl.train.route_trace import begin_trace, check_trace
from agent_rl.train.step_metrics import step_metrics
from agent_rl.types import Sample
from agent_rl.weight_sync.order import PublishOrder, PublishReport

START_SECONDS = 600.0
CALL_SECONDS = 6 * 3600.0
PUBLISH_SECONDS = 900.0


class RayTrainer:
    """Implements :class:`agent_rl.train.types.Trainer`; an async context manager, or call start() and close().

    ``optimizer`` overrides the GRPO optimizer that the config asks for (supervised training has its own).
    """

    def __init__(self, config: RunConfig, *, optimizer: OptimizerSpec | None = None) -> None:
        check_layout(config)
        check_trace(config)
        self._config = config
        self._optimizer = optimizer or OptimizerSpec.of(config.train)
        self._stack = ExitStack()
        self._boot: asyncio.Future[None] | None = None
        self._actors: list[Any] = []
        self._infos: list[RankInfo] = []
        self._ended: str | None = None
        self._cost = TOKENS  # the model's own once it is known, in start()
        self._saving: asyncio.Task[None] | None = None

    @property
    def parameters(self) -> int:
        """The parameters rank 0 holds (all of them where the model is not split)."""
        return self._infos[0].parameters

    @property
    def data_size(self) -> int:
        """The number of data-parallel ranks."""
        return self._infos[0].data_size

    async def start(self) -> RayTrainer:
        """Start Ray and the ranks and build the model in each. Raises TrainerError or ConfigError."""
        self._boot = asyncio.ensure_future(asyncio.to_thread(self._start_actors))
        try:
            # Shielded: a cancelled start must not leave behind a thread that starts processes nobody owns.
            await asyncio.shield(self._boot)
            places = await self._gather([actor.place.remote() for actor in self._actors], START_SECONDS)
            order = self._rank_order()
            self._cost = sequence_cost(read_facts(self._config.model))
            refs = [
                actor.start.remote(order, self._optimizer, rank, places[0]) for rank, actor in enumerate(self._actors)
            ]
            self._infos = await self._gather(refs, START_SECONDS)
        except BaseException:
            await self.close()
            raise
        return self

    async def step(
        self,
        samples: Sequence[Sample],
        *,
        measure_native: bool,
        step: int | None = None,
        spike_norm: float | None = None,
    ) -> Mapping[str, float]:
        """One GRPO global step; without a sampled token (no group had any variance) nothing is updated.

        ``step``: its number, by which ``r3.trace.steps`` names the steps to trace. A gradient norm beyond
        ``spike_norm`` is dealt with as ``guard.on_spike`` says.
        """
        if not any(sample.loss_mask[1:].any() for sample in samples):
            return {"train/updates": 0.0, "time/old_logprob": 0.0, "time/update": 0.0}
        self._check_running()
        routes = have_routes(samples, self._infos[0].moe_layers)
        if self._config.train.replay == "r3" and not routes and self._infos[0].moe_layers:
            raise TrainerError(
                "train.replay is r3 and the samples have no routes: set it to r2 or off, or capture routes"
            )
        shares = split_step(
            samples,
            mini_steps=self._config.train.mini_steps,
            expert_ranks=self._config.train.parallel.expert,
            **self._planning,
        )
        micro_batches = [[ids for share in rank for ids in share.micro_batches] for rank in shares]
        trace = await asyncio.to_thread(begin_trace, self._config, step, samples, micro_batches, self._infos)
        order = StepOrder(self._config, measure_native, spike_norm, trace)
        dealt = await asyncio.to_thread(self._deal, samples, micro_batches, routes=routes)
        arguments = [
            (stored, shares[info.data_rank], order, *shards)
            for info, (stored, shards) in zip(self._infos, dealt, strict=True)
        ]
        answers = await self._each("grpo", arguments)
        del dealt, arguments  # the routes leave the object store
        reports = [report for report, _ in answers if report is not None]
        return step_metrics(reports, *self._count(samples, micro_batches, [differs for _, differs in answers]))

    async def logprobs(self, samples: Sequence[Sample], *, replay: bool) -> Sequence[Sequence[float]]:
        """Log-probs of every token given those before it (0 for the first), one list a sample, at temperature 1."""
        answers, _ = await self._forward(samples, 1.0, replay=replay, record=False)
        found = {index: values for logprobs, _ in answers for index, values in logprobs.items()}
        return [found[index].tolist() for index in range(len(samples))]

    async def routes(
        self, samples: Sequence[Sample], *, replay: bool, temperature: float = 1.0
    ) -> list[tuple[NDArray[np.float32], NDArray[np.unsignedinteger]]]:
        """As :meth:`logprobs`, at ``temperature``, with the experts used at every token: ``(logprobs [S], experts
        [S, moe_layers, top_k])`` a sample. With ``replay`` those are the samples' own where a row is present."""
        answers, micro_batches = await self._forward(samples, temperature, replay=replay, record=True)
        logprobs = {index: values for found, _ in answers for index, values in found.items()}
        experts: dict[int, NDArray[np.unsignedinteger]] = {}
        for data_rank, batches in enumerate(micro_batches):
            infos = [info for info in self._infos if info.data_rank == data_rank]
            for at, ids in enumerate(batches):
                whole = put_together(samples, ids, infos, [answers[info.rank][1][at] for info in infos])
                experts |= by_sample(samples, ids, whole)
        return [(logprobs[index], experts[index]) for index in range(len(samples))]

    async def _forward(
        self, samples: Sequence[Sample], temperature: float, *, replay: bool, record: bool
    ) -> tuple[list[Any], Plan]:
        """A pass without gradients over all samples: every rank's answer, and what each data rank was given."""
        self._check_running()
        if replay and not have_routes(samples, self._infos[0].moe_layers):
            raise TrainerError("the samples have no routes to replay")
        shares = plan([len(sample.tokens) for sample in samples], **self._planning)
        dealt = await asyncio.to_thread(self._deal, samples, shares, routes=replay)
        arguments = [
            (stored, shares[info.data_rank], temperature, record, *shards)
            for info, (stored, shards) in zip(self._infos, dealt, strict=True)
        ]
        return await self._each("logprobs", arguments), shares

    def _deal(
        self, samples: Sequence[Sample], micro_batches: Sequence[MicroBatches], *, routes: bool
    ) -> list[tuple[Any, list[Any]]]:
        """For every rank: its data rank's samples, and its own share of the routes, a micro-batch each, in Ray's object
        store. A micro-batch at a time is cut, so nothing else of the routes is ever copied."""
        stored = [self.put(without_routes(samples, batches)) for batches in micro_batches]
        return [
            (
                stored[info.data_rank],
                [self.put(cut(samples, ids, info.shard)) for ids in micro_batches[info.data_rank]] if routes else [],
            )
            for info in self._infos
        ]

    def _count(
        self, samples: Sequence[Sample], micro_batches: Sequence[MicroBatches], differs: Sequence[Differing | None]
    ) -> tuple[RouteCounts | None, RouteCounts | None]:
        """Routes that differ from the rollout's over all ranks, with the configured replay and without any."""
        totals: dict[str, RouteCounts] = {}
        for data_rank, batches in enumerate(micro_batches):
            infos = [info for info in self._infos if info.data_rank == data_rank]
            parts = [part for info in infos if (part := differs[info.rank]) is not None]
            for kind in ("replayed", "native"):
                bits = [(part, found) for part in parts if (found := getattr(part, kind)) is not None]
                if bits:
                    unpacked = [part.unpacked(found) for part, found in bits]
                    counts = count_differing(samples, batches, infos, unpacked)
                    totals[kind] = totals[kind] + counts if kind in totals else counts
        return totals.get("replayed"), totals.get("native")

    async def supervise(self, sequences: Any, ids: Sequence[int], lengths: Sequence[int], weight: float) -> Any:
        """One supervised update over ``ids`` of ``sequences`` (from :meth:`put`); ``(loss, Update)``."""
        local = plan([lengths[index] for index in ids], **self._planning)
        shares = tuple(tuple(tuple(ids[i] for i in micro) for micro in rank) for rank in local)
        parts = await self._per_data_rank("supervise", sequences, shares, weight)
        return sum(loss for loss, _ in parts), parts[0][1]

    def check_lengths(self, lengths: Sequence[int]) -> None:
        """Raises TrainerError for a sequence that ``train.microbatch_tokens`` does not hold."""
        check_lengths(lengths, self._config.train.microbatch_tokens)

    async def set_optimizer(self, spec: OptimizerSpec) -> None:
        """Start over with a new optimizer and schedule; the weights stay."""
        await self._all("set_optimizer", spec)

    def put(self, value: Any) -> Any:
        """Put a value into Ray's object store once, for calls to refer to."""
        import ray

        self._check_running()  # before Ray is touched: it would start a new one by itself
        return ray.put(value)

    async def publish(self, engine_urls: Sequence[str], weight_version: str) -> PublishReport:
        """Send the weights to every engine as ``weight_version``; the report names those that did not take them."""
        engine = self._config.engine
        order = PublishOrder(
            tuple(engine_urls), weight_version, engine.dtype, engine.pause_mode, engine.weight_sync_timeout
        )
        reports: list[PublishReport | None] = await self._all("publish", order, timeout=PUBLISH_SECONDS)
        assert reports[0] is not None, "rank 0 reports"
        return reports[0]

    async def save(self, folder: Path, run: Mapping[str, int | str] | None = None) -> None:
        """As :meth:`begin_save`, returning when the checkpoint is complete."""
        await (await self.begin_save(folder, run))

    async def begin_save(self, folder: Path, run: Mapping[str, int | str] | None = None) -> asyncio.Task[None]:
        """Begin a checkpoint that :meth:`load` resumes from exactly; atomic. All ranks must see ``folder``.

        Returns when every rank has its state in host memory, and training may go on. The task ends when the folder is
        complete, or raises UserError where the disk is full and TrainerError on other failures, leaving nothing. A
        save that is still under way is waited for. ``run`` is kept in the manifest.
        """
        if self._saving is not None:
            await asyncio.wait([self._saving])
        folder = _absolute(folder)
        partial = await asyncio.to_thread(checkpoint.begin, folder)
        try:
            (updates, counts), *_ = await self._all("save", partial)
        except BaseException:
            checkpoint.abandon(folder)
            raise
        self._saving = asyncio.create_task(self._finish_save(folder, updates, counts, dict(run or {})))
        return self._saving

    async def _finish_save(
        self, folder: Path, updates: int, counts: Mapping[str, int], run: Mapping[str, int | str]
    ) -> None:
        from agent_rl.train.actor import WRITER

        try:
            refs = [actor.written.options(concurrency_group=WRITER).remote() for actor in self._actors]
            checksums = tuple(await self._gather(refs, CALL_SECONDS, fatal=False))
        except BaseException:
            checkpoint.abandon(folder)
            raise
        manifest = checkpoint.Manifest(
            format=checkpoint.FORMAT,
            updates=updates,
            counts=counts,
            parallel=self._config.train.parallel.model_dump(),
            dtype=self._config.train.dtype,
            checksums=checksums,
            run=run,
        )
        # Shielded: a thread can't be cancelled, and must not find its files gone.
        await asyncio.shield(asyncio.to_thread(checkpoint.commit, folder, manifest))

    async def load(self, folder: Path) -> checkpoint.Manifest:
        """Resume from a checkpoint of any parallel layout; its manifest. Raises ConfigError where it is incomplete or
        of another format, TrainerError where it is damaged or of another model."""
        folder = _absolute(folder)
        manifest = checkpoint.read_manifest(folder)
        await self._all("load", folder, manifest)
        return manifest

    async def export(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint."""
        await self._all("export", _absolute(folder))

    async def close(self) -> None:
        """Stop the ranks, and Ray where it is ours. Idempotent; not interrupted by a cancellation."""
        self._ended = self._ended or "the trainer was closed"
        await asyncio.shield(asyncio.ensure_future(self._close()))

    async def __aenter__(self) -> RayTrainer:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _close(self) -> None:
        if self._boot is not None and not self._boot.done():
            await asyncio.wait([self._boot])
        await asyncio.to_thread(self._kill)
        if self._saving is not None:
            self._saving.cancel()
            await asyncio.wait([self._saving])

    def _kill(self) -> None:
        import ray

        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor)
        self._stack.close()

    def _start_actors(self) -> None:
        import ray

        from agent_rl.train.actor import WRITER, RankActor
        from agent_rl.train.cluster import ray_cluster

        world = self._config.train.parallel.world_size
        self._stack.enter_context(ray_cluster(self._config.train.ray_address, cpus=world))
        gpus = 1 if self._device() == "cuda" else 0
        options: dict[str, Any] = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0}
        # Ray's types leave concurrency groups out.
        remote: Any = ray.remote(**options | {"concurrency_groups": {WRITER: 1}})(RankActor)
        self._actors = [remote.remote() for _ in range(world)]

    def _device(self) -> str:
        import ray

        wanted = self._config.train.device
        gpus, world = ray.cluster_resources().get("GPU", 0), self._config.train.parallel.world_size
        if wanted == "cuda" and gpus < world:
            raise TrainerError(f"train.device is cuda and Ray has {gpus:g} GPUs for {world} ranks: set it to cpu")
        return ("cuda" if gpus >= world else "cpu") if wanted == "auto" else wanted

    def _rank_order(self) -> RankOrder:
        config, reference = self._config, self._config.reference_folder
        return RankOrder(
            config,
            model=config.model.absolute(),
            reference=None if reference is None else reference.absolute(),
            device="cuda" if self._device() == "cuda" else "cpu",
            threads=_threads(config.train.parallel.world_size),
        )

    @property
    def _planning(self) -> dict[str, Any]:
        """How sequences are dealt out; see :func:`agent_rl.train.batching.dealing.plan`."""
        train = self._config.train
        return {
            "budget": train.microbatch_tokens,
            "ranks": self.data_size,
            "cost": self._cost,
            "lockstep": lockstep_ranks(train.parallel),
        }

    async def _per_data_rank(self, method: str, *arguments: Any) -> list[Any]:
        """Call all ranks; one answer a data rank (its model-parallel peers' answers are the same)."""
        answers = await self._all(method, *arguments)
        by_rank: dict[int, Any] = {}
        for info, answer in zip(self._infos, answers, strict=True):
            by_rank.setdefault(info.data_rank, answer)
        return [by_rank[rank] for rank in sorted(by_rank)]

    async def _all(self, method: str, *arguments: Any, timeout: float = CALL_SECONDS) -> list[Any]:
        return await self._each(method, [arguments] * len(self._actors), timeout=timeout)

    async def _each(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, timeout: float = CALL_SECONDS
    ) -> list[Any]:
        """Call all ranks, each with its own arguments; the answers by rank."""
        self._check_running()
        refs = [actor.call.remote(method, *own) for actor, own in zip(self._actors, arguments, strict=True)]
        return await self._gather(refs, timeout)

    def _check_running(self) -> None:
        if self._ended is not None or not self._infos:
            raise TrainerError(self._ended or "the trainer was not started")

    async def _gather(self, refs: Sequence[Any], timeout: float, *, fatal: bool = True) -> list[Any]:
        """The answers. A failure ends the trainer, unless no rank waits for another (``fatal`` False) and all live."""
        from ray.exceptions import RayActorError, RayError

        try:
            async with asyncio.timeout(timeout):
                return list(await asyncio.gather(*refs))
        except TimeoutError:
            error: AgentRlError = TrainerError(f"the trainer did not answer within {timeout:g} s")
            cause: BaseException | None = None
        except RayError as failure:
            error, cause = _converted(failure), failure
        if not isinstance(error, WeightSyncError) and (fatal or isinstance(cause, RayActorError)):
            self._ended = str(error)
        raise error from cause


def split_step(
    samples: Sequence[Sample],
    *,
    mini_steps: int,
    budget: int,
    ranks: int,
    cost: SequenceCost = TOKENS,
    lockstep: int = 1,
    expert_ranks: int = 1,
) -> tuple[tuple[MiniStepShare, ...], ...]:
    """``shares[data_rank][mini_step]``: consecutive samples go to the same mini step, so groups stay together.

    Within a mini step they are dealt out by :func:`agent_rl.train.batching.dealing.plan`, which looks at their routes
    where experts are spread over data ranks.
    """
    parts = [part for part in np.array_split(np.arange(len(samples)), mini_steps) if len(part)]
    shares: list[list[MiniStepShare]] = [[] for _ in range(ranks)]
    for part in parts:
        ids = part.tolist()
        sampled = [int(samples[index].loss_mask[1:].sum()) for index in ids]
        routings = [routing for index in ids if (routing := samples[index].routing) is not None]
        loads = None
        if lockstep > 1 and len(routings) == len(ids):
            loads = [expert_loads(routing, expert_ranks) for routing in routings]
        lengths = [len(samples[index].tokens) for index in ids]
        local = plan(lengths, budget=budget, ranks=ranks, cost=cost, lockstep=lockstep, loads=loads)
        for rank, micro_batches in enumerate(local):
            named = tuple(tuple(ids[i] for i in micro) for micro in micro_batches)
            shares[rank].append(MiniStepShare(named, sum(sampled), sum(map(bool, sampled))))
    return tuple(tuple(share) for share in shares)


def _converted(failure: BaseException) -> AgentRlError:
    """A Ray failure as an error of ours, its reason in one line."""
    from ray.exceptions import RayActorError, RayTaskError

    cause = failure.cause if isinstance(failure, RayTaskError) else failure
    if isinstance(cause, AgentRlError):
        return type(cause)(str(cause))
    if isinstance(cause, RayActorError):
        return TrainerError(f"a trainer rank died: {_one_line(cause)}")
    return TrainerError(f"a trainer rank failed: {type(cause).__name__}: {_one_line(cause)}")


def _absolute(folder: Path) -> Path:
    """Ranks may run in another working directory."""
    return Path(os.path.abspath(folder))


def _one_line(error: BaseException) -> str:
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())[:500]


def _threads(ranks: int) -> int:
    """CPU threads a rank uses: OMP_NUM_THREADS where the user set it, else this machine's share."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdigit() else max(1, len(os.sched_getaffinity(0)) // ranks)
