"""The run of ``agent-rl sft``: supervised updates on rows, with the trainer, checkpoints and guard of a training run.

::

    SftData ─ batches of every epoch, from the seed ─▶ trainer.supervise ─▶ metrics, checkpoint, loss on held-out rows
                                                     └ sft.eval_every: export ─▶ engines ─▶ Pass@1

A step is one update. The batch of a step follows from rows, seed and config, so a killed run repeats the steps after
its last checkpoint with the same bits.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import orjson
from rich.table import Table

from agent_rl.config import EngineConfig, RunConfig, SandboxConfig, SftConfig
from agent_rl.controller.async_rollout.evaluations import Evaluations, due_evaluations
from agent_rl.controller.checkpoints import Checkpoints, Progress, TrainerRestarts
from agent_rl.controller.guard import Guard
from agent_rl.controller.placement import open_reservations
from agent_rl.controller.preflight import Checked, check_remote_services
from agent_rl.controller.rollout_runtime import open_rollout_runtime
from agent_rl.controller.run_state import RunState, keep_tokenizer
from agent_rl.controller.summary import evaluation_points
from agent_rl.controller.train import run_to_last_step
from agent_rl.engine.ray_servers import Reservation
from agent_rl.errors import ConfigError
from agent_rl.evaluation.quarantine import Quarantine
from agent_rl.evaluation.report import best_step
from agent_rl.monitoring.console import Display
from agent_rl.monitoring.metrics_log import MetricsLog
from agent_rl.monitoring.plots import draw_run
from agent_rl.monitoring.sinks import SinkRun, sink_factories
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.group import RolloutEvent
from agent_rl.train.checkpoint.directory import latest_checkpoint, read_manifest
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.train.reports import WeightedSequences
from agent_rl.types import Sample
from agent_rl.utils.directory_lock import lock_directory
from agent_rl.utils.run_files import write_atomic, write_json


@dataclass(frozen=True, eq=False)
class SftData:
    """The token sequences to train on and those held out, with their loss weights. ``left_out``: name, reason and
    detail of every row that is not used."""

    train: WeightedSequences
    heldout: WeightedSequences
    left_out: Sequence[Mapping[str, str]]

    @cached_property
    def digest(self) -> str:
        """Names the sequences and their split."""
        digest = hashlib.sha256()
        for part in (self.train, self.heldout):
            digest.update(f"{len(part)} ".encode())
            for tokens, weights in part:
                digest.update(f"{len(tokens)} ".encode() + tokens.tobytes() + weights.tobytes())
        return digest.hexdigest()[:16]

    def batches(self, sft: SftConfig, seed: int) -> list[list[int]]:
        """The sequences of every step. An epoch has all sequences, in an order of its own."""
        return [batch for epoch in self.epochs(sft, seed) for batch in epoch]

    def epochs(self, sft: SftConfig, seed: int) -> list[list[list[int]]]:
        """The batches of every epoch."""
        lengths = [len(tokens) for tokens, _ in self.train]
        orders = [np.random.default_rng([seed, epoch]).permutation(len(lengths)) for epoch in range(sft.epochs)]
        return [_epoch(order.tolist(), lengths, sft) for order in orders]

    def evaluated_steps(self, sft: SftConfig, seed: int) -> frozenset[int]:
        """The steps whose weights ``sft.eval_every`` evaluates: 0, the ends of its epochs and the last."""
        if not sft.eval_every:
            return frozenset()
        ends = np.cumsum([len(epoch) for epoch in self.epochs(sft, seed)]).tolist()
        return frozenset((0, *ends[sft.eval_every - 1 :: sft.eval_every], ends[-1]))


def _epoch(order: Sequence[int], lengths: Sequence[int], sft: SftConfig) -> list[list[int]]:
    batches, tokens = [list[int]()], 0
    for index in order:
        over = sft.batch_tokens is not None and tokens + lengths[index] > sft.batch_tokens
        if batches[-1] and (over or len(batches[-1]) == sft.batch_rows):
            batches.append([])
            tokens = 0
        batches[-1].append(index)
        tokens += lengths[index]
    return batches


async def train_sft(checked: Checked, data: SftData) -> None:
    """Train to the last step, from the last checkpoint if there is one; write and show the summary."""
    config, display = checked.config, Display(checked.config.name)
    cluster = checked.cluster
    if not config.evaluates_sft:
        cluster = replace(cluster, engine=EngineConfig(), sandbox=SandboxConfig())
    with lock_directory(config.run_dir), display:
        await check_remote_services(EngineConfig(), config.train.ray_address)
        async with open_reservations(cluster, ranks=True) as reservations:
            if reservations.note is not None:
                display.note(reservations.note)
            check_same_rows(config.run_dir, data.digest)
            state = RunState(config)
            if state.change is not None:
                display.note(f"config changed {state.change.text}")
            keep_tokenizer(config.model, state.dir)
            write_atomic(state.dir / "left_out.jsonl", b"".join(orjson.dumps(row) + b"\n" for row in data.left_out))
            display.stage("starting the trainer")
            trainer = RayTrainer(
                config, checked.model_spec, placement_group=reservations.ranks, note=display.note
            )  # fmt: skip
            async with trainer:
                evaluator = SftEvaluator(checked, state, display, trainer, reservations.engines)
                begin = partial(SftRun, config, state, display, trainer, data, evaluator)
                summary = await run_to_last_step(begin, TrainerRestarts(config.train.restarts))
    display.note(f"{state.dir}/summary.json   {state.dir}/run.png")
    display.table(_table(summary))
    step = summary.get("best_step") or summary["steps"]
    display.next("eval", state.dir / "config.yaml", f"model={state.dir}@{step}")


def check_same_rows(run: Path, digest: str) -> None:
    """Raises ConfigError where the run's checkpoint is of other rows."""
    latest = latest_checkpoint(run / "checkpoints")
    if latest is not None and read_manifest(latest).run["weights"] != digest:
        raise ConfigError(
            f"sft.data: its rows are not those that {run} was started with: restore them, or choose another name"
        )


@dataclass(frozen=True)
class SftEvaluator:
    """Measures the Pass@1 of the trainer's weights, with engines that start for it and end after it. ``reservations``:
    of engines on Ray."""

    checked: Checked
    state: RunState
    display: Display
    trainer: RayTrainer
    reservations: Sequence[Reservation]

    async def evaluate(self, step: int) -> None:
        """Evaluate the weights of ``step`` as the section ``eval`` says, unless that is recorded."""
        config, display = self.checked.config, self.display
        settings = {name: each.model_copy(update={"every": 1}) for name, each in config.evaluations.items()}
        if not due_evaluations(settings, self.state.evaluations, step, config.train.steps):
            return
        display.stage(f"step {step}: weights for an evaluation")
        weights = self.state.dir / "weights" / f"step-{step:06d}"
        await asyncio.to_thread(shutil.rmtree, weights, ignore_errors=True)
        try:
            await self.trainer.export(weights)
            checked = replace(
                self.checked,
                config=config.model_copy(update={"model": weights}),
                model_spec=replace(self.checked.model_spec, quantized=False),
            )
            opening = open_rollout_runtime(
                checked,
                self.state.dir / "logs",
                display,
                routes=False,
                reservations=self.reservations,
                split=config.eval.split,
            )
            async with opening as runtime:
                await runtime.task_runtime.env.prepare(config.eval.split)
                evaluations = Evaluations(
                    settings,
                    EpisodeRules.from_config(config),
                    self.state,
                    display,
                    runtime,
                    None,
                    Quarantine(self.state.dir / "quarantine.json"),
                    self._on_event,
                    steps=config.train.steps,
                    concurrent=False,
                )
                try:
                    await evaluations.begin(step)
                finally:
                    await evaluations.close()
        finally:
            await asyncio.to_thread(shutil.rmtree, weights, ignore_errors=True)

    def _on_event(self, event: RolloutEvent) -> None:
        if event.trajectory is not None and not event.trajectory.stop.infrastructure:
            self.display.advance()


class SftRun:
    """A supervised run from its last checkpoint to its last step."""

    def __init__(
        self,
        config: RunConfig,
        state: RunState,
        display: Display,
        trainer: RayTrainer,
        data: SftData,
        evaluator: SftEvaluator,
    ) -> None:
        assert config.sft is not None
        self.config, self.sft, self.state, self.display = config, config.sft, state, display
        self.trainer, self.data, self.evaluator = trainer, data, evaluator
        self.metrics = MetricsLog(state.dir, sink_factories(SinkRun(state.dir, state.run_id, config)), display.note)
        self.guard = Guard(config.guard, state.dir, display.note)
        self.checkpoints = Checkpoints(config.train, state, trainer)
        self.progress = Progress(state.run_id)

    async def run(self) -> dict[str, object]:
        """Run all remaining steps. Returns the summary."""
        await self._resume()
        batches, done = self.data.batches(self.sft, self.config.seed), self.progress.step
        self.display.start_steps(done, len(batches))
        for row in self.metrics.rows:
            self.display.step(int(row["step"]), row)
        evaluated = self.data.evaluated_steps(self.sft, self.config.seed)
        if done in evaluated:
            await self.evaluator.evaluate(done)
        for step in range(done + 1, len(batches) + 1):
            await self._step(step, batches[step - 1], last=step == len(batches))
            self.checkpoints.check()
            if step in evaluated or self.checkpoints.due(step) or self.guard.stopping:
                best = best_step(self.state.evaluations)
                await self.checkpoints.save(
                    self.progress, good=self.guard.good_step, best=None if best is None else best.step
                )
            if self.guard.stopping:
                await self.checkpoints.finish()
            self.guard.enforce(self.state.checkpoint(step), self.checkpoints.newest)
            if step in evaluated:
                await self.evaluator.evaluate(step)
        await self.checkpoints.finish()
        await self.trainer.export(self.state.dir / "model")
        return await asyncio.to_thread(self._summarize)

    async def restart_trainer(self) -> None:
        """Start the trainer again after a rank died."""
        await self.trainer.restart()

    async def close(self) -> None:
        """Close the files and cancel an unfinished checkpoint. Idempotent."""
        await asyncio.to_thread(self.metrics.close)
        await self.checkpoints.close()

    async def _resume(self) -> None:
        self.progress, manifest = await self.checkpoints.resume()
        step = self.progress.step
        if manifest is not None:
            self.display.note(f"resuming from {self.state.checkpoint(step)}")
        self.progress = replace(self.progress, weights=self.data.digest)
        self.metrics.forget_after(step)
        self.state.forget_after(step)
        self.guard.resume(step)

    async def _step(self, step: int, batch: Sequence[int], *, last: bool) -> None:
        started = time.perf_counter()
        spike = self.guard.spike_norm(self.metrics.rows)
        values = await self.trainer.supervise([self.data.train[index] for index in batch], spike_norm=spike)
        values["time/step"] = time.perf_counter() - started
        self.progress = replace(self.progress, step=step, position=self.progress.position + len(batch))
        values["sft/epoch"] = self.progress.position / len(self.data.train)
        values["goodput/tokens_per_second"] = values["train/sampled_tokens"] / values["time/step"]
        every = self.sft.validation_every
        if self.data.heldout and (last or (every and step % every == 0)):
            values |= await self._validate()
        values |= self.guard.judge(step, values, self.metrics.rows)
        await asyncio.to_thread(self.metrics.append, step, values)
        self.display.step(step, values)

    async def _validate(self) -> dict[str, float]:
        """The loss on the held-out rows."""
        started, heldout = time.perf_counter(), self.data.heldout
        samples = [
            Sample(tokens, weights != 0, np.zeros(len(tokens), np.float32), 0.0, None) for tokens, weights in heldout
        ]
        logprobs = await self.trainer.logprobs(samples, replay=False)
        pairs = [(np.array(values[1:]), weights[1:]) for values, (_, weights) in zip(logprobs, heldout, strict=True)]
        total = sum(float(np.sum(weights, dtype=np.float64)) for _, weights in pairs)
        loss = -sum(float(values @ weights) for values, weights in pairs) / total
        return {
            "sft/validation_loss": loss,
            "sft/validation_perplexity": math.exp(min(loss, 700.0)),  # the largest float is exp(709)
            "time/validation": time.perf_counter() - started,
        }

    def _summarize(self) -> dict[str, object]:
        """Write ``summary.json`` and ``run.png``; returns the summary."""
        rows, evaluations, directory = self.metrics.rows, self.state.evaluations, self.state.dir
        best = best_step(evaluations)
        seconds = sum(report["seconds"] for report in evaluations.values())
        summary = {
            "name": directory.name,
            "steps": len(rows),
            "seconds": seconds + sum(row["time/step"] + row.get("time/validation", 0.0) for row in rows),
            "sequences": len(self.data.train),
            "heldout_sequences": len(self.data.heldout),
            "left_out_rows": len(self.data.left_out),
            "loss_first": rows[0].get("sft/loss"),
            "loss_last": rows[-1].get("sft/loss"),
            "validation_loss": rows[-1].get("sft/validation_loss"),
            **({} if best is None else {"best_step": best.step, "best_pass_at_1": best.pass_at_1}),
        }
        write_json(directory / "summary.json", summary)
        draw_run(rows, directory / "run.png", title=directory.name, evaluations=evaluation_points(evaluations))
        return summary


def _table(summary: Mapping[str, object]) -> Table:
    table = Table(title=str(summary["name"]), show_header=False)
    for name, value in summary.items():
        if name != "name":
            table.add_row(name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
    return table
