"""`agent-rl eval compare`: known values of its statistics, and what it says of files that do not match."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from agent_rl.cli import app
from agent_rl.errors import UserError
from agent_rl.evaluation import paired
from agent_rl.evaluation.paired import Score, bootstrap_interval, detectable_difference, sign_test, tasks_needed
from agent_rl.evaluation.report import EpisodeResult, EvalReport, report, wilson_interval
from agent_rl.evaluation.saved import SavedEvaluation, read_evaluation
from agent_rl.evaluation.side_by_side import labels, matrix
from agent_rl.utils.run_files import write_json
from envs import Task

WON, LOST = Score(1, 1), Score(0, 1)


@pytest.mark.parametrize(
    ("fewer", "more", "p"),
    [(0, 0, 1.0), (1, 1, 1.0), (0, 1, 1.0), (0, 6, 2 / 64), (2, 10, 2 * 79 / 4096), (10, 2, 2 * 79 / 4096)],
)
def test_mcnemars_test_by_hand(fewer: int, more: int, p: float) -> None:
    """Of 12 discordant pairs 2 or fewer on one side: 1 + 12 + 66 = 79 of 4,096 ways, on two sides."""
    assert sign_test(fewer, more) == p


def test_mcnemars_test_of_thousands_of_tasks() -> None:
    assert sign_test(3000, 3000) == 1.0
    assert sign_test(2800, 3200) == pytest.approx(math.erfc(399 / math.sqrt(6000) / math.sqrt(2)), rel=0.02)


def test_the_tasks_that_a_difference_needs_by_hand() -> None:
    """Connor 1987: 30 % discordant pairs, 10 points: (1.960 sqrt(0.3) + 0.842 sqrt(0.29))^2 / 0.01 = 233.1, and 3
    points: 1.5338^2 / 0.0009 = 2,613.9."""
    assert tasks_needed(0.3, 0.1) == 234
    assert tasks_needed(0.3, 0.03) == 2614
    assert tasks_needed(0.0, 0.03) is None


@given(st.floats(0.001, 1.0), st.integers(4, 100_000))
def test_the_detectable_difference_of_some_tasks_needs_as_many_tasks(square: float, tasks: int) -> None:
    difference = detectable_difference(square, tasks)
    assert difference <= math.sqrt(square) + 1e-12
    assert tasks_needed(square, difference * (1 + 1e-9)) in (tasks, tasks + 1, tasks - 1)


def test_too_few_tasks_show_nothing() -> None:
    assert detectable_difference(0.3, 3) is None
    assert detectable_difference(0.0, 300) is None


def test_the_bootstrap_interval_is_that_of_the_mean() -> None:
    differences = np.array([1.0] * 60 + [-1.0] * 30 + [0.0] * 210)
    low, high = bootstrap_interval(differences, seed=0)
    half = 1.96 * differences.std() / math.sqrt(300)
    assert (low, high) == pytest.approx((0.1 - half, 0.1 + half), abs=0.004)
    assert bootstrap_interval(differences, seed=0) == (low, high)
    assert bootstrap_interval(differences, seed=1) != (low, high)
    assert bootstrap_interval(np.full(7, 0.25), seed=0) == (0.25, 0.25)


def test_a_comparison_by_hand() -> None:
    """Tasks of several samples: shares 0 and 1/2, 1 and 1, 3/4 and 1/4, 1/2 and 1."""
    first = [Score(0, 4), Score(4, 4), Score(3, 4), Score(1, 2)]
    found = paired.compare(first, [Score(2, 4), Score(1, 1), Score(1, 4), Score(2, 2)], target=0.03, seed=0)
    assert found.pass_at_1 == (0.5625, 0.6875)
    assert found.difference == 0.125
    assert (found.tasks, found.better_first, found.better_second, found.p_value) == (4, 1, 2, 1.0)
    assert found.tasks_needed == tasks_needed((0.25 + 0 + 0.25 + 0.25) / 4, 0.03)


def report_of(rows: list[EpisodeResult]) -> EvalReport:
    tasks = [Task(task, "mini", {}) for task in dict.fromkeys(row.task_id for row in rows)]
    return report(rows, tasks, policy="p", samples=1, seconds=1.0)


def results(directory: Path, outcomes: dict[str, bool | None], **settings: Any) -> Path:
    """The files of an evaluation as `agent-rl eval` writes them; None: not graded."""
    rows = [EpisodeResult(task, 0, resolved, "submitted", 1, 0.0) for task, resolved in outcomes.items()]
    directory.mkdir()
    lines = [json.dumps(asdict(row)) + "\n" for row in rows]
    (directory / "results.jsonl").write_text("".join(lines) + '{"task_id": "cut')
    write_json(directory / "settings.json", {"env": "mini", **settings})
    report_of(rows).write(directory / "report.json")
    return directory


HALF, MORE = {f"t{n}": n % 2 == 0 for n in range(40)}, {f"t{n}": n % 4 != 3 for n in range(40)}


def output_of(*arguments: object) -> str:
    answer = CliRunner().invoke(app, ["eval", "compare", *map(str, arguments)], catch_exceptions=False)
    assert answer.exit_code == 0
    return answer.output


def test_the_command_prints_the_difference_and_the_excluded_tasks(tmp_path: Path) -> None:
    a = results(tmp_path / "a", {**HALF, "only": True, "broken": None}, top_p=1)
    b = results(tmp_path / "b", {**MORE, "new": True, "broken": True}, top_p=0.9)
    text = output_of(a, b)
    figures = "50.0%", "75.0%", "difference: +25.0 points, 95 % interval +", "p = 0.00195 (exact", "detecting 3 points"
    left = "excluded: 1 not in a (new); 1 not graded in a (broken); 1 not in b (only)"
    note = "note: top_p is 1 in a, 0.9 in b"
    assert [part for part in (*figures, left, note) if part not in text] == []


def test_as_json_it_is_the_same(tmp_path: Path) -> None:
    a, b = results(tmp_path / "a", HALF), results(tmp_path / "b", MORE | {"new": True})
    options = "--json", "--points", 10, "--seed", 3
    answer = json.loads(output_of(a, b, *options))
    (found,) = answer["comparisons"]
    assert (found["difference"], found["p_value"], answer["tasks"]) == (0.25, 2 / 1024, 40)
    assert (found["better_first"], found["better_second"]) == (0, 10)
    assert answer["evaluations"][0]["excluded"] == {"missing": ["new"], "ungraded": []}
    assert found["tasks_needed"] == tasks_needed(0.25, 0.1)
    again = json.loads(output_of(a / "results.jsonl", b / "report.json", *options))
    assert again["comparisons"] == answer["comparisons"]
    columns = "samples", "pass_at_k", "effort"
    assert [[side[key] for key in columns] for side in again["evaluations"]] == [
        [side[key] for key in columns] for side in answer["evaluations"]
    ]


def test_identical_evaluations_have_no_power_calculation(tmp_path: Path) -> None:
    a = results(tmp_path / "a", HALF)
    assert "no power calculation" in output_of(a, a)
    assert json.loads(output_of(a, a, "--json"))["comparisons"][0]["tasks_needed"] is None


def test_a_runs_own_evaluations_go_by_their_step(tmp_path: Path) -> None:
    made = [report_of([EpisodeResult("t", 0, won, "submitted", 1, 0.0)]) for won in (False, True)]
    evaluations = {"step-0/sampled": asdict(made[0]), "step-9/sampled": asdict(made[1])}
    write_json(tmp_path / "state.json", {"run_id": "r", "evaluations": evaluations})
    assert "+100.0 points" in output_of(f"{tmp_path}:step-0/sampled", f"{tmp_path}:step-9/sampled")
    with pytest.raises(UserError, match="no evaluation 'step-8/sampled'; it has step-0/sampled, step-9/sampled"):
        read_evaluation(f"{tmp_path}:step-8/sampled")
    named = "a run's directory with the evaluations step-0/sampled, step-9/sampled; expected"
    with pytest.raises(UserError, match=named):
        read_evaluation(str(tmp_path))


def test_incomparable_evaluations_are_rejected(tmp_path: Path) -> None:
    a, other = results(tmp_path / "a", {"t": True}), results(tmp_path / "b", {"u": True})
    env, seeded = (results(tmp_path / f"seed-{n}", {"t": True}, env_options={"seed": n}) for n in (1, 2))
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.json").write_text("[]")
    (tmp_path / "y.json").write_text("{")
    for names, message in {
        (a, other): "have no graded task in common: 1 not in a (u); 1 not in b (t)",
        (env, seeded): "the task ids are not comparable; evaluate all with the same environment",
        (a, tmp_path / "nowhere"): "no such evaluation; expected an evaluation's directory",
        (a, tmp_path / "empty"): "contains no evaluation; expected",
        (a, tmp_path / "x.json"): "not a report of an evaluation; expected",
        (a, tmp_path / "y.json"): "not JSON (",
    }.items():
        with pytest.raises(UserError) as caught:
            output_of(*names)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def saved(name: str, model: str, **scores: Score) -> SavedEvaluation:
    return SavedEvaluation(name, scores, {"env": "mini", "model": model}, model)


@pytest.mark.parametrize(
    ("evaluations", "expected"),
    [
        ([("runs/a/eval/x", "gold"), ("runs/a/eval/y", "noop")], ["gold", "noop"]),
        ([("runs/a/eval/x/", "m"), ("runs/b/eval/x", "m"), ("runs/b/eval/x", "n")], ["m a", "m b", "n"]),
        ([("r:step-0/sampled", "engine"), ("r:step-20/sampled", "engine")], ["step-0", "step-20"]),
        (
            [("a", "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8"), ("b", "Qwen/Qwen3-Coder-30B-A3B-Instruct-BF16")],
            ["...FP8", "...BF16"],
        ),
        ([("a/x", "m"), ("a/x", "m")], ["x", "x #2"]),
        ([("a/x", "")], ["x"]),
    ],
)
def test_columns_have_different_names(evaluations: list[tuple[str, str]], expected: list[str]) -> None:
    assert labels([saved(*one) for one in evaluations]) == expected


def test_matrix_lists_the_most_different_tasks_first() -> None:
    first = saved("a", "m", easy=Score(2, 2), split=Score(2, 2), half=Score(1, 2), broken=Score(0, 0))
    second = saved("b", "n", easy=Score(4, 4), split=Score(0, 4), half=Score(4, 4), new=Score(1, 1))
    rows = matrix([first, second])
    assert [(row.task_id, row.disagreement) for row in rows] == [
        ("split", 1.0), ("half", 0.5), ("broken", 0.0), ("easy", 0.0), ("new", 0.0),
    ]  # fmt: skip
    assert rows[2].scores == (Score(0, 0), None)


def test_three_evaluations_are_compared_with_the_first(tmp_path: Path) -> None:
    paths = [results(tmp_path / name, tasks) for name, tasks in (("a", HALF), ("b", MORE), ("c", HALF))]
    text = output_of(*paths, "--tasks")
    for part in (
        "b against a: difference: +25.0 points",
        "c against a: difference: +0.0 points",
        "0/1",
        "tasks differ",
    ):
        assert part in text
    answer = json.loads(output_of(*paths, "--tasks", "--json"))
    assert [(one["first"], one["second"]) for one in answer["comparisons"]] == [(0, 1), (0, 2)]
    assert answer["matrix"][0]["task_id"] == "t1"
    assert answer["matrix"][0]["disagreement"] == 1.0
    assert answer["matrix"][0]["scores"][1] == {"resolved": 1, "graded": 1}


def test_repeated_evaluations_of_a_model_are_one_column_with_all_samples(tmp_path: Path) -> None:
    """Pass@2 of two samples a task: a task counts if one of them resolved it."""
    runs = [results(tmp_path / f"run-{n}", tasks, policy="p") for n, tasks in enumerate((HALF, MORE))]
    other = results(tmp_path / "other", {task: True for task in HALF}, policy="q")
    answer = json.loads(output_of(*runs, other, "--pool", "--json"))
    pooled, single = answer["evaluations"]
    assert list(pooled["members"].values()) == [0.5, 0.75]
    assert (pooled["samples"], single["samples"]) == (80, 40)
    assert pooled["pass_at_k"]["1"]["rate"] == 0.625
    assert pooled["pass_at_k"]["2"] == {"rate": 0.75, "interval": list(wilson_interval(0.75, 40)), "tasks": 40}
    text = output_of(*runs, "--pool")
    assert "2, Pass@1 50.0% to 75.0%" in text
    assert "difference" not in text
