"""A training run whose episodes are recordings: controller, journal, checkpoints, Ray and Megatron are the real ones.

SGLang on a CPU cannot repeat its samples: a request's ``sampling_seed`` counts only with
``--enable-deterministic-inference``, which refuses the ``torch_native`` attention that a CPU needs. So whether a killed
run goes on exactly is shown with episodes that are a function of their task: an episode takes a random time, and which
of a group's recordings it gives is settled when it ends. Everything else that happens in a step is as always.

    python recorded_run.py DIR [section.key=value ...]
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.journal_rows import read_journal

from agent_rl.config import RunConfig
from agent_rl.config.loader import load_config
from agent_rl.controller.checkpoints import TrainerRestarts
from agent_rl.controller.rollout_runtime import TaskRuntime
from agent_rl.controller.run_state import RunState
from agent_rl.controller.teacher import Teacher
from agent_rl.controller.train import TrainingRun, run_to_last_step
from agent_rl.engine.fleet import Fleet
from agent_rl.engine.generation_gate import GenerationGate
from agent_rl.engine.sleep import EngineSleep
from agent_rl.engine.types import Scores
from agent_rl.engine.utilization import EngineUtilization
from agent_rl.models.spec import read_model_spec
from agent_rl.monitoring.console import Display
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.episode_recovery import LoggedRunner, TurnLog
from agent_rl.rollout.group import Limiter
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.types import StopReason, TokenIds, TopTokens, Trajectory, Turn, VersionSpan
from agent_rl.utils.http import AsyncHttp
from envs import Task
from r3.kept_tokens import KeptTokens
from r3.routing import Routing, Span, SpanKind

EPISODE_SECONDS = 0.12
GIVEN = "episodes.jsonl"
BEGUN = "begun"


def recordings(task: Task, count: int, facts: Any) -> list[Trajectory]:
    """The ``count`` episodes of a task; what they are depends on nothing but its name."""
    generator = np.random.default_rng(zlib.crc32(task.id.encode()))
    return [_recording(task, generator, facts) for _ in range(count)]


def _recording(task: Task, generator: np.random.Generator, facts: Any) -> Trajectory:
    length = int(generator.integers(20, 60))
    ends = (length // 3, 2 * length // 3, length)  # a turn, an observation of three tokens, and a turn
    mask = np.arange(length) >= ends[0]
    mask[ends[1] - 3 : ends[1]] = False
    logprobs: NDArray[np.float32] = np.where(mask, -generator.random(length) * 4, 0).astype(np.float32)
    tokens = generator.integers(0, facts.vocab_size, length).astype(np.int32)
    # Every third token is drawn from the whole vocabulary.
    rows = [[int(token), *range(int(token) % 6)] if token % 3 else [] for token in tokens[mask]]
    turns = tuple(
        Turn("", "bash", {}, None, "", start, stop - start, seen, 0, "0", 0.1, 0.1)
        for start, stop, seen in ((ends[0], ends[1] - 3, 3), (ends[1], ends[2], 0))
    )
    return Trajectory(
        task.id, task.env, tokens, mask, logprobs,
        _routes(length, generator, facts), StopReason.SUBMITTED, float(generator.random() < 0.5),
        resolved=False, turns=turns, messages=(), versions=(), kept=KeptTokens.from_rows(rows),
        turn_rewards=tuple(generator.random(2).tolist()),
    )  # fmt: skip


def _routes(length: int, generator: np.random.Generator, facts: Any) -> Routing:
    layout = facts.layout
    shape = (length, len(layout.moe_layer_ids), layout.num_experts)
    experts = generator.random(shape).argsort(axis=-1)[..., : layout.top_k].astype(np.uint8)
    experts[-1] = 0
    spans = (Span(0, length - 1, "0", "rec", SpanKind.SAMPLED), Span(length - 1, length, "0", "rec", SpanKind.MISSING))
    return Routing(experts, np.arange(length) < length - 1, spans, layout.num_experts)


class RecordedScores:
    """A teacher's engine, whose scores are a function of the tokens."""

    async def rescore(self, tokens: TokenIds, *, session: str, top: int = 0) -> Scores:
        ids = np.array([[(token + number) % 64 for number in range(top)] for token in tokens[1:]], np.int32)
        likely = TopTokens(ids, np.log((1 + ids % 5) / (6 * max(1, top))).astype(np.float32)) if top else None
        return Scores(tuple(-(token % 7) / 2 for token in tokens), "teacher", top=likely)


@dataclass
class NoEngine:
    """There is none to send weights to; what is given afterwards says that it is of them."""

    runtime: RecordedRuntime

    async def publish(self, step: int) -> dict[str, float]:
        self.runtime.version = str(step)
        return {}


@dataclass
class RecordedRuntime:
    """What of a :class:`agent_rl.controller.rollout_runtime.RolloutRuntime` a run asks for, without an engine and
    without sandboxes."""

    config: RunConfig
    tasks: Sequence[Task]
    version: str = ""

    def __post_init__(self) -> None:
        self.limiter = Limiter(self.config.rollout.concurrency)
        self.model_spec = read_model_spec(self.config.model)
        fleet, gate = Fleet(), GenerationGate()
        fleet.add("starting")  # one that never comes up
        sleep = EngineSleep(fleet, gate, {}, self.config.engine, AsyncHttp(1.0))
        load, spec = EngineUtilization(), self.model_spec
        self.engine = SimpleNamespace(model_spec=spec, fleet=fleet, gate=gate, load=load, sleep=sleep)
        env = SimpleNamespace(prepare=_nothing, tasks=lambda split: self.tasks)
        self.task_runtime = TaskRuntime(SimpleNamespace(name="none"), env)

    def metrics(self) -> dict[str, float]:
        return {}

    def runner(self, rules: EpisodeRules) -> LoggedRunner:
        """Gives the recordings that no journal holds yet."""
        journals = (self.config.run_dir / "journal").glob("step-*")
        held = {trajectory.tokens.tobytes() for journal in journals for trajectory in read_journal(journal)}
        return _Recorded(self, held).run


@dataclass
class _Recorded:
    runtime: RecordedRuntime
    held: set[bytes]
    waiting: dict[str, list[Trajectory]] = field(default_factory=lambda: defaultdict(list))

    async def run(self, task: Task, log: TurnLog | None = None) -> Trajectory:
        if task.id not in self.waiting:
            every = recordings(task, self.runtime.config.rollout.group_size, self.runtime.model_spec)
            self.waiting[task.id] = [t for t in every if t.tokens.tobytes() not in self.held]
        await asyncio.sleep(random.uniform(0, 2 * EPISODE_SECONDS))
        trajectory = self.waiting[task.id].pop(0)
        versions = (VersionSpan(0, len(trajectory.tokens), self.runtime.version),)
        with (self.runtime.config.run_dir / GIVEN).open("a") as file:
            file.write(json.dumps([task.id, zlib.crc32(trajectory.tokens.tobytes())]) + "\n")
        return replace(trajectory, versions=versions)


async def _nothing(*splits: str) -> None:
    """Nothing is to be made ready."""


async def main(directory: Path, overrides: Sequence[str]) -> None:
    config = load_config(directory / "config.yaml", overrides)
    state = RunState(config)
    tasks = [Task(f"task-{number:03d}", "recorded", {}) for number in range(256)]
    with Display(config.name) as display:
        async with RayTrainer(config) as trainer:
            runtime: Any = RecordedRuntime(config, tasks)
            scores: Any = RecordedScores()
            distill = config.train.distill
            teacher = None if distill is None else Teacher(scores, concurrency=2, top_k=distill.top_k)

            def begin() -> TrainingRun:
                run = TrainingRun(config, state, display, runtime, trainer, teacher)
                run.sync = NoEngine(runtime)  # type: ignore[assignment]
                return run

            (state.dir / BEGUN).write_text(str(time.time()))
            await run_to_last_step(begin, TrainerRestarts(config.train.restarts))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2:]))
