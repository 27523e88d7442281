"""The training run: rollout, update, publish, step after step.

::

    schedule ── tasks ──▶ Collector ── groups ──▶ samples_of ── samples ──▶ trainer.step ── weights ──▶ engine
       ▲                                                                                                  │
       └───────────────────────── the next step waits for the published version ──────────────────────────┘

On-policy: a step's episodes are all sampled with the weights the step before published. What a step consumed and
produced is on disk before the next begins, and every episode as soon as it ends; a killed run goes on from its last
checkpoint with the episodes that had finished since, and so does one whose trainer died, by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial

from agent_rl.aio import cancel_on_signals
from agent_rl.config import RunConfig
from agent_rl.controller import preflight
from agent_rl.controller.advantages import overlong_penalty, samples_of
from agent_rl.controller.batch import Batch, Collector
from agent_rl.controller.checkpoints import Checkpoints, Progress
from agent_rl.controller.cluster import Rooms, needs_ray, open_rooms
from agent_rl.controller.guard import Guard
from agent_rl.controller.idle_steps import why_idle
from agent_rl.controller.journal import Journal
from agent_rl.controller.newcomers import Newcomers
from agent_rl.controller.restarts import Restarts
from agent_rl.controller.routes import check_budget, probe_engines
from agent_rl.controller.schedule import check_enough
from agent_rl.controller.state import RunState, keep_tokenizer
from agent_rl.controller.summary import summarize, summary_table
from agent_rl.controller.world import World, open_world
from agent_rl.errors import TrainerDied
from agent_rl.evaluation.evaluate import evaluate
from agent_rl.evaluation.quarantine import Quarantine
from agent_rl.evaluation.report import EvalReport
from agent_rl.model_facts import ModelFacts
from agent_rl.observe.display import Display
from agent_rl.observe.folder_lock import hold_folder
from agent_rl.observe.metrics_log import MetricsLog
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.filters import length_report, masked_stops
from agent_rl.rollout.group import RolloutEvent
from agent_rl.rollout.records import evaluation_stem, write_records, write_trajectories
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.types import Group, TokenDetail
from agent_rl.weight_sync.sync import WeightSync

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
    preflight.check_replay(config, facts)
    preflight.check_lengths(config, facts)
    display = Display(config.name)
    with hold_folder(config.run_dir), display:
        await preflight.ask_elsewhere(config)
        if needs_ray(config):
            display.stage("connecting to Ray")
        async with open_rooms(config, ranks=True) as rooms:  # before the folder is bound to the config
            state = RunState(config)
            keep_tokenizer(config.model, state.dir)
            async with _parts(config, facts, state, display, rooms) as (world, trainer):
                begin = partial(TrainingRun, config, state, display, world, trainer)
                summary = await run_to_the_end(begin, Restarts(config.train.restarts))
    display.note(f"{state.dir}/summary.json   {state.dir}/run.png")
    display.table(summary_table(summary))
    display.next("show", state.dir)


@asynccontextmanager
async def _parts(
    config: RunConfig, facts: ModelFacts, state: RunState, display: Display, rooms: Rooms
) -> AsyncIterator[tuple[World, RayTrainer]]:
    """The world and the trainer, started side by side: each takes many seconds, mostly of imports.

    One Ray serves both. Where the world needs it, ``rooms`` brought it, else the trainer starts it.
    """
    async with AsyncExitStack() as stack:
        trainer = RayTrainer(config, room=rooms.ranks)
        stack.push_async_callback(trainer.close)
        async with asyncio.TaskGroup() as starting:
            starting.create_task(trainer.start())
            where = state.dir / "logs"
            opening = open_world(
                config, facts, where, display, routes=config.wants_routes, publishing=True, rooms=rooms.engines
            )
            world = await stack.enter_async_context(opening)
            await probe_engines(config, world.engine, display)
            display.stage("starting the trainer")
        cancel_on_signals()
        yield world, trainer


async def run_to_the_end(begin: Callable[[], TrainingRun], restarts: Restarts) -> dict[str, object]:
    """Run to the last step, begun again from the last checkpoint whenever a rank of the trainer has died. Returns the
    summary; raises TrainerDied where ``restarts`` allows no more."""
    death: TrainerDied | None = None
    while True:
        run = begin()
        try:
            if death is not None:
                await run.trainer.restart()
            return await run.run()
        except TrainerDied as error:
            death = error
        finally:
            await run.close()
        run.display.note(restarts.count(death, run.checkpoints.newest_step()))


class TrainingRun:
    """A run from its last checkpoint on, to its last step."""

    def __init__(self, config: RunConfig, state: RunState, display: Display, world: World, trainer: RayTrainer) -> None:
        self.config, self.state, self.display = config, state, display
        self.world, self.trainer = world, trainer
        self.rules = EpisodeRules.of(config)
        self.metrics = MetricsLog(state.dir)
        self.sync = WeightSync(config, world.engine, trainer, state.dir / "weights", display.note)
        self.newcomers = Newcomers(config, world.engine, self.sync)
        self.guard = Guard(config.guard, state.dir, display.note)
        self.journal = Journal(state.dir / "journal", state.run_id)
        self.checkpoints = Checkpoints(config.train, state, trainer, self.journal)
        self.progress = Progress(state.run_id)
        self.quarantine = Quarantine(state.dir / "quarantine.json")

    async def run(self) -> dict[str, object]:
        """All remaining steps, with the evaluations before, between and after them. Returns the summary."""
        total, env = self.config.train.steps, self.world.workshop.env
        await env.prepare("train", self.config.eval.split)
        await self._resume()
        done = self.progress.step
        self.display.start_steps(done, total)
        for row in self.metrics.rows:
            self.display.step(int(row["step"]), row)
        await self._publish(done, Clock())
        await self._evaluate(done, total)
        tasks = self.world.workshop.tasks("train")
        check_enough(tasks, self.config.rollout.tasks_per_step)
        collector = Collector(
            self.config, tasks, limiter=self.world.limiter, engine=self.world.engine, left_out=self.quarantine
        )
        for step in range(done + 1, total + 1):
            await self._step(step, collector)
            await self._checkpoint(step)
            self.guard.enforce(self.state.checkpoint(step), self.checkpoints.newest)
            await self._evaluate(step, total)
        await self.checkpoints.finish()
        await self.trainer.export(self.state.dir / "model")
        facts = {"sandbox": self.world.workshop.backend.name, "engine": f"sglang, {self.config.engine.dtype}"}
        return await asyncio.to_thread(summarize, self.state, self.metrics.rows, facts, steps=total)

    async def close(self) -> None:
        """End what is under way. Idempotent."""
        self.metrics.close()
        await self.checkpoints.close()

    async def _resume(self) -> None:
        """Load the last checkpoint, and forget what came after it; the journal keeps the episodes since."""
        self.progress, manifest = await self.checkpoints.resume()
        step = self.progress.step
        if manifest is not None:
            other = "" if manifest.written_by(self.config.train.parallel) else ", written in another parallel layout"
            self.display.note(f"resuming from {self.state.checkpoint(step)}{other}")
        self.metrics.forget_after(step)
        self.state.forget_after(step)
        self.guard.resume(step)

    async def _step(self, step: int, collector: Collector) -> None:
        clock = Clock()
        async with clock.stage("step"):
            async with clock.stage("rollout"), self.newcomers.welcomed():
                batch = await self._rollout(step, collector)
            values = batch.values | {"data/position": float(batch.position)}
            if self.config.wants_routes:
                check_budget(step, batch.groups, self.config.r3)
            prepared = samples_of(
                batch.groups,
                baseline=self.config.train.baseline,
                scale=self.config.train.scale,
                drop_missing=self.config.wants_routes and self.config.r3.missing == "drop_sample",
                masked=masked_stops(self.config.train.filter),
                penalty=partial(
                    overlong_penalty,
                    limit=self.config.rollout.max_tokens,
                    overlong=self.config.train.overlong,
                ),
                normalised=not self.config.train.normalises_penalised,
                by_sequence=self.config.train.averaged_over == "sequence",
                published=step - 1,
            )
            values |= prepared.metrics
            details: dict[int, TokenDetail] | None = {} if self.config.observe.token_detail else None
            if prepared.samples:
                self.display.stage(f"step {step}: update")
                native = self._measure_native(step)
                spike = self.guard.spike_norm(self.metrics.rows)
                values |= await self.trainer.step(
                    prepared.samples,
                    measure_native=native,
                    step=step,
                    spike_norm=spike,
                    on_detail=None if details is None else details.update,
                )
            values |= await self._publish(step, clock)
            await asyncio.to_thread(
                write_trajectories,
                self.state.dir,
                step,
                batch.sampled,
                verdicts=(*prepared.verdicts, *batch.verdicts_of_discarded),
                details=None if details is None else {prepared.origins[at]: own for at, own in details.items()},
            )
        values |= clock.values | self.world.metrics() | self.world.engine.fleet.metrics()
        values |= self.guard.judge(step, values, self.metrics.rows)
        self.metrics.append(step, values)
        self.progress = self.progress.after(step, batch.position, values)
        self.display.step(step, values)
        if (reason := why_idle(values)) is not None:
            self.display.note(f"step {step}: no update: {reason}")
        self._report_filters(step)

    async def _rollout(self, step: int, collector: Collector) -> Batch:
        rollout = self.config.rollout
        self.display.stage(f"step {step}: rollout", total=rollout.tasks_per_step * rollout.group_size)
        with closing(await asyncio.to_thread(self.journal.open, step, self.progress.weights)) as journal:
            if journal.found:
                self.display.note(f"step {step}: {journal.found} finished trajectories are in the journal")
            run = journal.runner(self.world.runner(self.rules))
            return await collector.collect(self.progress.position, run, self._on_event)

    def _report_filters(self, step: int) -> None:
        if step % FILTER_REPORT_STEPS == 0:
            ratios = [row["filter/length_ratio"] for row in self.metrics.rows if "filter/length_ratio" in row]
            if line := length_report(ratios):
                self.display.note(line)

    def _on_event(self, event: RolloutEvent) -> None:
        if event.trajectory is not None and not event.trajectory.stop.infrastructure:
            self.display.advance()
        if line := self.quarantine.learn(event):
            self.display.note(line)

    def _measure_native(self, step: int) -> bool:
        every = self.config.train.native_every
        return every > 0 and step % every == 0

    async def _publish(self, step: int, clock: Clock) -> Mapping[str, float]:
        """Send the weights to the engines as version ``step``, checked."""
        self.display.stage(f"step {step}: weights to the engine")
        by_turns = self.config.engine.pause_mode == "turn"
        async with clock.stage("weight_sync"), self.world.engine.gate.closed() if by_turns else nullcontext():
            return await self.sync.publish(step)

    async def _checkpoint(self, step: int) -> None:
        self.checkpoints.check()
        if self.checkpoints.due(step) or self.guard.stopping:
            self.display.stage(f"step {step}: checkpoint")
            await self.checkpoints.save(self.progress, good=self.guard.good_step)
        if self.guard.stopping:
            await self.checkpoints.finish()

    async def _evaluate(self, step: int, total: int) -> None:
        """Evaluate where one is due and not yet recorded: before, after, and every ``eval.every`` steps."""
        settings = self.config.eval
        ends = step in (0, total)
        if not settings.tasks or not (ends or (settings.every and step % settings.every == 0)):
            return
        for kind in ("sampled", "greedy") if settings.greedy and ends else ("sampled",):
            key = f"step-{step}/{kind}"
            if key not in self.state.evaluations:
                report = await self._evaluate_once(key, f"Pass@1 at step {step}, {kind}", greedy=kind == "greedy")
                self.state.record_evaluation(key, report)

    async def _evaluate_once(self, key: str, what: str, *, greedy: bool) -> EvalReport:
        chosen = self.world.workshop.tasks(self.config.eval.split)[: self.config.eval.tasks]
        tasks = [task for task in chosen if task.id not in self.quarantine]
        self.display.stage(what, total=len(tasks))
        ended: dict[str, Group] = {}

        def on_event(event: RolloutEvent) -> None:
            if event.group is not None:
                ended[event.group.task_id] = event.group
            self._on_event(event)

        async with self.newcomers.welcomed():
            report = await evaluate(
                tasks,
                self.world.runner(self.rules.for_evaluation(greedy=greedy)),
                policy="engine",
                limiter=self.world.limiter,
                on_event=on_event,
            )
        groups = [ended[task.id] for task in tasks if task.id in ended]
        await asyncio.to_thread(write_records, evaluation_stem(self.state.dir, key), groups)
        if not report.graded:
            self.display.fact(what, f"not known: none of {report.tasks} tasks could be graded")
            return report
        low, high = report.interval
        self.display.fact(what, f"{100 * report.pass_at_1:.1f} % [{100 * low:.1f}, {100 * high:.1f}]")
        return report
