"""The trainer as the controller drives it: its ranks are Ray actors, on this machine or on a cluster.

::

    step(samples) ── a data rank's samples, and each rank's own routes ──> Ray's object store ──> the ranks
                  <── sums, the sampled tokens' log-probs, where routes differ: merged into metrics ──

How the ranks are called, and what becomes of a failure: :mod:`agent_rl.train.worker_group`. Whatever goes through
routes or through a step's tokens runs on a thread: a step of 512 long trajectories takes seconds of it, and the
event loop also serves the engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from agent_rl.config import RunConfig
from agent_rl.errors import TrainerError
from agent_rl.models.spec import read_model_spec
from agent_rl.train.batching.cost import TOKENS, sequence_cost
from agent_rl.train.batching.mini_steps import MiniStepShare, split_step
from agent_rl.train.batching.partition import Deal, deal, lockstep_ranks
from agent_rl.train.checkpoint.directory import Manifest
from agent_rl.train.checkpoint.driver import CheckpointDriver, absolute
from agent_rl.train.dispatch import DispatchedStep, dispatch
from agent_rl.train.expert_balancing.report import BalanceReport, balance_metrics, write_balance
from agent_rl.train.parallel_checks import check_layout
from agent_rl.train.reports import Differing, ForwardAnswer, RankReport
from agent_rl.train.requests import OptimizerSpec, StepRequest
from agent_rl.train.route_sharding import MicroBatches, by_sample, count_all_differing, have_routes, put_together
from agent_rl.train.route_trace import begin_trace, check_trace
from agent_rl.train.step_metrics import step_metrics
from agent_rl.train.token_detail import LayerBits, token_details
from agent_rl.train.worker_group import Ranks
from agent_rl.types import Sample, TokenDetail
from agent_rl.utils.concurrency import shielded
from agent_rl.weight_sync.order import PublishReport, PublishRequest
from r3.trace.recorders import TraceRequest

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

PUBLISH_SECONDS = 900.0

Shares = tuple[tuple[MiniStepShare, ...], ...]
"""``shares[data_rank][mini_step]``"""

TakeDetails = Callable[[Mapping[int, TokenDetail]], None]

StepAnswer = tuple[RankReport | None, Differing | None, BalanceReport | None]
"""What a rank answers to a step."""


class RayTrainer:
    """Owns the training weights, optimizer and schedule. An async context manager, or call start() and close().

    ``optimizer`` overrides the GRPO optimizer that the config asks for (supervised training has its own). ``room``:
    what is reserved for the ranks on Ray. ``note`` is told of a long start. ``config`` is the run's, ``ranks`` what is
    called.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        optimizer: OptimizerSpec | None = None,
        room: PlacementGroup | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        check_layout(config)
        check_trace(config)
        self.config = config
        self._optimizer = optimizer or OptimizerSpec.of(config.train)
        self._ray, self._room = ExitStack(), room
        self._note = note or _silent
        self._hold()
        self._cost = TOKENS  # the model's own once it is known, in start()

    async def start(self) -> RayTrainer:
        """Start Ray and the ranks and build the model in each. Raises TrainerError or UserError."""
        try:
            self._cost = sequence_cost(read_model_spec(self.config.model))
            await self.ranks.start(self.config, self._optimizer, self._note)
        except BaseException:
            await self.close()
            raise
        return self

    async def restart(self) -> RayTrainer:
        """End what is left of the ranks and start others, with the weights that the config names; Ray stays. Raises as
        start()."""
        await shielded(self._end_ranks())
        self._hold()
        return await self.start()

    def _hold(self) -> None:
        self.ranks = Ranks(self._ray, self._room)
        self._checkpoints = CheckpointDriver(self.ranks, self.config.train)

    @property
    def data_size(self) -> int:
        """The number of data-parallel ranks."""
        return self.ranks.infos[0].data_size

    async def step(
        self,
        samples: Sequence[Sample],
        *,
        measure_without_replay: bool,
        step: int | None = None,
        spike_norm: float | None = None,
        on_detail: TakeDetails | None = None,
    ) -> Mapping[str, float]:
        """One GRPO global step: old log-probs, then the updates. Without a sampled token (no group had any variance)
        nothing is updated.

        ``measure_without_replay`` also runs a pass without replay for the ``mismatch_without_replay/*`` metrics.
        ``step``: its number, by which ``r3.trace.steps`` names the steps to trace, and the run's ``balance.jsonl``
        its rows. A gradient norm beyond ``spike_norm`` is dealt with as ``guard.on_spike`` says. ``on_detail`` is
        called with what was seen of every sample's tokens, by index. Returns metrics under the names of
        docs/metrics.md.
        """
        if not any(sample.loss_mask[1:].any() for sample in samples):
            return {"train/updates": 0.0, "time/old_logprob": 0.0, "time/update": 0.0}
        self.ranks.check_running()
        shares, trace, handed = await asyncio.to_thread(self._deal_out, samples, step)
        order = StepRequest(self.config, measure_without_replay, spike_norm, trace, detail=on_detail is not None)
        answers = await self.ranks.call_each(
            lambda actor, info: actor.grpo.remote(
                handed[info.rank].samples, shares[info.data_rank], order, handed[info.rank].routes
            )
        )
        handed.clear()  # the routes leave the object store
        return await asyncio.to_thread(self._merged, samples, shares, answers, step, on_detail)

    def _deal_out(
        self, samples: Sequence[Sample], step: int | None
    ) -> tuple[Shares, TraceRequest | None, list[DispatchedStep]]:
        """Which data rank trains on what, what is traced of it, and what each rank is handed."""
        infos, moe_layers = self.ranks.infos, self.ranks.infos[0].moe_layers
        routes = have_routes(samples, moe_layers)
        if self.config.train.replay == "r3" and not routes and moe_layers:
            raise TrainerError(
                "train.replay is r3 and the samples have no routes: set it to r2 or off, or capture routes"
            )
        shares = self._split(samples)
        micro_batches = _micro_batches(shares)
        trace = begin_trace(self.config, step, samples, micro_batches, infos)
        return shares, trace, dispatch(self.ranks, samples, micro_batches, routes=routes)

    def _merged(
        self,
        samples: Sequence[Sample],
        shares: Shares,
        answers: Sequence[StepAnswer],
        step: int | None,
        on_detail: TakeDetails | None,
    ) -> dict[str, float]:
        """The ranks' answers as one step's metrics."""
        infos, micro_batches = self.ranks.infos, _micro_batches(shares)
        reports = [report for report, _, _ in answers if report is not None]
        differs = [differs for _, differs, _ in answers]
        if on_detail is None:
            counts = count_all_differing(samples, micro_batches, infos, differs)
        else:
            bits = LayerBits(samples), LayerBits(samples)
            counts = count_all_differing(samples, micro_batches, infos, differs, *(part.take for part in bits))
            leads = zip(infos, answers, strict=True)
            by_rank = {info.data_rank: report for info, (report, _, _) in leads if report is not None}
            on_detail(token_details(samples, micro_batches, by_rank, *bits))
        balanced = [balance for _, _, balance in answers if balance is not None]
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

    def deal(self, lengths: Sequence[int]) -> Deal:
        """Deal sequences of so many tokens out to data ranks and micro-batches. Raises TrainerError for one that
        ``train.microbatch_tokens`` does not hold."""
        train = self.config.train
        return deal(
            lengths,
            budget=train.microbatch_tokens,
            ranks=self.data_size,
            cost=self._cost,
            lockstep=lockstep_ranks(train.parallel),
        )

    async def logprobs(self, samples: Sequence[Sample], *, replay: bool) -> Sequence[Sequence[float]]:
        """Log-probs of every token given those before it (0 for the first), one list a sample, at temperature 1."""
        answers, _ = await self._forward(samples, 1.0, replay=replay, record=False)
        by_index = {index: values for logprobs, _ in answers for index, values in logprobs.items()}
        return [by_index[index].tolist() for index in range(len(samples))]

    async def routes(
        self, samples: Sequence[Sample], *, replay: bool, temperature: float = 1.0
    ) -> list[tuple[NDArray[np.float32], NDArray[np.unsignedinteger]]]:
        """As :meth:`logprobs`, at ``temperature``, with the experts used at every token: ``(logprobs [S], experts
        [S, moe_layers, top_k])`` a sample. With ``replay`` those are the samples' own where a row is present."""
        answers, dealt = await self._forward(samples, temperature, replay=replay, record=True)
        logprobs = {index: values for own, _ in answers for index, values in own.items()}
        experts: dict[int, NDArray[np.unsignedinteger]] = {}
        for data_rank, batches in enumerate(dealt):
            infos = [info for info in self.ranks.infos if info.data_rank == data_rank]
            for at, ids in enumerate(batches):
                whole = put_together(samples, ids, infos, [answers[info.rank][1][at] for info in infos])
                experts |= by_sample(samples, ids, whole)
        return [(logprobs[index], experts[index]) for index in range(len(samples))]

    async def _forward(
        self, samples: Sequence[Sample], temperature: float, *, replay: bool, record: bool
    ) -> tuple[list[ForwardAnswer], Deal]:
        """A pass without gradients over all samples: every rank's answer, and what each data rank was given."""
        self.ranks.check_running()
        if replay and not have_routes(samples, self.ranks.infos[0].moe_layers):
            raise TrainerError("the samples have no routes to replay")
        dealt = self.deal([len(sample.tokens) for sample in samples])
        handed = await asyncio.to_thread(dispatch, self.ranks, samples, dealt, routes=replay)
        answers = await self.ranks.call_each(
            lambda actor, info: actor.logprobs.remote(
                handed[info.rank].samples, dealt[info.data_rank], temperature, record, handed[info.rank].routes
            )
        )
        return answers, dealt

    async def set_optimizer(self, spec: OptimizerSpec) -> None:
        """Start over with a new optimizer and schedule; the weights stay."""
        await self.ranks.call(lambda actor: actor.set_optimizer.remote(spec))

    async def publish(self, engine_urls: Sequence[str], weight_version: str) -> PublishReport:
        """Send the weights to every engine as ``weight_version``; the report names those that did not take them."""
        engine = self.config.engine
        order = PublishRequest(tuple(engine_urls), weight_version, engine, engine.headers)
        reports = await self.ranks.call(lambda actor: actor.publish.remote(order), timeout=PUBLISH_SECONDS)
        assert reports[0] is not None, "rank 0 reports"
        return reports[0]

    async def save(self, directory: Path, run: Mapping[str, object] | None = None) -> None:
        """As :meth:`begin_save`, returning when the checkpoint is complete."""
        await (await self.begin_save(directory, run))

    async def begin_save(self, directory: Path, run: Mapping[str, object] | None = None) -> asyncio.Task[None]:
        """Begin a checkpoint that :meth:`load` resumes from exactly; atomic. All ranks must see ``directory``.

        Returns when every rank has its state in host memory, and training may go on. The task ends when the
        directory is complete, or raises UserError where the disk is full and TrainerError on other failures, leaving
        nothing. A save that is still under way is waited for. ``run`` is kept in the manifest.
        """
        return await self._checkpoints.begin(directory, run or {})

    async def load(self, directory: Path) -> Manifest:
        """Resume from a checkpoint of any parallel layout; its manifest. Raises ConfigError where it is incomplete or
        of another format, TrainerError where it is damaged or of another model."""
        return await self._checkpoints.load(directory)

    async def export(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint."""
        target = absolute(directory)
        await self.ranks.call(lambda actor: actor.export.remote(target))

    async def close(self) -> None:
        """Stop the ranks, and Ray where it is ours. Idempotent; a cancellation waits for its end."""
        self.ranks.end("the trainer was closed")
        await shielded(self._close())

    async def _close(self) -> None:
        await self._end_ranks()
        await asyncio.to_thread(self._ray.close)

    async def _end_ranks(self) -> None:
        await asyncio.to_thread(self.ranks.kill)
        await self._checkpoints.stop()

    async def __aenter__(self) -> RayTrainer:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _silent(_: str) -> None: ...


def _micro_batches(shares: Shares) -> list[MicroBatches]:
    """All of a step's, by data rank."""
    return [[ids for share in rank for ids in share.micro_batches] for rank in shares]
