"""The environment math: exact answers in all forms, rows of data sets, hostile answers, and single-turn episodes."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from agent_rl.cli import app
from agent_rl.config.loader import load_config
from agent_rl.controller.rollout_runtime import open_task_runtime
from agent_rl.monitoring.console import Display
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.scripted_policies import solver_runner
from agent_rl.types import StopReason
from envs import EnvContext, GradingError, TaskRecordError, load_environment
from envs.conformance import check_environment
from envs.math import (
    FAMILIES,
    LEVELS,
    Exact,
    Grader,
    MathEnvironment,
    MathUnavailableError,
    extract_answer,
    generate,
    grading_process,
    read_problems,
    stream,
)
from envs.math import grader as grading
from envs.math.grading_process import compare
from sandbox import NullBackend

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = EnvContext(NullBackend())


@pytest.fixture(scope="module")
def env() -> MathEnvironment:
    """One for all tests that can share it: its process takes a second to start."""
    return MathEnvironment(CONTEXT, train_tasks=3, heldout_tasks=3)


@pytest.fixture
def grader(env: MathEnvironment) -> Grader:
    return env._grader


def right(truth: str, turn: str) -> bool:
    """As :meth:`Grader.check`, in this process."""
    answer = extract_answer(turn)
    return answer is not None and compare(truth, answer)[0]


def forms(value: Exact) -> Iterator[str]:
    """Ways to write ``value``, all of them exact."""
    yield value.latex
    yield value.latex.replace(r"\frac", r"\dfrac")
    yield f"x = {value.latex}"
    yield f"${value.latex}$"
    factor, root = value.factor, value.radicand
    if root != 1:
        yield rf"\frac{{{factor.numerator}}}{{{factor.denominator}}}\sqrt{{{root}}}"
        yield rf"\sqrt{{{factor.numerator**2 * root}}} / {factor.denominator}"
        return
    if factor.denominator > 1:
        yield f"{factor.numerator}/{factor.denominator}"
        yield rf"\frac{{{3 * factor.numerator}}}{{{3 * factor.denominator}}}"
    if 10**6 % factor.denominator == 0 and abs(factor) < 10**9:
        places = next(n for n in range(7) if 10**n % factor.denominator == 0)
        yield f"{float(factor):.{places}f}"
    if factor.denominator == 1 and abs(factor) >= 1000:
        yield f"{factor.numerator:,}"
        yield f"{factor.numerator:,}".replace(",", "{,}")


TURNS = (r"So it is \boxed{%s}.", r"$\boxed{1}$? No: $\boxed{%s}$", "Answer: %s", "#### %s")


def near_misses(value: Exact) -> Iterator[Exact]:
    step = Fraction(1, value.factor.denominator)
    yield Exact(value.factor + step, value.radicand)
    yield Exact(value.factor - step, value.radicand)
    yield Exact(value.factor, value.radicand + 1)
    if value.factor:
        yield Exact(-value.factor, value.radicand)
        yield Exact(value.factor + Fraction(1, 1000), value.radicand)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.sampled_from(LEVELS), st.integers(0, 10**6))
def test_an_answer_is_right_in_every_form_and_near_misses_are_wrong(family: str, level: int, seed: int) -> None:
    question, value = FAMILIES[family](random.Random(seed), level)
    for form, turn in zip(forms(value), itertools.cycle(TURNS), strict=False):
        assert right(value.latex, turn % form), f"{question} {value.latex}: {turn % form}"
    for wrong in near_misses(value):
        if wrong.factor or value.factor:
            assert not right(value.latex, rf"\boxed{{{wrong.latex}}}"), f"{question} {value.latex}: {wrong.latex}"


@given(st.fractions(-20, 20, max_denominator=12).filter(bool))
def test_the_root_of_a_square_is_the_number(number: Fraction) -> None:
    assert Exact.sqrt(number * number) == Exact.rational(abs(number))


@given(st.integers(1, 5000), st.integers(1, 60))
def test_a_root_is_exact_and_has_no_square_left(above: int, below: int) -> None:
    found = Exact.sqrt(Fraction(above, below))
    assert found.factor**2 * found.radicand == Fraction(above, below)
    assert all(found.radicand % (base * base) for base in range(2, 80))


def test_splits_share_no_question_and_a_seed_gives_the_same_again() -> None:
    train, other, *heldout = (
        {problem.question for problem in generate(split, 300, seed)}
        for split in ("train", "heldout")
        for seed in (0, 1)
    )
    assert {len(questions) for questions in (train, other, *heldout)} == {300}
    assert not (train | other) & (heldout[0] | heldout[1])
    assert train != other
    assert generate("train", 20, 7) == generate("train", 20, 7)
    assert {problem.family for problem in generate("train", 300, 0)} == set(FAMILIES)


def test_levels_are_the_requested_ones_and_an_exhausted_stream_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {problem.level for problem in generate("train", 50, 0, levels=(2, 4))} == {2, 4}
    monkeypatch.setitem(FAMILIES, "arithmetic", lambda rng, level: (f"{rng.randint(1, 60)}?", Exact.rational(1)))  # type: ignore[arg-type]
    for name in set(FAMILIES) - {"arithmetic"}:
        monkeypatch.delitem(FAMILIES, name)  # type: ignore[arg-type]
    assert 20 < len(list(stream("train", 0))) < 60
    with pytest.raises(TaskRecordError, match=r"math: levels \[1, 2, 3, 4, 5\] have \d\d train problems under seed 0"):
        MathEnvironment(CONTEXT, train_tasks=60).tasks("train")


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        (r"First \boxed{1}, then \boxed{\frac{1}{2}} it is.", r"\frac{1}{2}"),
        ("thus\n#### 1,234\n", "1,234"),
        ("Answer: 3\nno\n**Answer:** 4.\nbye", "4"),
        (r"<think>\boxed{3}</think> it is \boxed{4}", "4"),
        (r"\boxed{3}</think> I forgot", None),
        (r"<think> \boxed{3}", None),
        ("it is 42", None),
        (r"\boxed{3", None),
        (r"\boxed 3", None),
        ("Answer:", None),
        ("", None),
        (r"\boxed{4}" + "x" * grading.TAIL, None),
    ],
)
def test_the_answer_is_the_last_marked_one(turn: str, answer: str | None) -> None:
    assert extract_answer(turn) == answer


HOSTILE = {
    "10 MB": "x" * 10_000_000,
    "10 MB of digits": r"\boxed{" + "7" * 10_000_000 + "}",
    "a million boxed answers": r"\boxed{7}" * 1_000_000,
    "open": r"\boxed{" + "(" * 60 + "}",
    "power of powers in Python": r"\boxed{9**9**9}",
    "surrogates": "\\boxed{\ud800\udfff}",
    "controls": "\\boxed{\x00\x1b[2J}",
    "no end": r"\boxed{" * 500,
    "code": r"\boxed{__import__('os').system('exit')}",
    "list of answers": r"\boxed{41, 42, 43}",
}


HARD = [
    "(" * 4000,
    "1+" * 2000 + "1",
    r"\frac{1}{" * 300 + "2" + "}" * 300,
    r"\int_0^1 x^{x^{x}} dx",
    r"\sum_{n=1}^{10^9} \sin(n)",
    "2^{10000000000}",
    "1e999999999",
    "x^{99999}=2^x",
    r"\sqrt{" * 500 + "}" * 500,
]
"""Expressions that are hard to parse or to compare."""


@pytest.mark.parametrize(
    "answer",
    [*HOSTILE.values(), *(pytest.param(rf"\boxed{{{answer}}}", marks=pytest.mark.exhaustive) for answer in HARD)],
    ids=[*HOSTILE, *(answer[:12] for answer in HARD)],
)
async def test_a_hostile_answer_is_wrong_soon(grader: Grader, answer: str) -> None:
    started = time.process_time()
    check = await grader.check("42", answer)
    assert not check.correct
    assert check.reason.isprintable()
    assert len(check.reason) < 600
    assert time.process_time() - started < 2, "what costs this process"


@pytest.mark.slow
async def test_an_answer_beyond_all_limits_is_wrong_and_the_next_one_is_graded(grader: Grader) -> None:
    check = await grader.check("42", r"\boxed{9^{9^{9^{9}}}}")
    assert (check.correct, "was not compared within the limits" in check.reason) == (False, True)
    assert await grader.check("42", r"\boxed{42}") == grading.AnswerCheck(True, "the answer 42 is correct, expected 42")


@pytest.mark.slow
async def test_a_killed_grading_process_is_a_grading_error_and_is_replaced(grader: Grader) -> None:
    assert (await grader.check("7", "#### 7")).correct
    os.kill(grader._idle[-1]._process.pid, signal.SIGKILL)
    with pytest.raises(GradingError, match="the grading process ended with exit code -9"):
        await grader.check("7", "#### 7")
    assert (await grader.check("7", "#### 7")).correct


def test_lack_of_processor_time_is_a_grading_error(grader: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading_process, "WALL_SECONDS", 0.05)
    tasks = {"sleep": lambda: time.sleep(60), "spin": lambda: all(itertools.repeat(1)), "end": lambda: os._exit(3)}
    monkeypatch.setattr(grading_process, "TASKS", tasks)
    assert grading_process.run_forked("sleep") == grading_process.LATE
    monkeypatch.setattr(grading_process, "FAIR_SECONDS", 0.0)
    assert grading_process.run_forked("spin") is None
    monkeypatch.setattr(grading_process, "WALL_SECONDS", 60.0)
    assert grading_process.run_forked("end") is None
    monkeypatch.setattr(grading._Worker, "request", lambda self, task: grading_process.LATE)
    with pytest.raises(GradingError, match="too busy to compare answers"):
        grader._run_task("compare", "1", "1")


class Contested(deque[Any]):
    """Seems to hold something although another thread took the last of it."""

    def __bool__(self) -> bool:
        return True


def test_a_process_that_another_thread_took_first_is_replaced(grader: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grader, "_idle", Contested())
    monkeypatch.setattr(grading._Worker, "request", lambda self, task: [True])
    assert grader._run_task("can_parse", "1") == [True]


def test_unparsable_answers_are_found_in_their_order(grader: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "_CHUNK_SIZE", 1)
    monkeypatch.setattr(grader, "_run_task", lambda name, *texts: [int(text) % 1000 > 0 for text in texts])
    assert grader.unparsable([str(at) for at in range(1, 3000)]) == ["1000", "2000"]


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "Solve it.\n\nWhat is 6 x 7?\n\nThe last line is Answer: $Answer."}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "42", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b"},
}


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        ({"question": "Six times seven?", "answer": "6 x 7 = <<6*7=42>>42\n#### 42"}, "Six times seven?", "42"),
        ({"question": "Q", "answer": "1,234"}, "Q", "1,234"),
        ({"problem": "P", "solution": r"so $\boxed{\frac{1}{2}}$.", "level": "Level 5"}, "P", r"\frac{1}{2}"),
        ({"problem": "P", "solution": r"\boxed{1}", "answer": "2", "subject": "Algebra"}, "P", "2"),
        ({"id": 60, "problem": "P", "solution": "s", "answer": "204", "url": "u", "year": "2024"}, "P", "204"),
        ({"ID": "2024-I-1", "Problem": "P", "Solution": "s", "Answer": 204}, "P", "204"),
        (DAPO, DAPO["prompt"][0]["content"], "42"),  # type: ignore[index]
        ({"prompt": "Bare?", "reward_model": {"ground_truth": 0.5}}, "Bare?", "0.5"),
        ({"question": "Small?", "answer": 1e-05}, "Small?", "0.00001"),
        ({"question": "Large?", "answer": 1e16}, "Large?", "10000000000000000"),
        ({"question": "Words?", "answer": r"\text{east}"}, "Words?", r"\text{east}"),
    ],
)
def test_rows_of_the_usual_data_sets(
    row: dict[str, Any], question: str, answer: str, grader: Grader, tmp_path: Path
) -> None:
    (problem,) = read_problems(write(tmp_path / "rows.jsonl", [row]), grader).problems
    assert (problem.question, problem.answer) == (question, answer)
    assert bool(problem.messages) == ("reward_model" in row)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "1"}, "row 2: question: missing; expected a text in question or problem"),
        ({"question": " ", "answer": "1"}, "row 2: question: str ' '; expected a text that is not empty"),
        ({"question": "Q"}, "row 2: answer: missing; expected answer, or a solution"),
        ({"question": "Q", "answer": ["1"]}, r"row 2: answer: list \"\['1'\]\"; expected a text or a number"),
        ({"question": "Q", "answer": float("nan")}, "row 2: answer: float 'nan'; expected a text or a number"),
        ({"question": "Q", "answer": "(((("}, r"row 2: answer: '\(\(\(\(' cannot be parsed; expected a number"),
        ({"question": "Q", "answer": ""}, "row 2: answer: str ''; expected a text or a number"),
        ({"question": "\ud800", "answer": "1"}, "row 2: question: str"),
        ({"problem": "P", "solution": "it is 7"}, "row 2: solution: no .*, and there is no field answer"),
        ({"prompt": [{"role": "user", "content": "Q"}]}, "row 2: reward_model.ground_truth: missing"),
        ({"prompt": [], "reward_model": {"ground_truth": "1"}}, r"row 2: prompt: list '\[\]'; expected messages"),
        ({"reward_model": {"ground_truth": "1"}}, "row 2: prompt: missing; expected messages"),
        ({"question": "First?", "answer": "2"}, "row 2: answer: '2', but '1' in row 1 with the same question"),
    ],
)
def test_an_invalid_row_is_one_line_or_is_left_out(
    row: dict[str, Any], message: str, grader: Grader, tmp_path: Path
) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": "First?", "answer": "1"}, row])
    with pytest.raises(TaskRecordError, match=message) as caught:
        read_problems(path, grader)
    assert "\n" not in str(caught.value)
    found = read_problems(path, grader, skip_broken=True)
    assert (len(found.problems), len(found.broken), found.repeated) == (1, 1, 0)


def test_rows_are_split_and_repeated_questions_dropped(tmp_path: Path) -> None:
    rows = [{"question": f"{at}?", "answer": at} for at in (1, 2, 1, 3, 4, 4)]
    rest = MathEnvironment(CONTEXT, write(tmp_path / "rows.jsonl", rows), heldout=1)
    questions = {split: [task.record["question"] for task in rest.tasks(split)] for split in ("train", "heldout")}
    assert questions == {"train": ["1?", "2?", "3?"], "heldout": ["4?"]}


@pytest.mark.parametrize("levels", [3, "12", [], [0], [[1]]])
def test_invalid_levels_are_refused_in_one_line(levels: Any) -> None:
    with pytest.raises(TaskRecordError, match=r"math: levels is .*; expected a list of values from"):
        load_environment("math", CONTEXT, {"levels": levels})


def test_without_math_verify_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MathUnavailableError, match=r"math needs math-verify: pip install 'agent-rl\[math\]'"):
        load_environment("math", CONTEXT)


async def test_the_environment_keeps_every_promise(env: MathEnvironment) -> None:
    assert [finding for finding in await check_environment(env) if not finding.ok] == []


@pytest.mark.parametrize(
    ("turn", "reward"), [(None, 1.0), ("It is <function=finish></function>", 0.0), (r"<think>\boxed{%s}", 0.0)]
)
async def test_an_episode_is_one_turn_in_words(env: MathEnvironment, turn: str | None, reward: float) -> None:
    task = env.tasks("train")[0]
    solver = "gold" if turn is None else lambda env, task: [turn]
    trajectory = await solver_runner(env, solver, EpisodeRules())(task)
    assert (trajectory.stop, trajectory.reward, len(trajectory.turns)) == (StopReason.SUBMITTED, reward, 1)
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant"]
    assert (trajectory.turns[0].tool, trajectory.turns[0].parse_failure) == (None, None)
    assert list(trajectory.tests.values()) == ["PASSED" if reward else "FAILED"]
    assert ("is correct, expected" if reward else "no answer was given") in trajectory.test_log


async def test_no_sandbox_is_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody")
    overrides = ["env.name=math", "sandbox.backend=docker", f"runs_dir={tmp_path}"]
    config = load_config(ROOT / "configs/quickstart.yaml", overrides)
    async with open_task_runtime(config, Display("test")) as task_runtime:
        assert task_runtime.backend.name == "none"


@pytest.mark.slow
def test_the_commands_evaluate_and_show_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = str(ROOT / "configs/quickstart.yaml")
    ran = CliRunner().invoke(app, ["eval", config, "env.name=math", "--policy", "gold", "--tasks", "3"])
    assert ran.exit_code == 0, ran.output
    assert "100.0%" in ran.output
    shown = CliRunner().invoke(app, ["show", "runs/quickstart/eval/gold-heldout", "--task", "math-heldout-0-00000"])
    assert r"\boxed{" in shown.output


def test_rows_are_selected_by_the_values_of_fields(tmp_path: Path) -> None:
    rows = [{"problem": f"{level} + {level}?", "answer": str(2 * level), "level": level} for level in (4, 5, 5, 3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = MathEnvironment(CONTEXT, tmp_path / "rows.jsonl", where={"level": 5})
    assert [task.record["answer"] for task in env.tasks("any")] == ["10"]
    with pytest.raises(TaskRecordError, match="no problem"):
        MathEnvironment(CONTEXT, tmp_path / "rows.jsonl", where={"level": 6}).tasks("any")
