"""Several environments as one: the tasks of each have its source's name in front of their ids, ``SOURCE:ID``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from itertools import chain

from envs.types import (
    Auditable,
    Dialogue,
    Environment,
    EnvsError,
    Episode,
    Finding,
    Grade,
    GradedEpisode,
    GradesGroups,
    Solvable,
    Task,
)
from tools import ToolCall


class SourcesEnvironment:
    """``environments`` by source. The tasks of a split are those of the pairs (source, split of that source) in
    ``splits``; the source "" adds no name to ids."""

    name = "sources"

    def __init__(
        self, environments: Mapping[str, Environment], splits: Mapping[str, Sequence[tuple[str, str]]]
    ) -> None:
        self._environments, self._splits = dict(environments), dict(splits)
        self._origins: dict[str, tuple[Environment, Task]] = {}
        if any(isinstance(environment, GradesGroups) for environment in environments.values()):
            self.grade_group = self._grade_group  # the optional method of the protocol GradesGroups

    async def prepare(self, *splits: str) -> None:
        needed = set(chain.from_iterable(self._splits.get(split, ()) for split in splits))
        for source, environment in self._environments.items():
            if own := sorted(split for name, split in needed if name == source):
                await environment.prepare(*own)

    def tasks(self, split: str) -> Sequence[Task]:
        return [task for source, own in self._splits.get(split, ()) for task in self._tasks_of(source, own)]

    def start(self, task: Task) -> AbstractAsyncContextManager[Episode | Dialogue]:
        environment, own = self._origin(task)
        return environment.start(own)

    def gold(self, task: Task) -> str:
        environment, own = self._origin(task)
        return environment.gold(own)

    def solution(self, task: Task) -> Sequence[ToolCall | str]:
        environment, own = self._origin(task)
        return environment.solution(own) if isinstance(environment, Solvable) else ()

    async def audit(self, task: Task) -> Sequence[Finding]:
        environment, own = self._origin(task)
        return await environment.audit(own) if isinstance(environment, Auditable) else ()

    async def _grade_group(self, task: Task, episodes: Sequence[GradedEpisode]) -> Sequence[Grade]:
        environment, own = self._origin(task)
        if isinstance(environment, GradesGroups):
            return await environment.grade_group(own, episodes)
        return [episode.grade for episode in episodes]

    def _tasks_of(self, source: str, split: str) -> list[Task]:
        environment, named = self._environments[source], []
        for task in environment.tasks(split):
            own = replace(task, id=f"{source}:{task.id}") if source else task
            self._origins[own.id] = environment, task
            named.append(own)
        return named

    def _origin(self, task: Task) -> tuple[Environment, Task]:
        """The environment of ``task``, and the task as the environment made it. Raises EnvsError for a task that is in
        no split read before."""
        if task.id not in self._origins:
            raise EnvsError(f"task {task.id}: no source provides it")
        return self._origins[task.id]


def source_of(task_id: str, sources: Sequence[str]) -> str:
    """The source of a task of :class:`SourcesEnvironment`; "" where none of ``sources`` is in front of the id."""
    name = task_id.partition(":")[0]
    return name if name in sources else ""
