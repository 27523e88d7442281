"""Classes of tools as environments: the worked examples, the template, and invalid classes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel
from support.memory_env import PLAIN, MemoryEnvironment, TurnsEngine, call, run_memory_episode
from typer.testing import CliRunner

from agent_rl.cli import app
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.scripted_policies import solver_runner
from agent_rl.types import StopReason
from envs import EnvContext, Task, load_environment, target_of
from envs.conformance import check_environment
from envs.new_project import TemplateError, write_template
from envs.registry import EnvironmentLoadError
from envs.tool_environment import ToolClassEnvironment, ToolClassError, ToolEpisode
from tools import FunctionToolSet, ToolCall, ToolResult

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
NOWHERE = EnvContext(backend=None)  # type: ignore[arg-type]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.bubblewrap
@pytest.mark.usefixtures("example")
@pytest.mark.parametrize("name", ["sql_tools:SqlTools", "retrieval_tools:RetrievalTools"])
async def test_the_worked_examples_conform_and_can_be_solved(context: EnvContext, name: str) -> None:
    env = load_environment(name, context, {"count": 8})
    assert [finding for finding in await check_environment(env) if not finding.ok] == []
    for policy, reward in (("gold", 1.0), ("noop", 0.1)):
        run = solver_runner(env, policy, EpisodeRules())
        assert [(await run(task)).reward for task in env.tasks("heldout")] == [reward] * 8


@pytest.mark.usefixtures("example")
async def test_the_sql_database_can_only_be_read() -> None:
    env = load_environment("sql_tools:SqlTools", NOWHERE, {"count": 1})
    async with env.start(env.tasks("train")[0]) as episode:
        for sql in ("DROP TABLE sales", "DELETE FROM sales", "ATTACH '/tmp/x.db' AS x", "PRAGMA writable_schema=1"):
            answer = await episode.tools.call(ToolCall("run_query", {"sql": sql}))
            assert answer.failed, sql
        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
        assert (await episode.tools.call(ToolCall("run_query", {"sql": endless}))).failed


@pytest.mark.bubblewrap
async def test_every_shipped_environment_conforms(context: EnvContext, tmp_path: Path) -> None:
    env = load_environment("mini", context, {"train_tasks": 3, "heldout_tasks": 3, "cache_dir": str(tmp_path)})
    assert [finding for finding in await check_environment(env) if not finding.ok] == []


@pytest.mark.bubblewrap
def test_the_commands_write_check_and_list_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def envs(*arguments: str) -> tuple[int, str]:
        ran = CliRunner().invoke(app, ["envs", *arguments])
        return ran.exit_code, ran.output

    code, said = envs("new", "letters")
    assert code == 0, said
    code, said = envs("check", "letters:Letters", "count=5")
    assert (code, "FAILED" in said) == (0, False), said
    source = Path("letters.py")
    source.write_text(source.read_text().replace("self.word.count(self.letter)", "-1"))
    monkeypatch.delitem(sys.modules, "letters")
    code, said = envs("check", "letters:Letters", "count=5")
    assert code == 1
    assert "the solution is resolved" in said
    assert "FAILED" in said
    assert ["math", "envs.math:MathEnvironment"] in [line.split() for line in envs("list")[1].splitlines()]


@pytest.mark.bubblewrap
def test_the_template_passes_its_own_test(tmp_path: Path) -> None:
    test = write_template("word_game", tmp_path).test.name
    for command, outcome in ((["-m", "pytest"], "1 passed"), ([], "all checks passed")):
        command = [sys.executable, *command, test]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert outcome in run.stdout, run.stdout + run.stderr
    refused = {"word_game": "exists already", "Word-Game": "lower-case"}
    for name, message in (refused | dict.fromkeys(("tools", "random"), "name of another module")).items():
        with pytest.raises(TemplateError, match=message):
            write_template(name, tmp_path)


class Counter:
    """Count to three."""

    class Options(BaseModel):
        count: int = 2

    @classmethod
    def tasks(cls, split: str, options: Options) -> list[dict[str, Any]]:
        return [{"id": f"{split}-{at}"} for at in range(options.count)]

    async def setup(self, task: Task) -> str:
        self.number = 0
        return "Count to three."

    async def up(self) -> str:
        """Count one up."""
        self.number += 1
        return str(self.number)

    async def grade(self) -> float:
        return float(self.number >= 3)

    @classmethod
    def solution(cls, task: Task) -> list[ToolCall]:
        return [ToolCall("up", {})] * 3


def of(made: type[Any], **options: Any) -> ToolClassEnvironment:
    return ToolClassEnvironment(NOWHERE, made, "mine", options)


async def test_a_correct_class_passes_every_check() -> None:
    assert all(finding.ok for finding in await check_environment(of(Counter)))


class Shared(Counter):
    total = 0

    async def setup(self, task: Task) -> str:
        return "Count to three."

    async def up(self) -> str:
        """Count one up, for everybody."""
        Shared.total += 1
        return "up"

    async def grade(self) -> float:
        return float(Shared.total >= 3)


def broken(**changes: Any) -> type[Any]:
    """``Counter`` with other attributes."""
    return type("Broken", (Counter,), changes)


def graded(value: Any) -> Callable[..., Awaitable[Any]]:
    async def grade(self: Counter) -> Any:
        return value

    return grade


async def set_up(self: Counter, task: Task) -> None:
    """Returns nothing."""


def listed(tasks: Callable[[], list[dict[str, Any]]]) -> Any:
    return classmethod(lambda cls, split, options: tasks())


numbers = count()
WRONG_SOLUTION = classmethod(lambda cls, task: [ToolCall("up", {})])


class Undescribed(Counter):
    async def down(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("made", "check", "told"),
    [
        (broken(tasks=listed(list)), "tasks of train", "returned no tasks; expected a list"),
        (
            broken(tasks=listed(lambda: [1])),
            "tasks of train",
            "Broken.tasks returned a int in its list; expected dicts",
        ),
        (broken(setup=set_up), "start and close", "Broken.setup returned a NoneType; expected the user message"),
        (broken(tasks=listed(lambda: [{"id": "one"}] * 2)), "tasks of train", "'one' occurs twice"),
        (broken(tasks=listed(lambda: [{"id": f"{next(numbers)}"}])), "tasks of train", "the order must be fixed"),
        (broken(grade=graded(1.0)), "an untouched task is not resolved", "resolved by doing nothing"),
        (broken(grade=graded(float("nan"))), "an untouched task is not resolved", "must be finite"),
        (broken(grade=graded("good")), "an untouched task is not resolved", "grade returned a str"),
        (broken(solution=WRONG_SOLUTION), "the solution is resolved", "its solution is not resolved"),
        (Shared, "episodes don't share state", "the grade of one episode depends on another"),
    ],
)
async def test_a_failed_check_is_named(made: type[Any], check: str, told: str) -> None:
    wrong = {finding.check: finding.detail for finding in await check_environment(of(made)) if not finding.ok}
    assert told in wrong[check]


class NoTools:
    """Say yes."""

    right = False

    @classmethod
    def tasks(cls, split: str) -> list[dict[str, Any]]:
        return [{}]

    async def setup(self, task: Task) -> str:
        return "Yes?"

    async def grade(self) -> float:
        return float(self.right)


class Refusing(Counter):
    """Count to three, unless the task forbids it."""

    @classmethod
    def tasks(cls, split: str) -> list[dict[str, Any]]:
        return [{"id": f"{split}-{at}", "noop_resolves": at == 0} for at in range(2)]

    async def setup(self, task: Task) -> str:
        self.forbidden = task.noop_resolves
        return await super().setup(task)

    async def grade(self) -> float:
        return float(self.number == (0 if self.forbidden else 3))

    @classmethod
    def solution(cls, task: Task) -> list[ToolCall]:
        return [] if task.noop_resolves else [ToolCall("up", {})] * 3


async def test_task_whose_right_answer_is_to_do_nothing_is_not_accused() -> None:
    findings = {finding.check: finding for finding in await check_environment(of(Refusing))}
    assert [finding for finding in findings.values() if not finding.ok] == []
    for noop_resolves, told in ((True, "nothing does not resolve it (reward 0)"), (False, "set noop_resolves in its")):
        grade = graded(0.0 if noop_resolves else 1.0)
        made = broken(tasks=listed(lambda right=noop_resolves: [{"noop_resolves": right}]), grade=grade)  # type: ignore
        findings = {finding.check: finding for finding in await check_environment(of(made))}
        assert told in findings["an untouched task is not resolved"].detail
        assert findings["episodes don't share state"].ok


class Desk(Counter):
    """Count with the customer."""

    @classmethod
    def tasks(cls, split: str) -> list[dict[str, Any]]:
        return [{"id": f"{split}-{at}"} for at in range(2)]

    async def respond(self, text: str) -> str | ToolResult:
        self.heard = [*getattr(self, "heard", []), text]
        if self.number < 3:
            return f"only {self.number}"
        return ToolResult("thanks", submitted=True)

    @classmethod
    def solution(cls, task: Task) -> list[Any]:
        return [ToolCall("up", {}), "One is there.", ToolCall("up", {}), ToolCall("up", {}), "Done."]


class Talk(NoTools):
    async def respond(self, text: str) -> ToolResult:
        self.right = text == "yes"
        return ToolResult("", submitted=True)

    @classmethod
    def solution(cls, task: Task) -> list[str]:
        return ["yes"]


async def test_class_with_tools_and_a_user_and_class_with_a_user_only_conform() -> None:
    for made in (Desk, Talk):
        assert [finding for finding in await check_environment(of(made)) if not finding.ok] == []
        (ended,) = [await solver_runner(of(made), "gold", EpisodeRules())(of(made).tasks("train")[0])]
        assert (ended.resolved, ended.stop) == (True, StopReason.SUBMITTED)
    async with of(Desk).start(Task("a", "mine", {})) as episode:
        assert [schema["function"]["name"] for schema in target_of(episode).schemas()] == ["up"]


async def test_words_go_to_the_user_calls_to_the_tools_and_broken_calls_to_neither() -> None:
    up, desk = call("up"), of(Desk)
    broken_call = up.replace("}", "")
    turns = [f"<think>{up}</think>One is there.", up, broken_call, up, up, "<think>all</think> Done."]
    env = MemoryEnvironment()
    env.start = desk.start  # type: ignore[method-assign, assignment]
    ended = await run_memory_episode(TurnsEngine(turns), env)
    assert ended.stop is StopReason.SUBMITTED
    failure = ended.turns[2].parse_failure
    assert [turn.observation for turn in ended.turns] == ["only 0", "1", failure, "2", "3", "thanks"]
    assert [m["role"] for m in ended.messages[3::2]] == ["user", "tool", "tool", "tool", "tool"]
    assert [turn.parse_failure is None for turn in ended.turns] == [True, True, False, True, True, True]
    silent = await run_memory_episode(TurnsEngine([""]), env, rules=PLAIN.override(max_parse_failures=2))
    assert silent.stop is StopReason.PARSE_FAILURES
    asked = await run_memory_episode(TurnsEngine(["hello"]), env, rules=PLAIN.override(max_turns=3))
    assert (asked.stop, asked.turns[2].observation) == (StopReason.MAX_TURNS, "only 0")


async def test_a_swallowed_cancellation_is_named() -> None:
    @asynccontextmanager
    async def start(task: Task) -> AsyncIterator[ToolEpisode]:
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            raise ValueError("went on") from None
        message = {"role": "user", "content": await Counter().setup(task)}
        yield ToolEpisode((message,), FunctionToolSet([]), Counter())

    env = of(Counter)
    env.start = start  # type: ignore[method-assign, assignment]
    (finding,) = [f for f in await check_environment(env) if f.check == "a cancelled start ends"]
    assert finding.detail == "the start swallowed the cancellation"


def test_options_are_validated() -> None:
    assert len(of(Counter, count=5).tasks("train")) == 5
    with pytest.raises(ToolClassError, match="unknown option 'cuont': did you mean 'count'"):
        of(Counter, cuont=5)
    with pytest.raises(ToolClassError, match="option 'count': Input should be a valid integer"):
        of(Counter, count="many")


class Split(Counter):
    def tasks(self, split: str) -> list[dict[str, Any]]:  # type: ignore[override]
        return [{}]


class Mute(Counter):
    def respond(self, text: str) -> str:
        return ""


class WantsMore(Counter):
    def __init__(self, database: str) -> None: ...


class Untyped(Counter):
    async def add(self, number) -> str:  # type: ignore[no-untyped-def]
        """Add a number."""
        return ""


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (WantsMore, "__init__ takes database; it may take options and sandbox"),
        (NoTools, "has no tool and no user"),
        (Split, r"tasks has to be a class method: @classmethod, def tasks\(cls, split\) or"),
        (Mute, "respond has to be async"),
        (Untyped, "number"),
        (Undescribed, "tool down: needs a docstring"),
    ],
)
def test_an_invalid_class_is_refused_when_it_is_loaded(made: type[Any], told: str) -> None:
    with pytest.raises(ToolClassError, match=told):
        of(made)


def test_a_class_is_found_by_dotted_path(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("own_tools")
    module.Counter = Counter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_tools", module)
    assert load_environment("own_tools:Counter", NOWHERE, {"count": 3}).name == "own_tools:Counter"
    with pytest.raises(EnvironmentLoadError, match="did you mean 'Counter'"):
        load_environment("own_tools:Countr", NOWHERE)
