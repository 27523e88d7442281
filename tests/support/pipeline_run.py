"""A training run without processes: pump, buffer, journal, checkpoints, ledger and the steps are the real ones.

The engine gives episodes of two turns that depend on their task and their number alone, each turn after a random
number of turns of the event loop; the trainer's weights are a hash of all that it was trained on, and so are its
losses: two runs that differ in one bit of one sample differ in all metrics after it. A life of a run ends at its last
step, or where ``die`` says.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from agent_rl.config import ParallelConfig, RunConfig
from agent_rl.controller.journal import EpisodeLog
from agent_rl.controller.rollout_runtime import TaskRuntime
from agent_rl.controller.run_state import RunState
from agent_rl.controller.train import TrainingRun
from agent_rl.engine.fleet import Fleet
from agent_rl.engine.generation_gate import GenerationGate
from agent_rl.engine.sleep import EngineSleep
from agent_rl.engine.utilization import EngineUtilization
from agent_rl.monitoring.console import Display
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.episode_recovery import LoggedRunner, LoggedTurn, TurnLog
from agent_rl.rollout.group import Limiter
from agent_rl.train.checkpoint import directory as checkpoint
from agent_rl.train.checkpoint.directory import Manifest
from agent_rl.types import Completion, FinishReason, Sample, StopReason, Trajectory, Turn, VersionSpan
from agent_rl.utils.http import AsyncHttp
from envs import Task
from support.journal_rows import read_journal
from support.trajectories import trajectory

TASKS = [Task(f"task-{index:02d}", "memory", {}) for index in range(40)]
HELD_OUT = [Task(f"held-out-{index}", "memory", {}) for index in range(4)]
POINTS = ("taken", "trained", "published", "begun", "episode")
TURN_POINTS = (*POINTS, "turn", "turn", "turn")


class Died(BaseException):
    """The process was killed: nothing of it runs on."""


@dataclass
class Deaths:
    """Where a life ends: at the ``nth`` time that ``point`` is passed, by ``die``; never without."""

    point: str = ""
    nth: int = 0
    die: Callable[[], object] = lambda: _raise(Died())

    def passed(self, point: str) -> None:
        self.nth -= point == self.point
        if point == self.point and self.nth <= 0:
            self.die()


def _raise(error: BaseException) -> None:
    raise error


class HashTrainer:
    """Weights and metrics are hashes of what was trained on. Checkpoints are real directories that hold the weights."""

    def __init__(self, deaths: Deaths) -> None:
        self.weights, self.deaths, self.lags = "start", deaths, list[int]()

    async def step(self, samples: Sequence[Sample], **how: Any) -> Mapping[str, float]:
        digest = hashlib.sha256(self.weights.encode())
        for sample in samples:
            digest.update(sample.tokens.tobytes() + sample.logprobs.tobytes() + np.float64(sample.advantage).tobytes())
            self.lags.append(int(sample.lag.max()))
        self.weights = digest.hexdigest()
        for _ in range(random.randrange(8)):
            await asyncio.sleep(0)
        self.deaths.passed("trained")
        return {"train/updates": 1.0, "train/loss": int(self.weights[:8], 16) / 2**32}

    async def begin_save(self, directory: Path, run: Mapping[str, object]) -> asyncio.Task[None]:
        return asyncio.create_task(self._save(directory, {**run, "hash": self.weights}))

    async def _save(self, directory: Path, run: Mapping[str, object]) -> None:
        checkpoint.begin(directory)
        await asyncio.sleep(0)
        self.deaths.passed("checkpoint")
        layout = ParallelConfig().model_dump()
        checkpoint.commit(directory, Manifest(checkpoint.FORMAT, 0, {}, layout, "float32", (), run))

    async def load(self, directory: Path) -> Manifest:
        manifest = checkpoint.read_manifest(directory)
        run = dict(manifest.run)
        self.weights = str(run.pop("hash"))
        return Manifest(checkpoint.FORMAT, 0, {}, manifest.parallel, "float32", (), run)

    async def export(self, directory: Path) -> None:
        """Nobody reads it."""


@dataclass
class MemoryRuntime:
    """Episodes of tasks whose groups end as their name says. ``given`` has every episode that ended, in all lives,
    ``sampled`` every turn. Those ``held`` end when their event comes; ``alike``: each task's that are in flight."""

    config: RunConfig
    given: list[tuple[str, int]]
    deaths: Deaths
    sampled: list[tuple[str, int, int]]
    tasks: Sequence[Task]
    version: str = ""
    running: int = 0
    alike: Counter[str] = field(default_factory=Counter)
    left: dict[str, list[int]] = field(default_factory=dict)
    held: dict[tuple[str, int], asyncio.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.limiter = Limiter(self.config.rollout.concurrency)
        self.engine = SimpleNamespace(fleet=Fleet(), gate=GenerationGate(), load=EngineUtilization())
        self.engine.fleet.add("starting")  # one that never comes up
        self.engine.sleep = EngineSleep(Fleet(), GenerationGate(), {}, self.config.engine, AsyncHttp(1.0))
        self.engine.model_spec = SimpleNamespace(vocab_size=8, quantized=False)
        tasks = {"train": self.tasks, "heldout": HELD_OUT}
        env = SimpleNamespace(prepare=_nothing, tasks=tasks.__getitem__)
        self.task_runtime = TaskRuntime(SimpleNamespace(name="none"), env)

    def metrics(self) -> dict[str, float]:
        return {}

    def runner(self, rules: EpisodeRules) -> LoggedRunner:
        """Gives the episodes that no journal holds yet, those of which it holds turns last."""
        size, journals = self.config.rollout.group_size, (self.config.run_dir / "journal").glob("step-*")
        numbers = range(size * (len(TASKS) // len(self.tasks)))  # of few tasks, those of all epochs
        held = {trajectory.tokens.tobytes() for journal in journals for trajectory in read_journal(journal)}
        self.left = {
            task.id: [number for number in numbers if _tokens(task, number).tobytes() not in held] for task in TASKS
        }
        begun = {(task, number) for task, number, _ in self.sampled}
        for name, left in self.left.items():
            left.sort(key=lambda number: (name, number) in begun)
        return self.run

    async def run(self, task: Task, log: TurnLog | None = None) -> Trajectory:
        self.running += 1
        self.alike[task.id] += 1
        try:
            return await (self.evaluated(task) if task in HELD_OUT else self._run(task, log))
        finally:
            self.running -= 1
            self.alike[task.id] -= 1

    async def evaluated(self, task: Task) -> Trajectory:
        """An episode of an evaluation."""
        first = self.version
        for _ in range(random.randrange(12)):
            await asyncio.sleep(0)
        self.deaths.passed("evaluation")
        return _episode(task, 0, 1.0, first, self.version)

    async def _run(self, task: Task, log: TurnLog | None) -> Trajectory:
        number = self._taken(task, log)  # before any await: another that begins afresh could take it
        turns = [] if log is None else list(await log.kept())
        replayed = len(turns)
        for turn in range(len(turns), 2):
            for _ in range(random.randrange(6)):
                await asyncio.sleep(0)
            self.sampled.append((task.id, number, turn))
            turns.append(_turn(number, self.version))
            if log is not None:
                await log.keep(turns[-1])
                self.deaths.passed("turn")
        if (task.id, number) in self.held:
            await self.held[task.id, number].wait()
        self.given.append((task.id, number))
        self.deaths.passed("episode")
        first, last = (turn.completions[0].weight_version for turn in turns)
        return replace(_episode(task, number, _reward(task, number), first, last), replayed_turns=replayed)

    def _taken(self, task: Task, log: TurnLog | None) -> int:
        """The number of an episode that goes on, or the next that is left."""
        held = log._journal._read_turns(log.episode.turns) if isinstance(log, EpisodeLog) else ()
        left = self.left[task.id]
        return left.pop(left.index(int(held[0].prompt_hash)) if held else 0)


def _turn(number: int, version: str) -> LoggedTurn:
    completion = Completion((1, 2), (-0.5, -0.5), FinishReason.STOP, version, "memory")
    return LoggedTurn(str(number), (completion,), Turn("", None, {}, None, "", 3, 2, 0, 0, version, 0.0, 0.0), 1.0)


def _reward(task: Task, number: int) -> float:
    """Of every third task no episode solves it: its group teaches nothing."""
    return float(number % 2 and TASKS.index(task) % 3)


def _tokens(task: Task, number: int) -> NDArray[np.int32]:
    return np.arange(7, dtype=np.int32) + np.int32(number + 100 * (*TASKS, *HELD_OUT).index(task))


def _episode(task: Task, number: int, reward: float, first: str, last: str) -> Trajectory:
    made = trajectory(reward, sampled=4, task_id=task.id)
    spans = (VersionSpan(3, 5, first), VersionSpan(5, 7, last)) if first != last else (VersionSpan(3, 7, first),)
    return Trajectory(
        task.id, task.env, _tokens(task, number), made.loss_mask, made.logprobs, None, StopReason.SUBMITTED, reward,
        resolved=bool(reward), turns=(), messages=({"role": "assistant", "content": str(number)},), versions=spans,
    )  # fmt: skip


async def _nothing(*splits: str) -> None:
    """Nothing is to be made ready."""


def run_config(
    runs: Path, *, depth: int, staleness: int | None = None, steps: int = 8, evaluate_every: int = 0, **rollout: Any
) -> RunConfig:
    """A run of small steps; one that evaluates does so before and after as well."""
    evaluation = {"tasks": len(HELD_OUT) if evaluate_every else 0, "every": evaluate_every, "greedy": False}
    return RunConfig.model_validate(
        {
            "name": "run", "runs_dir": runs, "model": "m", "eval": evaluation, "guard": {"action": "off"},
            "async_rollout": {"depth": depth, "max_staleness": staleness}, "monitoring": {"token_detail": False},
            "rollout": {"group_size": 3, "tasks_per_step": 2, "concurrency": 5, **rollout},
            "train": {
                "steps": steps, "checkpoint_every": 3, "replay": "off", "old_logprob": {"source": "rollout"},
                "measure_without_replay_every": 0,
            },
        }
    )  # fmt: skip


class Life:
    """One start of a run: its parts, to be looked at and changed before :meth:`live`."""

    def __init__(
        self,
        config: RunConfig,
        given: list[tuple[str, int]],
        deaths: Deaths | None = None,
        sampled: list[tuple[str, int, int]] | None = None,
        tasks: Sequence[Task] = TASKS,
    ) -> None:
        self.deaths = deaths or Deaths()
        self.trainer = HashTrainer(self.deaths)
        self.runtime: Any = MemoryRuntime(config, given, self.deaths, [] if sampled is None else sampled, tasks)
        self.notes = Console(quiet=True)
        display = Display(config.name, self.notes)
        self.run = TrainingRun(config, RunState(config), display, self.runtime, self.trainer)  # type: ignore[arg-type]
        self.run.sync = self  # type: ignore[assignment]
        self._wrap()

    async def publish(self, step: int) -> dict[str, float]:
        """As a weight sync."""
        await asyncio.sleep(0)
        self.runtime.version = str(step)
        self.deaths.passed("published")
        return {}

    def _wrap(self) -> None:
        journal, begin, record = self.run.journal, self.run.journal.begin, self.run.journal.record_batch

        def recording(step: int, positions: Sequence[int]) -> None:
            record(step, positions)
            self.deaths.passed("taken")

        async def beginning(step: int, weights: str) -> int:
            count = await begin(step, weights)
            self.deaths.passed("begun")
            return count

        journal.record_batch, journal.begin = recording, beginning  # type: ignore[method-assign]

    async def live(self) -> bool:
        """Whether it came to its last step."""
        try:
            await self.run.run()
        except (Died, BaseExceptionGroup):
            return False
        finally:
            await self.run.close()
            assert self.runtime.running == 0, "an episode outlived the run"
        return True
