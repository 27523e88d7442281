"""The order in which training draws tasks. A function of seed and position, so that a resumed run draws the same.

With a curriculum it depends on solve rates too, and the draws are recorded (:class:`Curriculum`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from agent_rl.config.train import CurriculumConfig
from agent_rl.errors import ConfigError
from agent_rl.types import Group
from envs import Task

DRAWS = "curriculum.jsonl"


@dataclass(frozen=True, slots=True)
class WeightedTasks:
    """The tasks of a source, and its weight relative to the other sources."""

    tasks: Sequence[Task]
    weight: float = 1.0


class TaskOrder:
    """Shuffled epochs of each of ``sources``, without repetition. The sources take turns: each position belongs to the
    source that is furthest behind its share, so that every stretch of positions has the weights' proportions. A
    ``curriculum`` draws the source's task instead of its epochs."""

    def __init__(
        self, sources: Mapping[str, WeightedTasks], seed: int, curriculum: Curriculum | None = None
    ) -> None:  # fmt: skip
        self._curriculum = curriculum
        self._sources, self._seed = tuple(sources.values()), seed
        total = sum(source.weight for source in self._sources)
        self._shares = [source.weight / total for source in self._sources]
        self._names = tuple(sources)
        self._drawn = [0] * len(self._sources)
        self._places: list[tuple[int, int]] = []

    @property
    def tasks(self) -> list[Task]:
        """All tasks."""
        return [task for source in self._sources for task in source.tasks]

    def at(self, position: int) -> Task:
        """The task at ``position`` (from 0)."""
        while len(self._places) <= position:
            self._extend()
        source, own = self._places[position]
        if self._curriculum is not None:
            return self._curriculum.draw(self._sources[source].tasks, position, self._seed)
        return task_at(self._sources[source].tasks, own, self._seed, source)

    def check(self, per_step: int) -> None:
        """Raises ConfigError where a step of ``per_step`` tasks needs more tasks of a source than it has."""
        for name, source, share in zip(self._names, self._sources, self._shares, strict=True):
            needed, where = math.ceil(per_step * share), f"train.sources.{name}" if name else "the train split"
            if len(source.tasks) < needed:
                raise ConfigError(
                    f"rollout.tasks_per_step: {per_step} tasks per step need {needed} of {where}, which has "
                    f"{len(source.tasks)}"
                )

    def _extend(self) -> None:
        position = len(self._places) + 1
        behind = [share * position - drawn for share, drawn in zip(self._shares, self._drawn, strict=True)]
        source = behind.index(max(behind))
        self._places.append((source, self._drawn[source]))
        self._drawn[source] += 1


def task_at(tasks: Sequence[Task], position: int, seed: int, source: int = 0) -> Task:
    """The task at ``position`` of the source with the number ``source``."""
    epoch, offset = divmod(position, len(tasks))
    key = [seed, epoch, source] if source else [seed, epoch]
    return tasks[int(np.random.default_rng(key).permutation(len(tasks))[offset])]


class Curriculum:
    """Draws tasks by their latest solve rate (``train.curriculum``), as prime-rl's difficulty pools do.

    Each position of the data draws a task with replacement; a task's weight is that of the pool of its latest solve
    rate, and 1 before it was sampled. Rates change when a step ends, so all positions that a step admits see the same
    ones. ``rates()``: the latest solve rate of each task.

    A position's task is written to ``curriculum.jsonl`` in ``run_dir`` when it is drawn. A resumed run reads it back:
    the journal's episodes of a position are of the task that was drawn, whatever the solve rates are by then.
    """

    def __init__(self, config: CurriculumConfig, rates: Callable[[], Mapping[str, float]], run_dir: Path) -> None:
        self._config, self._rates, self._path = config, rates, run_dir / DRAWS
        self._drawn = _read_draws(self._path)

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


def _read_draws(path: Path) -> dict[int, str]:
    """The recorded draws. A last line that a kill cut off is removed."""
    data = path.read_bytes() if path.is_file() else b""
    complete = data[: data.rfind(b"\n") + 1]
    if complete != data:
        path.write_bytes(complete)
    return dict(orjson.loads(line) for line in complete.splitlines())
