"""Environments by name: built in, by entry point, by dotted path; and invalid names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from envs import (
    EnvContext,
    EnvironmentLoadError,
    Episode,
    Task,
    TaskRecordError,
    load_environment,
    needs_sandbox,
)
from envs.swe import SweEnvironment, SweRecord, write_jsonl
from sandbox import registry as plugins

CONTEXT = EnvContext(backend=None)  # type: ignore[arg-type]


class PlainEnvironment:
    """An environment as an author would write it: a plain class, no base."""

    def __init__(self, context: EnvContext, greeting: str, times: int = 1) -> None:
        self.context = context
        self.greeting = greeting * times

    name = "plain"

    async def prepare(self, *splits: str) -> None:
        """Nothing to make ready."""

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"{split}-1", self.name, {"greeting": self.greeting})]

    def start(self, task: Task) -> AbstractAsyncContextManager[Episode]:
        return nullcontext(None)  # type: ignore[arg-type]

    def gold(self, task: Task) -> str:
        return ""


class Nothing:
    def __init__(self, context: EnvContext) -> None: ...


HERE = "tests_plain_environment"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """This module under a name of its own, since pytest's importlib mode gives it none to import by."""
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])


def test_a_plain_class_by_dotted_path() -> None:
    environment = load_environment(f"{HERE}:PlainEnvironment", CONTEXT, {"greeting": "hi", "times": 2})
    assert environment.tasks("train")[0].record == {"greeting": "hihi"}


def test_an_entry_point_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("added", f"{HERE}:PlainEnvironment", "agent_rl.envs")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == point.group else [])
    assert load_environment("added", CONTEXT, {"greeting": "hi"}).name == "plain"


class Words:
    """A class of tools that needs no sandbox."""

    @classmethod
    def tasks(cls, split: str, options: object) -> list[dict[str, str]]:
        return []

    async def setup(self, task: Task) -> str:
        return ""

    async def grade(self) -> float:
        return 0.0


class WordsInASandbox(Words):
    def __init__(self, sandbox: object) -> None: ...


class AtOnce(Words):
    def grade(self) -> float:  # type: ignore[override]
        return 0.0


def test_needs_sandbox() -> None:
    own = (f"{HERE}:{name}" for name in ("PlainEnvironment", "Words", "WordsInASandbox"))
    names = ("math", "mini", "orders", "swe", *own)
    assert [needs_sandbox(name) for name in names] == [False, True, False, True, True, False, True]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("mimi", {}, r"unknown environment 'mimi': did you mean 'mini'\?"),
        ("zzzzzz", {}, "unknown environment 'zzzzzz': use a registered name or package.module:attribute"),
        ("no.such.module:Env", {}, "no.such.module does not import: No module named 'no'; searched"),
        (f"{HERE}:PlainEnvironmnt", {}, "did you mean 'PlainEnvironment'?"),
        (f"{HERE}:HERE", {}, "is a str, not a class"),
        (f"{HERE}:Nothing", {}, "is not an environment, it lacks name, prepare, tasks, start, gold"),
        (f"{HERE}:AtOnce", {}, "AtOnce: setup and grade have to be async: write async def"),
        (f"{HERE}:PlainEnvironment", {}, "option 'greeting' is required"),
        (f"{HERE}:PlainEnvironment", {"greting": "x"}, r"unknown option 'greting': did you mean 'greeting'\?"),
        ("swe", {"xyz": 1}, "unknown option 'xyz': options: path, data_split, specs, heldout, repos, limit"),
    ],
)
def test_mistakes_are_told_in_one_line(name: str, options: dict[str, object], says: str) -> None:
    with pytest.raises(EnvironmentLoadError, match=says) as told:
        load_environment(name, CONTEXT, options)
    assert "\n" not in str(told.value)


def test_the_swe_environment_splits_its_records(tmp_path: Path, record: SweRecord) -> None:
    records = [record.model_copy(update={"task_id": f"t{i}", "repo_name": f"r{i % 2}"}) for i in range(5)]
    write_jsonl(tmp_path / "train.jsonl", records)
    path = tmp_path / "train.jsonl"

    def ids(environment: SweEnvironment, split: str) -> list[str]:
        return [task.id for task in environment.tasks(split)]

    assert ids(SweEnvironment(CONTEXT, path), "heldout") == ["t0", "t1", "t2", "t3", "t4"]
    parts = SweEnvironment(CONTEXT, path, heldout=2)
    assert (ids(parts, "train"), ids(parts, "heldout")) == (["t0", "t1", "t2"], ["t3", "t4"])
    assert ids(SweEnvironment(CONTEXT, tmp_path, repos=["r1"]), "train") == ["t1", "t3"]
    assert ids(SweEnvironment(CONTEXT, tmp_path, limit=1), "train") == ["t0"]
    with pytest.raises(TaskRecordError, match="no split 'heldout'; it holds: train"):
        SweEnvironment(CONTEXT, tmp_path).tasks("heldout")
    with pytest.raises(TaskRecordError, match="no split 'test'"):
        parts.tasks("test")
    with pytest.raises(TaskRecordError, match="needs the option path"):
        load_environment("swe", CONTEXT, {})
