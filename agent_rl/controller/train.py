"""The training run: take a batch, update, publish, release, step after step, while the pump samples.

::

    RolloutProducer ── groups ──▶ RolloutBuffer.take ── Batch ──▶ samples_of ── samples ──▶ trainer.step ── weights
    ──▶ engine
        ▲                                                                                                         │
        └───────────────────────────── RolloutBuffer.release, after the published version ◀──────────────────────────┘

With ``async_rollout.depth`` 0 there is room for one batch at a time: a step's episodes are all sampled with the
weights the step before published, and nothing runs beside training or evaluation. With more, sampling runs so many
batches ahead.

What a step consumed and produced is on disk before the next begins, and every episode as soon as it ends; a killed run
goes on from its last checkpoint with the episodes that had finished since, and so does one whose trainer died, by
itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from agent_rl.config import RunConfig
from agent_rl.controller import preflight
from agent_rl.controller.advantages import GroupSamples, overlong_penalty, samples_of
from agent_rl.controller.async_rollout.buffer import BufferRules, RolloutBuffer
from agent_rl.controller.async_rollout.evaluations import Evaluations
from agent_rl.controller.async_rollout.ledger_file import History, StepRow
from agent_rl.controller.async_rollout.producer import RolloutProducer
from agent_rl.controller.async_rollout.task_ledger import Ledger, Outcome
from agent_rl.controller.batch import Batch, batch_metrics, batch_of, check_filled, goodput, rescore_values
from agent_rl.controller.checkpoints import Checkpoints, Progress
from agent_rl.controller.engine_admission import EngineAdmission
from agent_rl.controller.guard import Guard
from agent_rl.controller.journal import Journal
from agent_rl.controller.placement import Reservations, needs_ray, open_reservations
from agent_rl.controller.rollout_runtime import RolloutRuntime, open_rollout_runtime
from agent_rl.controller.route_checks import check_budget, probe_engines
from agent_rl.controller.skipped_updates import why_idle
from agent_rl.controller.state import RunState, keep_tokenizer
from agent_rl.controller.summary import summarize, summary_table
from agent_rl.controller.task_sampler import check_enough
from agent_rl.controller.trainer_restarts import Restarts
from agent_rl.engine.types import Scorer
from agent_rl.errors import TrainerDied
from agent_rl.evaluation.quarantine import Quarantine
from agent_rl.models.spec import ModelSpec
from agent_rl.monitoring.console import Display
from agent_rl.monitoring.loop_lag import LoopLag
from agent_rl.monitoring.metrics_log import MetricsLog
from agent_rl.monitoring.sinks import SinkRun, check_sinks, openers
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.filters import length_report, masked_stops
from agent_rl.rollout.group import RolloutEvent
from agent_rl.rollout.limiter import Limiter
from agent_rl.rollout.records import write_trajectories
from agent_rl.rollout.rescore import Rescorer
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.types import TokenDetail
from agent_rl.utils.concurrency import beside, cancel_on_signals
from agent_rl.utils.directory_lock import lock_directory
from agent_rl.weight_sync.sync import WeightSync
from envs import Task

FILTER_REPORT_STEPS = 10


@dataclass
class Clock:
    """Seconds of a step's stages, under their metric names."""

    values: dict[str, float] = field(default_factory=dict)

    @asynccontextmanager
    async def stage(self, name: str) -> AsyncIterator[None]:
        started = time.perf_counter()
        yield
        self.values[f"time/{name}"] = time.perf_counter() - started


async def train(config: RunConfig) -> None:
    """Run ``config`` to its last step, from its last checkpoint if it has one; write and show the summary."""
    facts = preflight.check(config)
    preflight.check_weights(config, facts)
    preflight.check_replay(config, facts)
    preflight.check_lengths(config, facts)
    check_sinks(config)
    display = Display(config.name)
    with lock_directory(config.run_dir), display:
        await preflight.ask_elsewhere(config)
        if needs_ray(config):
            display.stage("connecting to Ray")
        async with open_reservations(config, ranks=True) as rooms:  # before the directory is bound to the config
            if rooms.note is not None:
                display.note(rooms.note)
            state = RunState(config)
            if config.r3.ablation != "none":
                display.fact("experiment", f"r3.ablation {config.r3.ablation}: routes are kept from the trainer")
            keep_tokenizer(config.model, state.dir)
            async with _parts(config, facts, state, display, rooms) as (runtime, trainer):
                begin = partial(TrainingRun, config, state, display, runtime, trainer)
                summary = await run_to_the_end(begin, Restarts(config.train.restarts))
    display.note(f"{state.dir}/summary.json   {state.dir}/run.png")
    display.table(summary_table(summary))
    display.next("show", state.dir)


@asynccontextmanager
async def _parts(
    config: RunConfig, facts: ModelSpec, state: RunState, display: Display, rooms: Reservations
) -> AsyncIterator[tuple[RolloutRuntime, RayTrainer]]:
    """The world and the trainer, started side by side: each takes many seconds, mostly of imports.

    One Ray serves both. Where the world needs it, ``rooms`` brought it, else the trainer starts it.
    """
    async with AsyncExitStack() as stack:
        trainer = RayTrainer(config, room=rooms.ranks, note=display.note)
        stack.push_async_callback(trainer.close)
        async with asyncio.TaskGroup() as starting:
            if not config.engine.colocate:
                starting.create_task(trainer.start())
            where = state.dir / "logs"
            opening = open_rollout_runtime(
                config, facts, where, display, routes=config.wants_routes, publishing=True, rooms=rooms.engines
            )
            runtime = await stack.enter_async_context(opening)
            await probe_engines(config, runtime.engine, display)
            display.stage("starting the trainer")
            if config.engine.colocate:  # SGLang wants as much free memory on all of its GPUs when it starts
                await runtime.engine.sleep.begin()
                starting.create_task(trainer.start())
        cancel_on_signals()
        yield runtime, trainer


async def run_to_the_end(begin: Callable[[], TrainingRun], restarts: Restarts) -> dict[str, object]:
    """Run to the last step, begun again from the last checkpoint whenever a rank of the trainer has died. Returns the
    summary; raises TrainerDied where ``restarts`` allows no more."""
    death: TrainerDied | None = None
    while True:
        run = begin()
        try:
            if death is not None:
                await run.runtime.engine.sleep.begin()
                await run.trainer.restart()
            return await run.run()
        except TrainerDied as error:
            death = error
        finally:
            await run.close()
        run.display.note(restarts.count(death, run.checkpoints.newest_step()))


class TrainingRun:
    """A run from its last checkpoint on, to its last step."""

    def __init__(
        self, config: RunConfig, state: RunState, display: Display, runtime: RolloutRuntime, trainer: RayTrainer
    ) -> None:
        self.config, self.state, self.display = config, state, display
        self.runtime, self.trainer = runtime, trainer
        self.rules = EpisodeRules.of(config)
        self.metrics = MetricsLog(state.dir, openers(SinkRun(state.dir, state.run_id, config)), display.note)
        self.sync = WeightSync(config, runtime.engine, trainer, state.dir / "weights", display.note)
        self.newcomers = EngineAdmission(config, runtime.engine, self.sync)
        self.guard = Guard(config.guard, state.dir, display.note)
        self.journal = Journal(state.dir / "journal", state.run_id, turns=config.rollout.recover == "turns")
        self.history = History(state.dir)
        self.checkpoints = Checkpoints(config.train, state, trainer, self.journal)
        self.progress = Progress(state.run_id)
        self.quarantine = Quarantine(state.dir / "quarantine.json")
        self.masked = masked_stops(config.train.filter)
        self.rescorer = _rescorer(config, runtime.engine)
        self.loop_lag = LoopLag()
        self.lane = "rollout" if config.async_rollout.depth else ""
        told = partial(self._on_event, lane="evaluation" if config.async_rollout.depth else "")
        self.evaluations = Evaluations(config, state, display, runtime, self.newcomers, self.quarantine, told)

    async def run(self) -> dict[str, object]:
        """All remaining steps, with the evaluations before, between and after them. Returns the summary."""
        total, env = self.config.train.steps, self.runtime.task_runtime.env
        await env.prepare("train", self.config.eval.split)
        await self._resume()
        done = self.progress.step
        self.display.start_steps(done, total)
        for row in self.metrics.rows:
            self.display.step(int(row["step"]), row)
        await self._publish(self.progress, Clock())
        await self.evaluations.begin(done)
        tasks = self.runtime.task_runtime.tasks("train")
        check_enough(tasks, self.config.rollout.tasks_per_step)
        buffer = RolloutBuffer(self._rules(), Ledger(self.progress.position, self.progress.ahead), done)
        pump = self._pump(buffer, tasks)
        async with beside(self.loop_lag.watch()), pump.running():
            for step in range(done + 1, total + 1):
                await self._step(step, buffer, pump)
                await self._checkpoint(step)
                self.guard.enforce(self.state.checkpoint(step), self.checkpoints.newest)
                await self.evaluations.begin(step)
                buffer.release()
        await self.evaluations.finish()
        await self.checkpoints.finish()
        await self.trainer.export(self.state.dir / "model")
        facts = {"sandbox": self.runtime.task_runtime.backend.name, "engine": f"sglang, {self.config.engine.dtype}"}
        return await asyncio.to_thread(summarize, self.state, self.metrics.rows, facts, steps=total)

    async def close(self) -> None:
        """End what is under way. Idempotent."""
        await asyncio.to_thread(self.metrics.close)
        self.journal.close()
        await self.evaluations.close()
        await self.checkpoints.close()

    async def _resume(self) -> None:
        """Load the last checkpoint, and forget what came after it; the journal keeps the episodes since."""
        self.progress, manifest = await self.checkpoints.resume()
        step = self.progress.step
        if manifest is not None:
            other = "" if manifest.written_by(self.config.train.parallel) else ", written in another parallel layout"
            self.display.note(f"resuming from {self.state.checkpoint(step)}{other}")
        self.metrics.forget_after(step)
        self.history.forget_after(step)
        self.state.forget_after(step)
        self.guard.resume(step)

    def _rules(self) -> BufferRules:
        rollout, ahead = self.config.rollout, self.config.async_rollout
        return BufferRules(
            width=rollout.tasks_per_step,
            depth=ahead.depth,
            staleness=ahead.staleness,
            most_draws=rollout.dynamic_sampling.max_draws * rollout.tasks_per_step,
            steps=self.config.train.steps,
            dynamic=rollout.dynamic_sampling.enabled,
        )

    def _pump(self, buffer: RolloutBuffer, tasks: Sequence[Task]) -> RolloutProducer:
        return RolloutProducer(
            self.config,
            tasks,
            buffer,
            self.journal,
            self.runtime.runner(self.rules),
            limiter=self.runtime.limiter,
            left_out=self.quarantine,
            rescore=self.rescorer,
            on_event=partial(self._on_event, lane=self.lane),
        )

    async def _step(self, step: int, buffer: RolloutBuffer, pump: RolloutProducer) -> None:
        clock = Clock()
        async with clock.stage("step"):
            async with clock.stage("rollout"), self.newcomers.admit():
                batch, values = await self._take(step, buffer, pump)
            values |= {
                "data/position": float(buffer.ledger.position),
                "async_rollout/buffered": float(buffer.ledger.count(Outcome.KEPT)),
                "async_rollout/unfinished": float(len(buffer.ledger.open)),
            }
            if self.config.wants_routes:
                check_budget(step, batch.groups, self.config.r3)
            prepared = self._samples(step, batch)
            values |= prepared.metrics
            details: dict[int, TokenDetail] | None = {} if self.config.monitoring.token_detail else None
            if prepared.samples:
                await self.runtime.engine.sleep.begin()
                self.display.stage(f"step {step}: update")
                native = self._measure_without_replay(step)
                spike = self.guard.spike_norm(self.metrics.rows)
                values |= await self.trainer.step(
                    prepared.samples,
                    measure_without_replay=native,
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
                verdicts=(*prepared.verdicts, *batch.verdicts_of_discarded),
                details=None if details is None else {prepared.origins[at]: own for at, own in details.items()},
            )
        values |= clock.values | self.runtime.metrics() | self.runtime.engine.fleet.metrics()
        engine = self.runtime.engine
        values |= engine.gate.metrics() | engine.load.metrics(engine.fleet.in_use) | engine.sleep.metrics()
        values |= self.journal.metrics(step) | self.loop_lag.metrics()
        values |= goodput(prepared.samples, batch.sampled, values["time/step"])
        values["async_rollout/trainer_idle"] = values["time/rollout"] / values["time/step"]
        values |= self.history.append(StepRow(step, batch.outcomes, tuple(group.task_id for group in batch.sampled)))
        values |= self.guard.judge(step, values, self.metrics.rows)
        await asyncio.to_thread(self.metrics.append, step, values)
        self.display.step(step, values)
        if (reason := why_idle(values)) is not None:
            self.display.note(f"step {step}: no update: {reason}")
        self._report_filters(step)

    def _samples(self, step: int, batch: Batch) -> GroupSamples:
        return samples_of(
            batch.groups,
            baseline=self.config.train.baseline,
            scale=self.config.train.advantage_scale,
            drop_missing=self.config.wants_routes and self.config.r3.missing == "drop_sample",
            masked=self.masked,
            penalty=partial(
                overlong_penalty,
                limit=self.config.rollout.max_tokens,
                overlong=self.config.train.overlong,
            ),
            normalized=not self.config.train.normalizes_penalized,
            by_sequence=self.config.train.averaged_over == "sequence",
            published=step - 1,
        )

    async def _take(self, step: int, buffer: RolloutBuffer, pump: RolloutProducer) -> tuple[Batch, dict[str, float]]:
        """The batch of ``step``, as soon as it is there, and what is measured of it."""
        rollout = self.config.rollout
        episodes = rollout.tasks_per_step * rollout.group_size
        self.display.stage(f"step {step}: rollout", total=episodes, lane=self.lane)
        outcomes = await buffer.take(self.journal.recorded(step))
        self.journal.record(step, tuple(outcomes))
        batch = batch_of(outcomes, await pump.hand_over(outcomes))
        check_filled(batch, rollout.tasks_per_step, rollout.dynamic_sampling)
        values = batch_metrics(batch, pump.seconds(), self.masked)
        if self.rescorer is not None:
            failed, self.rescorer.failed = self.rescorer.failed, 0
            values |= rescore_values(batch.sampled, failed, time.perf_counter() - pump.last_episode)
        return batch, values

    def _report_filters(self, step: int) -> None:
        if step % FILTER_REPORT_STEPS == 0:
            ratios = [row["filter/length_ratio"] for row in self.metrics.rows if "filter/length_ratio" in row]
            if line := length_report(ratios):
                self.display.note(line)

    def _on_event(self, event: RolloutEvent, lane: str) -> None:
        if event.trajectory is not None and not event.trajectory.stop.infrastructure:
            self.display.advance(lane=lane)
        if line := self.quarantine.learn(event):
            self.display.note(line)

    def _measure_without_replay(self, step: int) -> bool:
        every = self.config.train.measure_without_replay_every
        return every > 0 and step % every == 0

    async def _publish(self, progress: Progress, clock: Clock) -> Mapping[str, float]:
        """Send the weights to the engines as the version of the step that is done, checked. What finishes from then on
        is the next step's."""
        await self.evaluations.finish()
        self.display.stage(f"step {progress.step}: weights to the engine")
        by_turns = self.config.engine.pause_mode == "turn"
        async with clock.stage("weight_sync"), self.runtime.engine.gate.closed() if by_turns else nullcontext():
            await self.runtime.engine.sleep.load()
            values = await self.sync.publish(progress.step)
            await self.runtime.engine.sleep.end()
            if progress.step < self.config.train.steps:
                await self._begin(progress.step + 1, progress.weights)
            return values

    async def _begin(self, step: int, weights: str) -> None:
        if found := await self.journal.begin(step, weights):
            self.display.note(f"step {step}: {found} finished trajectories are in the journal")

    async def _checkpoint(self, step: int) -> None:
        self.checkpoints.check()
        if self.checkpoints.due(step) or self.guard.stopping:
            self.display.stage(f"step {step}: checkpoint")
            await self.checkpoints.save(self.progress, good=self.guard.good_step)
        if self.guard.stopping:
            await self.checkpoints.finish()


def _rescorer(config: RunConfig, engine: Scorer) -> Rescorer | None:
    old = config.train.old_logprob
    if old.source != "rescore":
        return None
    limiter = Limiter(old.rescore.concurrency)
    return Rescorer(engine, n=old.rescore.n, limiter=limiter, skipped=masked_stops(config.train.filter))
