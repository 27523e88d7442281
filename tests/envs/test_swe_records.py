"""Task records: R2E-Gym's shape, local tasks, and broken rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from envs import TaskRecordError
from envs.swe import SweRecord, read_jsonl, write_jsonl
from envs.swe.diff.git_diff import patched_paths
from tests.envs.dataset_rows import commit_content

LOCAL: dict[str, Any] = {
    "repo_name": "demo",
    "task_id": "demo-1",
    "expected_output_json": '{"tests/test_a.py::test_a": "PASSED"}',
    "problem_statement": "It is broken.",
    "files": {"a.py": "x = 1\n"},
    "tests": {"tests/test_a.py": "def test_a(): pass\n"},
    "test_command": "python3 -m pytest -rA tests",
}
R2E: dict[str, Any] = {
    "repo_name": "sympy",
    "docker_image": "namanjain12/sympy_final:abc",
    "commit_hash": "0123456789abcdef",
    "parsed_commit_content": commit_content(
        {"sympy/a.py": "x = 1\n", "sympy/tests/test_a.py": "old\n"}, {"sympy/a.py": "x = 2\n", "sympy/b.py": "new\n"}
    ),
    "execution_result_content": "{}",
    "expected_output_json": '{"\\u001b[1mtest_a\\u001b[0m": "PASSED"}',
    "problem_statement": "[ISSUE]\nwrong\n[/ISSUE]",
    "prompt": "p",
    "modified_files": ["sympy/a.py"],
    "relevant_files": '["sympy/a.py", "sympy/b.py"]',
    "modified_entity_summaries": [{"ast_type_str": "FunctionDef"}],
    "num_non_test_files": 1,
    "num_non_test_func_methods": 2,
    "num_non_test_lines": 3,
}


def test_an_r2e_row_is_read_as_it_is() -> None:
    record = SweRecord.model_validate(R2E)
    assert record.id == "sympy@0123456789ab"
    assert not record.is_local
    assert record.expected == {"test_a": "PASSED"}
    assert record.command == "bash run_tests.sh"


def test_the_gold_patch_of_an_r2e_row_comes_from_its_commit_without_tests() -> None:
    record = SweRecord.model_validate(R2E)
    assert patched_paths(record.gold) == {"sympy/a.py", "sympy/b.py"}
    assert "+x = 2\n" in record.gold


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    records = [SweRecord.model_validate(LOCAL), SweRecord.model_validate(R2E)]
    assert write_jsonl(tmp_path / "deep" / "tasks.jsonl", records) == 2
    assert read_jsonl(tmp_path / "deep" / "tasks.jsonl") == records


def test_calls_need_no_negative_control() -> None:
    calls = {"a": {"module": "a", "call": "f()", "result": "1"}}
    assert SweRecord.model_validate({**LOCAL, "calls": calls}).verifiable == "yes"
    assert SweRecord.model_validate(LOCAL).verifiable == ""


def test_a_write_that_breaks_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    write_jsonl(path, [SweRecord.model_validate(LOCAL)])

    def breaks() -> Any:
        yield SweRecord.model_validate(R2E)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_jsonl(path, breaks())
    assert [record.id for record in read_jsonl(path)] == ["demo-1"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"expected_output_json": "{}"}, "expected_output_json: empty"),
        ({"expected_output_json": "[]"}, "expected_output_json: empty or no object"),
        ({"expected_output_json": "{"}, "expected_output_json: not JSON"),
        ({"expected_output_json": '{"a": []}'}, r"status \[\] of 'a' is none of"),
        ({"expected_output_json": "3"}, "expected_output_json: empty or no object"),
        ({"expected_output_json": '{"a": "PASSED", "a": "FAILED"}'}, "test 'a' is both PASSED and FAILED"),
        ({"expected_output_json": '{"a": "PASSED", "\\u001b[1ma": "ERROR"}'}, "test 'a' is both PASSED and ERROR"),
        ({"files": {}, "docker_image": "i", "expected_output_json": '{"": "ERROR"}'}, "its keys name no test"),
        ({"expected_output_json": '{"a": "passed"}'}, "'passed' of 'a' is none of"),
        ({"problem_statement": ""}, "problem_statement: "),
        ({"problem_statement": None}, "problem_statement: .*got None"),
        ({"files": {"/etc/passwd": ""}}, "files: path '/etc/passwd'"),
        ({"tests": {"../x.py": ""}}, "tests: path '../x.py'"),
        ({"files": {".git/hooks/pre-commit": ""}}, "files: path '.git/hooks/pre-commit'"),
        ({"files": {}}, "neither files nor docker_image"),
        ({"test_command": ""}, "test_command is empty"),
        ({"files": {"a.py": 3}}, "files.a.py: .*string"),
    ],
)
def test_a_broken_row_is_told_in_one_line(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(f"{json.dumps(LOCAL)}\n{json.dumps({**LOCAL, 'task_id': 'demo-2', **change})}\n")
    with pytest.raises(TaskRecordError, match=says) as error:
        read_jsonl(path)
    assert str(error.value).startswith(f"{path}: row 2: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{oops", "row 1: not JSON"),
        ("[1]", "row 1: a list; right would be"),
        ("", "contains no task record"),
        ('{"repo_name": "x"}', "row 1: expected_output_json: required, and not given"),
        (f"{json.dumps(LOCAL)}\n\n{json.dumps(LOCAL)}", "row 3: task_id: 'demo-1' is the id of row 1 too"),
    ],
)
def test_a_broken_file_is_told_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    with pytest.raises(TaskRecordError, match=says):
        read_jsonl(path)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(TaskRecordError, match="no such file"):
        read_jsonl(tmp_path / "none.jsonl")
