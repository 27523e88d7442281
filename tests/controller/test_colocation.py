"""A run whose engines share the trainer's GPUs: they sleep from the end of a rollout to the publish, and never else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.pipeline_run import Deaths, Life, run_config

from agent_rl.controller import train
from agent_rl.controller.checkpoints import TrainerRestarts
from agent_rl.controller.cluster_resources import ClusterRequest
from agent_rl.controller.placement import Reservations
from agent_rl.controller.preflight import Checked
from agent_rl.controller.run_state import RunState
from agent_rl.controller.train import TrainingRun, run_to_last_step
from agent_rl.engine.sleep import EngineSleep
from agent_rl.errors import TrainerDied
from agent_rl.monitoring.console import Display
from agent_rl.types import Sample, Trajectory
from envs import Task

STEP = ["sleep", "train", "weights", "publish", "awake"]


class Watched(EngineSleep):
    """Writes the ``events`` of engines that sleep and wake as requested."""

    events: list[str]

    async def begin(self) -> None:
        if self.is_awake:
            self._awake.clear()
            self.events.append("sleep")

    async def resume_weights(self) -> None:
        if not self.is_awake:
            self.events.append("weights")

    async def end(self) -> None:
        if not self.is_awake:
            self._awake.set()
            self.events.append("awake")


def watch(life: Life, sleep: Watched) -> None:
    """Let ``life`` write its steps to the events of ``sleep``. No episode runs while the engines sleep."""
    events, step, publish, run = sleep.events, life.trainer.step, life.publish, life.runtime.run
    life.runtime.engine.sleep = sleep

    async def stepping(samples: Sequence[Sample], **how: Any) -> Mapping[str, float]:
        events.append("train")
        assert not life.runtime.running, "an episode goes on"
        return await step(samples, **how)

    async def publishing(number: int) -> dict[str, float]:
        events.append("publish")
        return await publish(number)

    async def running(task: Task, *log: Any) -> Trajectory:
        assert sleep.is_awake, "an episode of engines that sleep"
        return await run(task, *log)

    life.trainer.step, life.publish, life.runtime.run = stepping, publishing, running


@pytest.mark.parametrize("evaluate_every", [0, 2])
async def test_engines_sleep_while_the_trainer_works(tmp_path: Path, evaluate_every: int) -> None:
    life = Life(run_config(tmp_path, depth=0, steps=3, evaluate_every=evaluate_every), [])
    sleep = sleep_of(life)
    watch(life, sleep)
    assert await life.live()
    assert sleep.events == ["publish", *STEP * 3]


@pytest.mark.parametrize(
    ("point", "events"),
    [
        ("trained", ["publish", *STEP, "sleep", "train", *STEP[2:]]),
        ("published", ["publish", *STEP, *STEP[:4], *STEP[2:]]),
    ],
)
async def test_after_a_trainer_death_the_first_publish_wakes_engines(tmp_path: Path, point: str, events: Any) -> None:
    """The run starts again from its first checkpoint, which is of no step."""
    config, lives = run_config(tmp_path, depth=0, steps=2), list[Life]()

    def die() -> None:
        raise TrainerDied("rank 0 died")

    def begin() -> TrainingRun:
        nth = 2 if point == "trained" else 3
        lives.append(Life(config, [], Deaths() if lives else Deaths(point, nth, die)))
        life, first = lives[-1], lives[0]
        sleep = sleep_of(life) if life is first else first.runtime.engine.sleep
        watch(life, sleep)
        life.trainer.restart = _nothing
        return life.run

    await run_to_last_step(begin, TrainerRestarts(3))
    assert lives[0].runtime.engine.sleep.events == [*events, *STEP * 2]


async def _nothing() -> None:
    """The ranks are back."""


def sleep_of(life: Life) -> Watched:
    engine = life.runtime.engine
    sleep = Watched(engine.fleet, engine.gate, {}, life.run.config.engine, None)
    sleep.events = []
    return sleep


@pytest.mark.parametrize("colocate", [True, False])
async def test_engines_sleep_before_the_trainer_starts(tmp_path: Path, monkeypatch: Any, colocate: bool) -> None:
    """They start on GPUs that are all free, and the trainer needs most memory at its start."""
    config = run_config(tmp_path, depth=0)
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"colocate": colocate})})
    life = Life(config, [])
    sleep = sleep_of(life)
    life.runtime.engine.sleep = sleep

    @asynccontextmanager
    async def opened(*_: Any, **__: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(0)
        sleep.events.append("engines")
        yield life.runtime

    async def starting() -> None:
        sleep.events.append("trainer")

    trainer = SimpleNamespace(start=starting, close=_nothing)
    monkeypatch.setattr(train, "open_rollout_runtime", opened)
    monkeypatch.setattr(train, "RayTrainer", lambda *_, **__: trainer)
    display = Display("run", life.notes)
    checked = Checked(config, life.runtime.engine.model_spec, ClusterRequest.of(config))
    async with train._open_parts(checked, RunState(config), display, Reservations()):
        assert sleep.events == (["engines", "sleep", "trainer"] if colocate else ["trainer", "engines"])
