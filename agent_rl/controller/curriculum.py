"""A curriculum: tasks are drawn by their latest solve rate (``train.curriculum``), as prime-rl's difficulty pools.

Each position of the data draws a task with replacement; a task's weight is that of the pool of its latest solve rate,
and 1 before it was sampled. Rates change when a step ends, so all positions that a step admits see the same ones.

A position's task is written to ``curriculum.jsonl`` when it is drawn. A resumed run reads it back: the journal's
episodes of a position are of the task that was drawn, whatever the solve rates are by then.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import orjson

from agent_rl.config.train import CurriculumConfig
from agent_rl.types import Group
from envs import Task

NAME = "curriculum.jsonl"


class Curriculum:
    """Draws tasks by ``rates()``, the latest solve rate of each task, and keeps the draws in ``run_dir``."""

    def __init__(self, config: CurriculumConfig, rates: Callable[[], Mapping[str, float]], run_dir: Path) -> None:
        self._config, self._rates, self._path = config, rates, run_dir / NAME
        self._drawn = _read(self._path)

    def draw(self, tasks: Sequence[Task], position: int, seed: int) -> Task:
        """The task of ``position`` among ``tasks``."""
        recorded = self._drawn.get(position)
        task = next((each for each in tasks if each.id == recorded), None)
        if task is None:
            rates = self._rates()
            weights = np.array([self.weight(rates.get(each.id)) for each in tasks])
            weights = weights if weights.any() else np.ones(len(tasks))
            generator = np.random.default_rng([seed, position])
            task = tasks[int(generator.choice(len(tasks), p=weights / weights.sum()))]
            self._record(position, task.id)
        return task

    def weight(self, rate: float | None) -> float:
        """The weight of a task with this latest solve rate; None: not sampled yet."""
        return 1.0 if rate is None else next(pool.weight for pool in self._config.pools if rate <= pool.up_to)

    def metrics(self) -> dict[str, float]:
        """``curriculum/*``: tasks with a solve rate, and its mean."""
        rates = self._rates()
        return {"curriculum/tasks_seen": float(len(rates))} | (
            {"curriculum/solve_rate_mean": statistics.fmean(rates.values())} if rates else {}
        )

    def _record(self, position: int, task: str) -> None:
        self._drawn[position] = task
        with self._path.open("ab") as file:
            file.write(orjson.dumps([position, task]) + b"\n")


def solve_rate(group: Group) -> float:
    """The share of resolved trajectories."""
    return statistics.fmean(trajectory.resolved for trajectory in group.trajectories)


def _read(path: Path) -> dict[int, str]:
    """The recorded draws. A last line that a kill cut off is removed."""
    data = path.read_bytes() if path.is_file() else b""
    complete = data[: data.rfind(b"\n") + 1]
    if complete != data:
        path.write_bytes(complete)
    return dict(orjson.loads(line) for line in complete.splitlines())
