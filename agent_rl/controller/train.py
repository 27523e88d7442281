"""The training run. Each step takes a batch, updates, publishes the weights and releases the batch's place.

::

    RolloutProducer ─ groups ─▶ RolloutBuffer.take ─ Batch ─▶ samples_of ─ samples ─▶ trainer.step ─ weights ─▶ engine
        ▲                                                                                                         │
        └───────────────────────── RolloutBuffer.release, after the weights are published ◀───────────────────────┘

With ``async_rollout.depth`` 0 the buffer holds one batch: all episodes of a step are sampled with the weights that the
previous step published, and nothing runs during training or evaluation. With depth n, sampling runs n batches ahead.

Everything a step consumed and produced is on disk before the next begins, and every episode as soon as it ends. A
killed run continues from its last checkpoint with the episodes that finished since. A run whose trainer died restarts
the trainer and does the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from agent_rl.config import RunConfig, TrainConfig
from agent_rl.controller.advantages import GroupSamples, build_samples, overlong_penalty
from agent_rl.controller.async_rollout.buffer import BufferRules, RolloutBuffer
from agent_rl.controller.async_rollout.evaluations import Evaluations
from agent_rl.controller.async_rollout.producer import RolloutProducer
from agent_rl.controller.async_rollout.task_ledger import LedgerFile, LedgerRow, Outcome, TaskLedger
from agent_rl.controller.batch import Batch, batch_metrics, build_batch, check_filled, goodput, rescore_values
from agent_rl.controller.checkpoints import Checkpoints, Progress, TrainerRestarts
from agent_rl.controller.engine_admission import EngineAdmission, check_missing_budget, probe_engines
from agent_rl.controller.guard import Guard
from agent_rl.controller.journal import Journal
from agent_rl.controller.placement import Reservations, open_reservations
from agent_rl.controller.preflight import Checked, check_remote_services
from agent_rl.controller.rollout_runtime import RolloutRuntime, open_rollout_runtime
from agent_rl.controller.run_state import RunState, keep_tokenizer
from agent_rl.controller.summary import summarize, summary_table, why_idle
from agent_rl.controller.task_order import Curriculum, TaskOrder, solve_rate
from agent_rl.controller.teacher import Teacher, open_teacher
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.errors import TrainerDied
from agent_rl.evaluation.quarantine import Quarantine
from agent_rl.monitoring.console import Display
from agent_rl.monitoring.metrics_log import MetricsLog
from agent_rl.monitoring.sinks import SinkRun, sink_factories
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.filters import length_report, masked_stops
from agent_rl.rollout.group import GroupSettings, Limiter, RolloutEvent
from agent_rl.rollout.group_grading import group_grading
from agent_rl.rollout.metrics import source_metrics
from agent_rl.rollout.records import write_trajectories
from agent_rl.rollout.rescore import Rescorer
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.types import TokenDetail
from agent_rl.utils.concurrency import LoopLag, run_alongside
from agent_rl.utils.directory_lock import lock_directory
from agent_rl.weight_sync.sync import WeightSync

FILTER_REPORT_STEPS = 10
_PROMPT_CHARACTERS = 4096


@dataclass
class Clock:
    """Seconds of a step's stages, under their metric names."""

    values: dict[str, float] = field(default_factory=dict)

    @asynccontextmanager
    async def stage(self, name: str) -> AsyncIterator[None]:
        started = time.perf_counter()
        yield
        self.values[f"time/{name}"] = time.perf_counter() - started


async def train(checked: Checked) -> None:
    """Train to the config's last step, from the last checkpoint if there is one; write and show the summary."""
    config, display = checked.config, Display(checked.config.name)
    with lock_directory(config.run_dir), display:
        await check_remote_services(config.engine, config.train.ray_address)
        if checked.cluster.connects_first:
            display.stage("connecting to Ray")
        # Before the run directory is bound to the config.
        async with open_reservations(checked.cluster, ranks=True) as reservations:
            if reservations.note is not None:
                display.note(reservations.note)
            state = RunState(config)
            if state.change is not None:
                display.note(f"config changed {state.change.text}")
            if config.r3.ablation != "none":
                display.fact("experiment", f"r3.ablation {config.r3.ablation}: routes are kept from the trainer")
            keep_tokenizer(config.model, state.dir)
            async with (
                open_teacher(checked, state.dir / "logs" / "teacher", display.note) as teacher,
                _open_parts(checked, state, display, reservations) as (runtime, trainer),
            ):
                begin = partial(TrainingRun, config, state, display, runtime, trainer, teacher)
                summary = await run_to_last_step(begin, TrainerRestarts(config.train.restarts))
    display.note(f"{state.dir}/summary.json   {state.dir}/run.png")
    display.table(summary_table(summary))
    display.next("show", state.dir)


@asynccontextmanager
async def _open_parts(
    checked: Checked, state: RunState, display: Display, reservations: Reservations
) -> AsyncIterator[tuple[RolloutRuntime, RayTrainer]]:
    """Start the rollout runtime and the trainer concurrently: each takes many seconds, mostly of imports.

    Both use one connection to Ray: that of ``reservations``, where there is one, else the trainer starts a local Ray.
    """
    config = checked.config
    async with AsyncExitStack() as stack:
        trainer = RayTrainer(config, checked.model_spec, placement_group=reservations.ranks, note=display.note)
        stack.push_async_callback(trainer.close)
        async with asyncio.TaskGroup() as starting:
            if not config.engine.colocate:
                starting.create_task(trainer.start())
            runtime = await stack.enter_async_context(
                open_rollout_runtime(
                    checked,
                    state.dir / "logs",
                    display,
                    routes=config.captures_routes,
                    publishing=True,
                    reservations=reservations.engines,
                    split="train",
                )
            )
            if not checked.model_spec.quantized:
                await probe_engines(config.routes_config, runtime.engine, config.engine.headers, display)
            display.stage("starting the trainer")
            if config.engine.colocate:  # SGLang needs the same free memory on all of its GPUs when it starts
                await runtime.engine.sleep.begin()
                starting.create_task(trainer.start())
        yield runtime, trainer


class Resumable(Protocol):
    """A run that continues from its last checkpoint after a rank of its trainer died."""

    display: Display
    checkpoints: Checkpoints

    async def run(self) -> dict[str, object]:
        """Run all remaining steps; returns the summary. Raises TrainerDied."""
        ...

    async def restart_trainer(self) -> None: ...

    async def close(self) -> None: ...


async def run_to_last_step(begin: Callable[[], Resumable], restarts: TrainerRestarts) -> dict[str, object]:
    """Run to the last step; where a rank of the trainer dies, begin again from the last checkpoint. Returns the
    summary. Raises TrainerDied where ``restarts`` allows no more."""
    death: TrainerDied | None = None
    while True:
        run = begin()
        try:
            if death is not None:
                await run.restart_trainer()
            return await run.run()
        except TrainerDied as error:
            death = error
        finally:
            await run.close()
        run.display.note(restarts.count(death, run.checkpoints.newest_step()))


class TrainingRun:
    """A training run from its last checkpoint to its last step."""

    def __init__(
        self,
        config: RunConfig,
        state: RunState,
        display: Display,
        runtime: RolloutRuntime,
        trainer: RayTrainer,
        teacher: Teacher | None = None,
    ) -> None:
        self.config, self.state, self.display, self.teacher = config, state, display, teacher
        self.runtime, self.trainer, engine = runtime, trainer, runtime.engine
        self.rules = EpisodeRules.from_config(config)
        self.metrics = MetricsLog(state.dir, sink_factories(SinkRun(state.dir, state.run_id, config)), display.note)
        directory = state.dir / "weights"
        self.sync = WeightSync(
            config.engine, config.model, engine, trainer, directory, display.note, self._first_prompt
        )
        self.admission = EngineAdmission(config.routes_config, engine, self.sync, config.engine.headers)
        self.guard = Guard(config.guard, state.dir, display.note)
        self.journal = Journal(state.dir / "journal", state.run_id, turns=config.rollout.recover == "turns")
        self.history = LedgerFile(state.dir)
        settings = config.train.curriculum
        self.curriculum = None if settings is None else Curriculum(settings, self.history.solve_rates, state.dir)
        self.checkpoints = Checkpoints(config.train, state, trainer, self.journal)
        self.progress = Progress(state.run_id)
        self.quarantine = Quarantine(state.dir / "quarantine.json")
        self.masked = masked_stops(config.train.filter)
        self.rescorer = _open_rescorer(config.train, engine)
        self.loop_lag = LoopLag()
        ahead = config.async_rollout.depth > 0
        self.lane = "rollout" if ahead else ""
        self.evaluations = Evaluations(
            config.evaluations,
            self.rules,
            state,
            display,
            runtime,
            self.admission,
            self.quarantine,
            partial(self._on_event, lane="evaluation" if ahead else ""),
            steps=config.train.steps,
            concurrent=ahead,
        )

    def _first_prompt(self) -> Sequence[int]:
        """The tokens of the first task, for the comparison of log-probs at weight updates."""
        own = self.runtime.task_runtime.tasks("train")
        text = str(dict(own[0].record))[:_PROMPT_CHARACTERS] if own else ""
        prompt = self.runtime.renderer.initial_prompt([{"role": "user", "content": text}], ())
        return prompt[: self.config.rollout.max_tokens - 1]

    async def run(self) -> dict[str, object]:
        """Run all remaining steps, with the evaluations before, between and after them. Returns the summary."""
        total, tasks = self.config.train.steps, self.runtime.task_runtime
        await tasks.env.prepare("train", self.config.eval.split)
        await self._resume()
        done = self.progress.step
        self.display.start_steps(done, total)
        for row in self.metrics.rows:
            self.display.step(int(row["step"]), row)
        await self._publish(self.progress, Clock())
        engine = self.runtime.engine
        if engine.model_spec.quantized:  # until now it had no weights
            await probe_engines(self.config.routes_config, engine, self.config.engine.headers, self.display)
        await self.evaluations.begin(done)
        order = TaskOrder(tasks.training_sources(self.config), self.config.seed, self.curriculum)
        order.check(self.config.rollout.tasks_per_step)
        buffer = RolloutBuffer(self._buffer_rules(), TaskLedger(self.progress.position, self.progress.ahead), done)
        producer = self._make_producer(buffer, order)
        async with run_alongside(self.loop_lag.watch()), producer.running():
            for step in range(done + 1, total + 1):
                await self._step(step, buffer, producer)
                await self._checkpoint(step)
                self.guard.enforce(self.state.checkpoint(step), self.checkpoints.newest)
                await self.evaluations.begin(step)
                buffer.release()
        await self.evaluations.finish()
        await self.checkpoints.finish()
        await self.trainer.export(self.state.dir / "model")
        parts = {"sandbox": self.runtime.task_runtime.backend.name, "engine": f"sglang, {self.config.engine.dtype}"}
        return await asyncio.to_thread(summarize, self.state, self.metrics.rows, parts, steps=total)

    async def restart_trainer(self) -> None:
        """Start the trainer again after a rank died."""
        await self.runtime.engine.sleep.begin()
        await self.trainer.restart()

    async def close(self) -> None:
        """Cancel what is still running and close the files. Idempotent."""
        await asyncio.to_thread(self.metrics.close)
        self.journal.close()
        await self.evaluations.close()
        await self.checkpoints.close()

    async def _resume(self) -> None:
        """Load the last checkpoint and drop what was written after it, except the journal's episodes."""
        self.progress, manifest = await self.checkpoints.resume()
        step = self.progress.step
        if manifest is not None:
            other = "" if manifest.written_by(self.config.train.parallel) else ", written in another parallel layout"
            self.display.note(f"resuming from {self.state.checkpoint(step)}{other}")
        self.metrics.forget_after(step)
        self.history.forget_after(step)
        self.state.forget_after(step)
        self.guard.resume(step)

    def _buffer_rules(self) -> BufferRules:
        rollout, ahead = self.config.rollout, self.config.async_rollout
        return BufferRules(
            width=rollout.tasks_per_step,
            depth=ahead.depth,
            staleness=ahead.staleness,
            max_draws=rollout.dynamic_sampling.max_draws * rollout.tasks_per_step,
            steps=self.config.train.steps,
            dynamic=rollout.dynamic_sampling.enabled,
        )

    def _make_producer(self, buffer: RolloutBuffer, order: TaskOrder) -> RolloutProducer:
        rollout, uniform = self.config.rollout, self.config.train.learns_from_equal_rewards
        return RolloutProducer(
            GroupSettings(rollout.group_size, retries=rollout.sandbox_retries, rescore_uniform=uniform),
            order,
            buffer,
            self.journal,
            self.runtime.runner(self.rules),
            limiter=self.runtime.limiter,
            masked=self.masked,
            left_out=self.quarantine,
            rescore=self.rescorer,
            grading=group_grading(self.runtime.task_runtime.env, self.rules),
            scored=None if self.teacher is None else self.teacher.scored,
            on_event=partial(self._on_event, lane=self.lane),
        )

    async def _step(self, step: int, buffer: RolloutBuffer, producer: RolloutProducer) -> None:
        clock = Clock()
        async with clock.stage("step"):
            async with clock.stage("rollout"), self.admission.admit():
                batch, values = await self._take_batch(step, buffer, producer)
            values |= {
                "data/position": float(buffer.ledger.position),
                "async_rollout/buffered": float(buffer.ledger.count(Outcome.KEPT)),
                "async_rollout/unfinished": float(len(buffer.ledger.open)),
            }
            if self.config.captures_routes:
                check_missing_budget(step, batch.groups, self.config.r3)
            prepared = self._samples(step, batch)
            values |= prepared.metrics
            train = self.config.train
            measured = train.needs_trainer_logprobs or _is_due(step, train.old_logprob.measure_every)
            details: dict[int, TokenDetail] | None = {} if measured and self.config.monitoring.token_detail else None
            if prepared.samples:
                await self.runtime.engine.sleep.begin()
                self.display.stage(f"step {step}: update")
                spike = self.guard.spike_norm(self.metrics.rows)
                values |= await self.trainer.step(
                    prepared.samples,
                    measure_without_replay=_is_due(step, train.measure_without_replay_every),
                    measure_mismatch=measured,
                    step=step,
                    spike_norm=spike,
                    on_detail=None if details is None else details.update,
                )
            self.progress = self.progress.after(step, buffer.ledger, values)
            values |= await self._publish(self.progress, clock)
            await asyncio.to_thread(
                write_trajectories,
                self.state.dir,
                step,
                batch.sampled,
                decisions=(*prepared.decisions, *batch.discarded_decisions),
                details=None if details is None else {prepared.origins[at]: own for at, own in details.items()},
            )
        values |= clock.values | self.runtime.metrics() | self.runtime.engine.fleet.metrics()
        engine = self.runtime.engine
        values |= engine.gate.metrics() | engine.load.metrics(engine.fleet.in_use) | engine.sleep.metrics()
        values |= self.journal.metrics(step) | self.loop_lag.metrics()
        values |= goodput(prepared.samples, batch.sampled, values["time/step"])
        values["async_rollout/trainer_idle"] = values["time/rollout"] / values["time/step"]
        tasks = tuple(group.task_id for group in batch.sampled)
        values |= self.history.append(LedgerRow(step, batch.outcomes, tasks, tuple(map(solve_rate, batch.sampled))))
        values |= {} if self.curriculum is None else self.curriculum.metrics()
        values |= self.guard.judge(step, values, self.metrics.rows)
        await asyncio.to_thread(self.metrics.append, step, values)
        self.display.step(step, values)
        if (reason := why_idle(values)) is not None:
            self.display.note(f"step {step}: no update: {reason}")
        self._report_filters(step)

    def _samples(self, step: int, batch: Batch) -> GroupSamples:
        train, max_tokens = self.config.train, self.config.rollout.max_tokens
        return build_samples(
            batch.groups,
            baseline=train.baseline,
            scale=train.advantage_scale,
            drop_missing=self.config.captures_routes and self.config.r3.missing == "drop_sample",
            masked=self.masked,
            penalty=partial(overlong_penalty, limit=max_tokens, overlong=train.overlong),
            normalized=not train.normalizes_on_ranks,
            equal_rewards=train.distill is not None or train.echo is not None,
            observed=train.echo is not None,
            gamma=None if train.turn_rewards is None else train.turn_rewards.gamma,
            aggregation=train.loss_aggregation,
            published=step - 1,
        )

    async def _take_batch(
        self, step: int, buffer: RolloutBuffer, producer: RolloutProducer
    ) -> tuple[Batch, dict[str, float]]:
        """Wait for the batch of ``step``; return it with its metrics."""
        rollout = self.config.rollout
        episodes = rollout.tasks_per_step * rollout.group_size
        self.display.stage(f"step {step}: rollout", total=episodes, lane=self.lane)
        outcomes = await buffer.take(self.journal.recorded_batch(step))
        self.journal.record_batch(step, tuple(outcomes))
        batch = build_batch(outcomes, await producer.hand_over(outcomes))
        check_filled(batch, rollout.tasks_per_step, rollout.dynamic_sampling)
        values = batch_metrics(batch, producer.seconds(), self.masked)
        values |= source_metrics(batch.sampled, self.config.train.sources)
        if self.teacher is not None:
            values |= self.teacher.metrics()
        if self.rescorer is not None:
            failed, self.rescorer.failed = self.rescorer.failed, 0
            values |= rescore_values(batch.sampled, failed, time.perf_counter() - producer.last_episode)
        return batch, values

    def _report_filters(self, step: int) -> None:
        if step % FILTER_REPORT_STEPS == 0:
            ratios = [row["filter/length_ratio"] for row in self.metrics.rows if "filter/length_ratio" in row]
            if line := length_report(ratios):
                self.display.note(line)

    def _on_event(self, event: RolloutEvent, lane: str) -> None:
        if event.trajectory is not None and not event.trajectory.stop.infrastructure:
            self.display.advance(lane=lane)
        if line := self.quarantine.add_undecidable(event):
            self.display.note(line)

    async def _publish(self, progress: Progress, clock: Clock) -> Mapping[str, float]:
        """Publish the weights to the engines as the version of the step that ended. Episodes that finish from then on
        are journaled for the next step."""
        await self.evaluations.finish()
        self.display.stage(f"step {progress.step}: weights to the engine")
        by_turns = self.config.engine.pause_mode == "turn"
        async with clock.stage("weight_sync"):
            if self.config.engine.weight_sync == "delta":
                await self.sync.stage(progress.step)
            async with self.runtime.engine.gate.closed() if by_turns else nullcontext():
                await self.runtime.engine.sleep.resume_weights()
                values = await self.sync.publish(progress.step)
                await self.runtime.engine.sleep.end()
                if progress.step < self.config.train.steps:
                    await self._begin_journal(progress.step + 1, progress.weights)
                return values

    async def _begin_journal(self, step: int, weights: str) -> None:
        if finished := await self.journal.begin(step, weights):
            self.display.note(f"step {step}: {finished} finished trajectories are in the journal")

    async def _checkpoint(self, step: int) -> None:
        self.checkpoints.check()
        if self.checkpoints.due(step) or self.guard.stopping:
            self.display.stage(f"step {step}: checkpoint")
            await self.checkpoints.save(self.progress, good=self.guard.good_step)
        if self.guard.stopping:
            await self.checkpoints.finish()


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _open_rescorer(train: TrainConfig, engine: SGLangEngine) -> Rescorer | None:
    old = train.old_logprob
    if old.source != "rescore":
        return None
    limiter = Limiter(old.rescore.concurrency)
    return Rescorer(engine, n=old.rescore.n, limiter=limiter, skipped=masked_stops(train.filter))
