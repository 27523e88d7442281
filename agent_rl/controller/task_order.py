"""The order in which training draws tasks. A function of seed and position, so that a resumed run draws the same.

With a curriculum it depends on solve rates too, and the draws are recorded (:mod:`agent_rl.controller.curriculum`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agent_rl.controller.curriculum import Curriculum
from agent_rl.errors import ConfigError
from envs import Task


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
