"""What sampling beside training gains: the real pump, buffer and gate, with modelled episodes and a modelled trainer.

``python benchmarks/bench_async.py`` runs, on a clock that jumps from event to event, steps of 64
groups of 8 episodes with places for half of them. An episode's time is lognormal (sigma 0.58), cut at four means; a
step trains for a third of, or as long as, its episodes would take if no place were ever empty (the *ideal* rollout),
and publishes for 3 % of an ideal step. It prints one JSON object, a row for each depth S and staleness K and each of
the two trainers:

- ``gain``: the wall time of synchronous steps over its own;
- ``over_ideal``: its wall time over that of max(ideal rollout, training) and publishing;
- ``trainer_idle``: the share of its wall time in which the trainer waited for a batch;
- ``lag_max``, ``lag_mean``: of the first version of the episodes trained on;
- ``goodput``: episodes trained on over those sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import checkout  # noqa: F401
import numpy as np
from support.trajectories import trajectory

from agent_rl.controller.async_rollout.buffer import BufferRules, RolloutBuffer
from agent_rl.controller.async_rollout.producer import RolloutProducer
from agent_rl.controller.async_rollout.task_ledger import TaskLedger
from agent_rl.engine.generation_gate import GenerationGate
from agent_rl.rollout.episode_recovery import TurnLog
from agent_rl.rollout.group import EpisodeRunner, GroupSettings, Limiter
from agent_rl.types import Group, Trajectory, VersionSpan
from envs import Task

GROUPS, SIZE, SLOTS = 64, 8, 256
SIGMA, CUT, PUBLISH = 0.58, 4.0, 0.03
STEPS, WARM = 30, 5
IDEAL = GROUPS * SIZE / SLOTS
"""Seconds of a rollout without an empty place; the mean episode takes one."""
SHAPES = ((0, 0), (1, 1), (1, 3), (2, 2), (2, 3), (3, 3))
TASKS = [Task(f"task-{index}", "bench", {}) for index in range(4096)]


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next event when nothing else is to be done."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """At once: the clock must not jump while a thread works."""
        done: asyncio.Future[Any] = self.create_future()
        done.set_result(func(*args))
        return done

    def _run_once(self) -> None:
        loop: Any = self
        if not loop._ready and loop._scheduled:
            self.now = max(self.now, loop._scheduled[0]._when)
        loop.__class__.__base__._run_once(self)


class NoJournal:
    """Nothing is killed here."""

    async def settled(self, position: int) -> None:
        return

    def __init__(self) -> None:
        self.given: dict[int, list[Trajectory]] = {}

    def runner(self, position: int, run: EpisodeRunner, oldest: int) -> EpisodeRunner:
        async def kept(task: Task) -> Trajectory:
            trajectory = await run(task)
            self.given.setdefault(position, []).append(trajectory)
            return trajectory

        return kept

    def finished(self, position: int) -> list[Trajectory]:
        return self.given.pop(position)


def durations(seed: int) -> Iterator[float]:
    """Seconds of episodes, of mean 1."""
    generator = np.random.default_rng(seed)
    drawn = np.minimum(generator.lognormal(0, SIGMA, 1 << 16), CUT * np.exp(SIGMA**2 / 2))
    while True:
        yield from (drawn / drawn.mean()).tolist()


@dataclass
class Episodes:
    """Runs episodes that a closed gate interrupts."""

    gate: GenerationGate
    seconds: Iterator[float]
    version: int = 0
    ended: int = 0
    made: Trajectory = field(default_factory=lambda: trajectory(1.0))

    async def __call__(self, task: Task, log: TurnLog | None = None) -> Trajectory:
        loop, left, first = asyncio.get_running_loop(), next(self.seconds), None
        while left > 0:
            await self.gate.wait_open()
            first = self.version if first is None else first
            began, cut = loop.time(), asyncio.Event()
            with self.gate.in_flight(_setter(cut)):
                try:
                    async with asyncio.timeout(left):
                        await cut.wait()
                except TimeoutError:
                    break
            left -= loop.time() - began
        self.ended += 1
        return replace(self.made, task_id=task.id, versions=(VersionSpan(3, 5, str(first)),))


def _setter(cut: asyncio.Event) -> Any:
    async def abort() -> None:
        cut.set()

    return abort


async def run(depth: int, staleness: int, train_seconds: float, seed: int = 0) -> dict[str, float]:
    """Seconds a step, the trainer's share of idle time, and the ages of what it trained on."""
    loop, publish = asyncio.get_running_loop(), PUBLISH * max(IDEAL, train_seconds)
    buffer = RolloutBuffer(BufferRules(GROUPS, depth, staleness, 4 * GROUPS, STEPS), TaskLedger())
    episodes = Episodes(GenerationGate(), durations(seed))
    journal: Any = NoJournal()
    pump = RolloutProducer(GroupSettings(SIZE), TASKS, buffer, journal, episodes, seed=0, limiter=Limiter(SLOTS))
    idle, ends, lags = list[float](), list[float](), list[int]()
    async with pump.running():
        for step in range(1, STEPS + 1):
            began = loop.time()
            groups = await pump.hand_over(await buffer.take())
            idle.append(loop.time() - began)
            lags += _lags(list(groups.values()), step - 1)
            await asyncio.sleep(train_seconds)
            async with episodes.gate.closed():
                await asyncio.sleep(publish)
                episodes.version = step
            buffer.release()
            ends.append(loop.time())
    return {
        "seconds": (ends[-1 - depth] - ends[WARM]) / (STEPS - 1 - depth - WARM),
        "trainer_idle": sum(idle[WARM + 1 : STEPS - depth]) / (ends[-1 - depth] - ends[WARM]),
        "lag_mean": statistics.fmean(lags),
        "lag_max": max(lags),
        "goodput": STEPS * GROUPS * SIZE / episodes.ended,
        "ideal_seconds": max(IDEAL, train_seconds) + publish,
    }


def _lags(groups: Sequence[Any], published: int) -> list[int]:
    trained = [each for group in groups if isinstance(group, Group) for each in group.trajectories]
    return [published - int(each.versions[0].version) for each in trained]


def measure(depth: int, staleness: int, train_seconds: float) -> dict[str, float]:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(run(depth, staleness, train_seconds))


def bench() -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {}
    for name, train_seconds in (("train 1 : rollout 3", IDEAL / 3), ("train 1 : rollout 1", IDEAL)):
        rows = [(depth, staleness, measure(depth, staleness, train_seconds)) for depth, staleness in SHAPES]
        synchronous = rows[0][2]["seconds"]
        found[name] = [
            {
                "depth": depth,
                "staleness": staleness,
                "gain": synchronous / row["seconds"],
                "over_ideal": row["seconds"] / row["ideal_seconds"],
                **{key: row[key] for key in ("trainer_idle", "lag_mean", "lag_max", "goodput")},
            }
            for depth, staleness, row in rows
        ]
    return found


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(json.dumps(bench(), indent=1))
