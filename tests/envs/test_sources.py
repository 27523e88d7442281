"""Several environments as one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import pytest

from envs import EnvsError, Finding, Task
from envs.sources import SourcesEnvironment, source_of


class Plain:
    """An environment without the optional protocols. It starts a task as its name and the task's own id."""

    def __init__(self, name: str) -> None:
        self.name, self.prepared = name, list[str]()

    async def prepare(self, *splits: str) -> None:
        self.prepared += splits

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"{split}-{number}", self.name, {}) for number in range(2)]

    def start(self, task: Task) -> AbstractAsyncContextManager[Any]:
        return nullcontext((self.name, task.id))

    def gold(self, task: Task) -> str:
        return f"{self.name} {task.id}"


class Full(Plain):
    def solution(self, task: Task) -> Sequence[str]:
        return [f"solve {task.id}"]

    async def audit(self, task: Task) -> Sequence[Finding]:
        return [Finding("leak", ok=True, detail=task.id)]


SPLITS = {"train": [("a", "train"), ("", "train")], "heldout": [("b", "test")], "b": [("b", "test")]}


def sources() -> SourcesEnvironment:
    return SourcesEnvironment({"a": Plain("a"), "b": Full("b"), "": Plain("own")}, SPLITS)


def test_a_split_has_the_tasks_of_its_sources_with_their_names() -> None:
    env = sources()
    assert [task.id for task in env.tasks("train")] == ["a:train-0", "a:train-1", "train-0", "train-1"]
    assert (
        [task.id for task in env.tasks("b")] == [task.id for task in env.tasks("heldout")] == ["b:test-0", "b:test-1"]
    )
    assert env.tasks("other") == []
    assert [source_of(task.id, ("a", "b")) for task in env.tasks("train")] == ["a", "a", "", ""]


async def test_a_task_is_started_by_its_own_environment_as_that_made_it() -> None:
    env = sources()
    for task, expected in zip(
        env.tasks("train"), [("a", "train-0"), ("a", "train-1"), ("own", "train-0")], strict=False
    ):
        async with env.start(task) as started:
            assert started == expected
        assert env.gold(task) == " ".join(expected)


async def test_optional_protocols_are_those_of_the_tasks_environment() -> None:
    env = sources()
    without, with_both = env.tasks("train")[0], env.tasks("heldout")[0]
    assert (env.solution(without), await env.audit(without)) == ((), ())
    assert (env.solution(with_both), await env.audit(with_both)) == (
        ["solve test-0"],
        [Finding("leak", ok=True, detail="test-0")],
    )


def test_only_the_named_splits_are_prepared() -> None:
    environments = {name: Plain(name) for name in ("a", "b", "")}
    asyncio.run(SourcesEnvironment(environments, SPLITS).prepare("heldout", "b"))
    assert {name: env.prepared for name, env in environments.items()} == {"a": [], "b": ["test"], "": []}


def test_a_task_of_no_source_is_an_error() -> None:
    with pytest.raises(EnvsError, match="task c:1: no source provides it"):
        sources().gold(Task("c:1", "c", {}))
