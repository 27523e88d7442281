"""Rows from every place they come from, and all that is wrong with them error at once."""

from __future__ import annotations

import json
import logging
import re
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from envs import EnvContext, TaskRecordError
from envs.swe import SweEnvironment, read_records
from envs.swe.sources import BrokenRowsError
from envs.swe.swebench import eval_script, judge_swebench_log
from tests.envs.test_swe_records import LOCAL, R2E

CLASSIC: dict[str, Any] = {
    "repo": "psf/requests",
    "instance_id": "psf__requests-1142",
    "base_commit": "22623bd8c265b78b161542663ee980738441c307",
    "patch": "diff --git a/r.py b/r.py\n--- a/r.py\n+++ b/r.py\n@@ -1 +1 @@\n-a\n+b\n",
    "test_patch": "diff --git a/test_r.py b/test_r.py\n--- a/test_r.py\n+++ b/test_r.py\n@@ -1 +1 @@\n-a\n+b\n",
    "problem_statement": "GET sends a Content-Length.",
    "hints_text": "",
    "created_at": "2013-01-25T05:19:16Z",
    "version": "1.1",
    "FAIL_TO_PASS": '["test_r.py::test_a"]',
    "PASS_TO_PASS": '["test_r.py::test_b", "test_r.py::test_c"]',
    "environment_setup_commit": "22623bd8c265b78b161542663ee980738441c307",
}
GRADABLE = {
    **CLASSIC,
    "image": "example/requests:1142",
    "eval_script": "#!/bin/bash\npytest -rA test_r.py\n",
    "log_parser": "parse_log_pytest",
    "eval_type": "pass_and_fail",
    "FAIL_TO_PASS": ["test_r.py::test_a"],
    "difficulty": "15 min - 1 hour",
}
NO_SANDBOXES = EnvContext(None)  # type: ignore[arg-type]


def write(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_a_classic_row_takes_the_image_that_the_harness_publishes(tmp_path: Path) -> None:
    (record,) = read_records(write(tmp_path / "a.jsonl", CLASSIC)).records
    assert record.id == "psf__requests-1142"
    assert record.docker_image == "swebench/sweb.eval.x86_64.psf_1776_requests-1142:latest"
    assert (record.repo_name, record.commit_hash[:8], record.gold) == ("psf/requests", "22623bd8", CLASSIC["patch"])
    assert record.hidden == {"test_r.py"}
    assert record.expected == dict.fromkeys(("test_r.py::test_a", "test_r.py::test_b", "test_r.py::test_c"), "PASSED")
    assert record.swebench is not None
    assert record.swebench.missing == ("eval_script", "log_parser", "eval_type")


def test_a_row_of_swebench_5_keeps_what_grades_it(tmp_path: Path) -> None:
    (record,) = read_records(write(tmp_path / "a.jsonl", GRADABLE)).records
    assert record.docker_image == "example/requests:1142"
    assert record.swebench is not None
    assert record.swebench.missing == ()
    instance = record.swebench.instance(record.id, record.repo_name)
    same = ("instance_id", "repo", "image", "eval_script", "log_parser", "eval_type", "version")
    assert {key: instance[key] for key in same} == {key: GRADABLE[key] for key in same}
    assert list(instance["PASS_TO_PASS"]) == json.loads(CLASSIC["PASS_TO_PASS"])
    assert type(record).model_validate(record.model_dump()) == record  # as it goes through a Task


def test_classic_rows_are_refused_where_they_would_have_to_be_graded(tmp_path: Path) -> None:
    environment = SweEnvironment(
        NO_SANDBOXES, write(tmp_path / "a.jsonl", GRADABLE, {**CLASSIC, "instance_id": "b__b-1"})
    )
    with pytest.raises(
        TaskRecordError, match=r"1 of 2 rows \(b__b-1, \.\.\.\) lack eval_script, log_parser, eval_type"
    ):
        environment.tasks("test")


def test_classic_rows_are_graded_as_the_rows_of_their_ids_in_specs(tmp_path: Path) -> None:
    specs = write(tmp_path / "specs.jsonl", GRADABLE, {**GRADABLE, "instance_id": "other__other-1"})
    classic = write(tmp_path / "classic.jsonl", CLASSIC)
    (task,) = SweEnvironment(NO_SANDBOXES, classic, specs=specs).tasks("test")
    (whole,) = SweEnvironment(NO_SANDBOXES, write(tmp_path / "whole.jsonl", GRADABLE)).tasks("test")
    assert task == whole
    moved = write(tmp_path / "moved.jsonl", {**CLASSIC, "base_commit": "f" * 40})
    with pytest.raises(TaskRecordError, match=r"row 1: base_commit: 'fff.*', and '22623bd8.*' in specs: not the same"):
        SweEnvironment(NO_SANDBOXES, moved, specs=specs).tasks("test")
    unknown = write(tmp_path / "unknown.jsonl", {**CLASSIC, "instance_id": "b__b-1"})
    with pytest.raises(TaskRecordError, match=r"1 of 1 rows \(b__b-1, \.\.\.\) lack eval_script.*the option specs"):
        SweEnvironment(NO_SANDBOXES, unknown, specs=specs).tasks("test")
    with pytest.raises(TaskRecordError, match=r"specs: .*classic\.jsonl: no row with instance_id and eval_script"):
        SweEnvironment(NO_SANDBOXES, unknown, specs=classic).tasks("test")


WHEEL = {
    "__init__": "import modal_is_not_needed",
    "harness/__init__": "import modal_is_not_needed",
    "harness/constants/__init__": """
MAP_REPO_VERSION_TO_SPECS = {"psf/requests": {"1.1": {"test_cmd": "pytest"}}}
FAIL_ONLY_REPOS = {"chartjs/Chart.js"}
""",
    "harness/log_parsers/__init__": """
def parse_log_pytest(log): ...
MAP_REPO_TO_PARSER = {"psf/requests": parse_log_pytest}
""",
    "harness/test_spec/__init__": "",
    "harness/test_spec/create_scripts": """
def make_eval_script_list(row, specs, env, directory, commit, patch):
    return [f"cd {directory}", ": '>>>>> Start Test Output'", specs["test_cmd"], ": '>>>>> End Test Output'"]
""",
}
"""The parts of swebench 4's wheel that are used."""


def wheel_of(path: Path, files: Mapping[str, str] = WHEEL) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(f"swebench/{name}.py", text)
    return path


def test_classic_rows_are_graded_offline_with_the_tables_of_a_swebench_4_wheel(tmp_path: Path) -> None:
    pytest.importorskip("swebench")
    wheel = wheel_of(tmp_path / "swebench-4.1.0-py3-none-any.whl")
    rows = write(tmp_path / "rows.jsonl", CLASSIC | {"difficulty": "<15 min fix"})
    (task,) = SweEnvironment(NO_SANDBOXES, rows, specs=wheel).tasks("test")
    record = read_records(rows, specs=wheel).records[0]
    assert task.id == record.id == "psf__requests-1142"
    assert "cd /testbed" in eval_script(record)
    passed = "".join(f"PASSED {test}\n" for test in record.expected)
    for log, resolved in ((passed, True), (passed.replace("PASSED", "FAILED", 1), False)):
        verdict = judge_swebench_log(record, f">>>>> Start Test Output\n{log}>>>>> End Test Output\n")
        assert verdict is not None
        assert verdict.resolved is resolved


def test_a_wheel_that_cannot_grade_a_row_is_named_in_one_line(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path / "swebench.whl")
    rows = write(tmp_path / "rows.jsonl", CLASSIC, CLASSIC | {"instance_id": "b__b-1", "version": "99"})
    with pytest.raises(TaskRecordError, match=r"1 of 2 rows \(b__b-1, \.\.\.\) lack eval_script"):
        SweEnvironment(NO_SANDBOXES, rows, specs=wheel).tasks("test")
    unknown = write(tmp_path / "unknown.jsonl", CLASSIC | {"version": "99"})
    for row_file, specs, complaint in (
        (unknown, wheel, "swebench.whl: knows the repository and version of none of the 1 rows"),
        (rows, wheel_of(tmp_path / "other.whl", {}), "other.whl: cannot be read (ModuleNotFoundError"),
        (rows, tmp_path / "absent.whl", "absent.whl: no such file; right would be a wheel of swebench 4"),
    ):
        with pytest.raises(TaskRecordError, match=re.escape(complaint)) as caught:
            SweEnvironment(NO_SANDBOXES, row_file, specs=specs).tasks("test")
        assert "\n" not in str(caught.value)


def test_a_task_repository_of_swebenchs_holds_the_same_rows(tmp_path: Path) -> None:
    repo = pytest.importorskip("swebench.task.repo")
    (tmp_path / "sweb.yaml").write_text("datasets: [SWE-bench/SWE-bench_Verified]\n")
    tests = {key: json.loads(CLASSIC[key]) for key in repo.TEST_KEYS}
    for name, split in {"a__a-1": "test", "b__b-1": "dev", "c__c-1": "test"}.items():
        directory = tmp_path / "tasks" / name
        directory.mkdir(parents=True)
        files = {file: GRADABLE[column] for column, file in repo.AS_FILE.items()} | {"tests.json": json.dumps(tests)}
        short = {key: GRADABLE[key] for key in ("repo", "base_commit", "version", "image", "log_parser", "eval_type")}
        files["task.yaml"] = repo.dump_yaml({**short, "instance_id": name, "split": split})
        for file, text in files.items():
            (directory / file).write_text(text)
    assert [task.id for task in SweEnvironment(NO_SANDBOXES, tmp_path, data_split="test").tasks("test")] == [
        "a__a-1",
        "c__c-1",
    ]
    (row,) = read_records(write(tmp_path / "a.jsonl", {**GRADABLE, "instance_id": "a__a-1"})).records
    assert row == read_records(tmp_path).records[0]
    (tmp_path / "tasks/b__b-1/eval.sh").unlink()
    with pytest.raises(TaskRecordError, match=r"row 2: b__b-1: not a complete task .*eval\.sh"):
        read_records(tmp_path)


def test_json_and_parquet_files_and_saved_data_sets_hold_the_same_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [R2E | {"relevant_files": ["sympy/a.py"]}, R2E | {"commit_hash": "fedcba", "relevant_files": None}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    data = datasets.Dataset.from_list(rows)
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "dev": data.select([0])}).save_to_disk(tmp_path / "two")
    wanted = list(read_records(write(tmp_path / "a.jsonl", *rows)).records)
    assert [record.id for record in wanted] == ["sympy@0123456789ab", "sympy@fedcba"]
    for name in ("a.json", "a.parquet", "one"):
        assert list(read_records(tmp_path / name).records) == wanted, name
    assert list(read_records(tmp_path / "two", split="train").records) == wanted
    with pytest.raises(TaskRecordError, match="data_split is None; it has dev, train"):
        read_records(tmp_path / "two")
    assert len(SweEnvironment(NO_SANDBOXES, tmp_path / "two", data_split="dev").tasks("heldout")) == 1


def test_a_data_set_is_loaded_as_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``datasets.load_dataset`` takes a directory that is laid out as the hub's repositories for one of them."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "Owner/Name/data").mkdir(parents=True)
    rows = datasets.Dataset.from_list([R2E | {"relevant_files": ["sympy/a.py"]}])
    rows.to_parquet(tmp_path / "Owner/Name/data/train-00000-of-00001.parquet")
    rows.to_parquet(tmp_path / "Owner/Name/data/dev_10pr-00000-of-00001.parquet")
    monkeypatch.chdir(tmp_path)
    for source in ("Owner/Name", tmp_path / "Owner/Name"):
        environment = SweEnvironment(NO_SANDBOXES, source, data_split="train")
        assert [task.id for task in environment.tasks("train")] == ["sympy@0123456789ab"]
    with pytest.raises(TaskRecordError, match=r"Owner/Name: .*nosplit"):
        read_records("Owner/Name", split="nosplit")


def test_a_data_set_that_is_not_there_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(TaskRecordError, match=r"nothing/here: no such data set, or it cannot be read \(") as error:
        read_records(tmp_path / "nothing/here")
    assert "\n" not in str(error.value)


def test_a_silent_hub_is_told_in_one_line_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(TaskRecordError, match=r"^nobody/none: no such data set, or it cannot be read \([^\n]*$"):
        read_records("nobody/none", split="train")
    assert time.monotonic() - started < 10, "its client alone asks for half a minute"
    assert capfd.readouterr().err == ""


def test_a_file_that_is_no_parquet_is_told(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_text("hello")
    with pytest.raises(TaskRecordError, match=r"a\.parquet: not Parquet \("):
        read_records(tmp_path / "a.parquet")


BROKEN = (
    LOCAL,
    {**LOCAL, "task_id": "demo-2", "expected_output_json": "{}", "problem_statement": ""},
    R2E,
    {**GRADABLE, "FAIL_TO_PASS": "[]"},
    {key: value for key, value in CLASSIC.items() if key != "test_patch"},
    {**GRADABLE, "FAIL_TO_PASS": "[oops"},
    LOCAL,
)
PROBLEMS = (
    "row 2: expected_output_json: empty",
    "row 2: problem_statement: ",
    "row 4: swebench.FAIL_TO_PASS: ",
    "row 5: swebench.test_patch: required, and not given",
    "row 6: swebench.FAIL_TO_PASS: not JSON",
    "row 7: task_id: 'demo-1' is the id of row 1 too; ids must be unique",
    "row 8: not JSON",
)


def test_all_broken_rows_are_told_with_their_fields(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *BROKEN)
    path.write_text(path.read_text() + "{oops\n")
    with pytest.raises(BrokenRowsError) as error:
        read_records(path)
    problems = error.value.problems
    assert len(problems) == len(PROBLEMS), problems
    for problem, start in zip(problems, PROBLEMS, strict=True):
        assert problem.startswith(start)
    assert str(error.value).startswith(f"{path}: 7 broken fields (skip_broken: true")


def test_broken_rows_are_left_out_only_when_asked_and_then_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl", *BROKEN)
    environment = SweEnvironment(NO_SANDBOXES, path, skip_broken=True)
    with caplog.at_level(logging.WARNING):
        assert [task.id for task in environment.tasks("train")] == ["demo-1", "sympy@0123456789ab"]
    assert len(environment.broken) == len(PROBLEMS) - 1
    assert f"{path}: 5 broken rows skipped, 2 left" in caplog.text
    with pytest.raises(BrokenRowsError):
        SweEnvironment(NO_SANDBOXES, path).tasks("train")


def test_a_file_of_nothing_but_broken_rows_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(TaskRecordError, match="contains no valid task record"):
        read_records(write(tmp_path / "a.jsonl", {"repo_name": "x"}), skip_broken=True)


def test_a_directory_with_a_file_a_split(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", LOCAL)
    (tmp_path / "heldout.json").write_text(json.dumps([R2E]))
    environment = SweEnvironment(NO_SANDBOXES, tmp_path)
    assert [task.id for task in environment.tasks("heldout")] == ["sympy@0123456789ab"]
    with pytest.raises(TaskRecordError, match=r"no split 'test'; it holds: heldout, train"):
        environment.tasks("test")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskRecordError, match="the directory has no file of task records"):
        SweEnvironment(NO_SANDBOXES, tmp_path / "empty").tasks("train")
