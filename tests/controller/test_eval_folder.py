"""An evaluation that is killed and started again gives the report of one that was not."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import random
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trajectories import trajectory

from agent_rl.commands.eval import EvalOptions
from agent_rl.commands.policy import PolicyChoice
from agent_rl.config import EvalConfig, RunConfig
from agent_rl.errors import ConfigError
from agent_rl.evaluation.directory import EvaluationDirectory, swebench_report
from agent_rl.evaluation.evaluate import evaluate
from agent_rl.evaluation.report import EpisodeResult, EvalReport, pass_at_k
from agent_rl.rollout.group import Limiter
from agent_rl.types import StopReason, Trajectory
from envs import Task

TASKS = [Task(f"owner/repo@{index}", "memory", {"repo_name": f"repo-{index % 3}"}) for index in range(12)]
SETTINGS = {"policy": "told", "split": "heldout"}


class Killed(Exception):
    """Stands for the process' end between two results; test_eval_faults.py has real ones."""


def ended(task: Task, sample: int) -> Trajectory:
    """What the policy does with a task's n-th sample: the same in every start."""
    resolved = random.Random(f"{task.id}/{sample}").random() < 0.5
    messages = ({"role": "assistant", "content": "\udce4 lone surrogate"},)
    return replace(trajectory(float(resolved), task_id=task.id), messages=messages, patch=f"diff {task.id}\n")


async def run_until(directory: EvaluationDirectory, stop_after: int | None, broken: float = 0.0) -> EvalReport:
    """Evaluate 2 samples of every task; the process "dies" after ``stop_after`` results."""
    count, chance = 0, random.Random(5)
    done = directory.results()
    taken = {task.id: {r.sample for r in done if r.task_id == task.id and r.resolved is not None} for task in TASKS}

    async def run(task: Task) -> Trajectory:
        await asyncio.sleep(0)
        if chance.random() < broken:
            return replace(ended(task, 0), stop=StopReason.SANDBOX_FAILURE, reward=None, error="SandboxError: gone")
        sample = min({0, 1} - taken[task.id])
        taken[task.id].add(sample)
        return ended(task, sample)

    def record(result: EpisodeResult, trajectory: Trajectory | None) -> None:
        nonlocal count
        if stop_after is not None and count == stop_after:
            raise Killed
        count += 1
        directory.record(result, trajectory)

    options = {"policy": "told", "limiter": Limiter(1), "samples": 2, "retries": 9}
    report = await evaluate(TASKS, run, **options, done=done, on_result=record)
    directory.finish(report, TASKS, "told")
    return report


@settings(max_examples=8)
@given(stops=st.lists(st.integers(0, 9), max_size=3), torn=st.booleans())
def test_a_resumed_evaluation_gives_the_same_report(tmp_path_factory: Any, stops: list[int], torn: bool) -> None:
    whole = asyncio.run(run_until(EvaluationDirectory(tmp_path_factory.mktemp("whole"), SETTINGS), None))
    path = tmp_path_factory.mktemp("killed")
    for stop in stops:
        with contextlib.suppress(Killed):
            asyncio.run(run_until(EvaluationDirectory(path, SETTINGS), stop))
        if torn and (path / "results.jsonl").exists():
            with (path / "results.jsonl").open("ab") as file:
                file.write(b'{"task_id": "owner/re')
    resumed = asyncio.run(run_until(EvaluationDirectory(path, SETTINGS), None))
    assert replace(resumed, seconds=0.0) == replace(whole, seconds=0.0)
    for task in TASKS:
        assert json.loads((path / "logs" / task.id.replace("/", "%2F") / "1.json").read_text())["patch"]


async def test_sandbox_failures_leave_pass_at_1_unchanged_and_are_reported(tmp_path: Path) -> None:
    healthy = await run_until(EvaluationDirectory(tmp_path / "a", SETTINGS), None)
    broken = await run_until(EvaluationDirectory(tmp_path / "b", SETTINGS), None, broken=0.05)
    assert broken.pass_at_1 == healthy.pass_at_1
    assert broken.infrastructure_failures > 0
    assert healthy.infrastructure_failures == 0


async def test_predictions_and_reports_are_written(tmp_path: Path) -> None:
    directory = EvaluationDirectory(tmp_path / "eval", SETTINGS)
    report = await run_until(directory, None)
    assert list(report.by_repo) == ["repo-0", "repo-1", "repo-2"]
    assert list(report.pass_at_k) == ["1", "2"]
    assert report.pass_at_k["1"].rate == pytest.approx(report.pass_at_1)
    for name in ("predictions.jsonl", "predictions-1.jsonl"):
        rows = [json.loads(line) for line in (directory.path / name).read_text().splitlines()]
        assert [row["instance_id"] for row in rows] == [task.id for task in TASKS]
        assert {tuple(row) for row in rows} == {("instance_id", "model_name_or_path", "model_patch")}
    swebench = json.loads((directory.path / "report-swebench.json").read_text())
    assert swebench["resolved_instances"] == sum(ended(task, 0).resolved for task in TASKS)
    assert swebench["schema_version"] == 2


def test_swebench_report_keeps_empty_patches_and_errors_apart() -> None:
    def result(task: str, **changes: object) -> EpisodeResult:
        return replace(EpisodeResult(task, 0, False, "submitted", 1, 1.0, patch="diff"), **changes)

    first = {"a": result("a", resolved=True), "b": result("b"), "c": result("c", patch="")}
    report = swebench_report(["d", "c", "b", "a"], first, {"d": "SandboxError: gone", "a": "once"})
    assert (report["completed_ids"], report["resolved_ids"], report["unresolved_ids"]) == (["a", "b"], ["a"], ["b"])
    assert (report["empty_patch_ids"], report["error_ids"]) == (["c"], ["d"])
    assert (report["total_instances"], report["error_instances"]) == (4, 1)
    assert report["failure_reasons"] == {"d": "SandboxError: gone"}


async def test_swebench_reads_our_files(tmp_path: Path) -> None:
    utils = pytest.importorskip("swebench.harness.utils")
    reporting = pytest.importorskip("swebench.harness.reporting")
    directory = EvaluationDirectory(tmp_path / "eval", SETTINGS)
    await run_until(directory, None)
    read = utils.get_predictions_from_file(str(directory.path / "predictions.jsonl"), "none", "test")
    assert [row["instance_id"] for row in read] == [task.id for task in TASKS]
    ours = json.loads((directory.path / "report-swebench.json").read_text())
    source = inspect.getsource(reporting)
    theirs = {key for key in re.findall(r'^        "(\w+)": ', source, re.MULTILINE)}
    assert theirs == set(ours)


def begun(path: Path, *, resolved: bool | None = True) -> EvaluationDirectory:
    """A directory with one result."""
    directory = EvaluationDirectory(path, SETTINGS)
    directory.record(EpisodeResult("owner/repo@0", 0, resolved, "submitted", 1, 1.0), None)
    return directory


def test_another_evaluation_is_refused_the_directory(tmp_path: Path) -> None:
    begun(tmp_path)
    EvaluationDirectory(tmp_path, dict(reversed(SETTINGS.items())))
    with pytest.raises(ConfigError, match=r'with policy "told", this one has "gold": choose another --out'):
        EvaluationDirectory(tmp_path, {**SETTINGS, "policy": "gold"})


def test_an_evaluation_in_which_nothing_was_graded_leaves_its_directory_free(tmp_path: Path) -> None:
    EvaluationDirectory(tmp_path, SETTINGS)
    EvaluationDirectory(tmp_path, {**SETTINGS, "policy": "never begun before"})
    begun(tmp_path, resolved=None)
    other = EvaluationDirectory(tmp_path, {**SETTINGS, "policy": "gold"})
    assert other.results() == []
    other.record(EpisodeResult("owner/repo@0", 0, True, "submitted", 1, 1.0), None)
    assert json.loads((tmp_path / "settings.json").read_text())["policy"] == "gold"


def test_a_setting_that_the_directory_is_older_than_has_its_default(tmp_path: Path) -> None:
    begun(tmp_path)
    EvaluationDirectory(tmp_path, {**SETTINGS, "new": [1]}, defaults={"new": (1,), "policy": "other"})
    with pytest.raises(ConfigError, match=r"with new \[1\], this one has \[2\]: choose another --out"):
        EvaluationDirectory(tmp_path, {**SETTINGS, "new": [2]}, defaults={"new": (1,)})
    with pytest.raises(ConfigError, match=r"with new null, this one has \[1\]"):
        EvaluationDirectory(tmp_path, {**SETTINGS, "new": [1]})


def test_a_setting_that_only_the_directory_has_is_not_compared(tmp_path: Path) -> None:
    begun(tmp_path)
    held = json.loads((tmp_path / "settings.json").read_text())
    (tmp_path / "settings.json").write_text(json.dumps(held | {"dropped by a release": 900.0}))
    EvaluationDirectory(tmp_path, SETTINGS)


RESULT = json.dumps(asdict(EpisodeResult("a", 0, True, "submitted", 1, 0.0)))


@pytest.mark.parametrize(
    "line",
    [
        *("[]", "{}", "nonsense", '{"task_id": "a", "suspected_hack": 3}'),
        RESULT.replace('"usage": null', '"usage": {"prompt": "many"}'),
        RESULT.replace('"usage": null', '"usage": {"prompt": -1}'),
    ],
)
def test_a_malformed_result_line_is_a_config_error(tmp_path: Path, line: str) -> None:
    directory = EvaluationDirectory(tmp_path, SETTINGS)
    (tmp_path / "results.jsonl").write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=r"results\.jsonl:1: not a result"):
        directory.results()


@given(n=st.integers(1, 8), data=st.data())
def test_pass_at_k_is_the_fraction_of_draws_with_a_resolved_sample(n: int, data: st.DataObject) -> None:
    from itertools import combinations

    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    with pytest.raises(ValueError, match="needs at least"):
        pass_at_k(n, c, n + 1)


def test_a_run_without_evaluations_can_be_evaluated() -> None:
    config = RunConfig(name="x", model=Path("m"), eval=EvalConfig(tasks=0))
    assert EvalOptions().max_tasks(config.eval) is None, "all tasks of the split"
    assert EvalOptions(tasks=3).max_tasks(config.eval) == 3
    assert EvalOptions().max_tasks(EvalConfig()) == 256


def test_an_evaluation_is_named_after_its_host_and_model(tmp_path: Path) -> None:
    config = RunConfig(name="demo", runs_dir=tmp_path, model=Path("m"))
    choice = PolicyChoice("http://127.0.0.1:31999/v1", "maker/good:1")
    assert EvalOptions(choice).directory(config).name == "127.0.0.1-31999-maker-good-1-heldout"
    assert EvalOptions(PolicyChoice("engine", greedy=True)).directory(config).name == "engine-heldout-greedy"
