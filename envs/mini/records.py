"""A generated task as a record of the shape all software-engineering tasks share (R2E-Gym's row and our own fields)."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from envs.mini.functions import Case
from envs.mini.generator import MiniTask
from envs.swe.patches import diff_files
from envs.swe.records import SweRecord, commit_content, parse_record

TEST_COMMAND = "python3 -S -E tests/run.py"


def to_record(task: MiniTask) -> SweRecord:
    """The record of ``task``: what the agent starts from, the hidden tests, and the true fix."""
    tests = _tests(task)
    expected = {f"tests/{name}": "PASSED" for name in _test_ids(task)}
    row: dict[str, Any] = {
        "repo_name": task.id,
        "commit_hash": hashlib.sha256(json.dumps(task.files, sort_keys=True).encode()).hexdigest()[:40],
        "parsed_commit_content": commit_content(task.files, task.fixed, f"fix {task.family} in {task.path}"),
        "expected_output_json": json.dumps(expected),
        "problem_statement": f"[ISSUE]\n{task.issue}\n[/ISSUE]",
        "modified_files": [task.path],
        "relevant_files": [task.path],
        "num_non_test_files": 1,
        "num_non_test_func_methods": 1,
        "num_non_test_lines": 1,
        "task_id": task.id,
        "files": task.files,
        "tests": tests,
        "test_command": TEST_COMMAND,
        "gold_patch": diff_files(task.files, task.fixed),
    }
    return parse_record(row, task.id)


@cache
def runner_source() -> str:
    """The source of the hidden ``tests/run.py``."""
    return (Path(__file__).parent / "runner.py").read_text()


def _tests(task: MiniTask) -> dict[str, str]:
    files = {"tests/run.py": runner_source()}
    for path, functions in task.cases.items():
        module = path.removesuffix(".py")
        names = ", ".join(name for name, _ in functions)
        bodies = [_test(name, index, case) for name, cases in functions for index, case in enumerate(cases)]
        files[f"tests/test_{path}"] = f"from {module} import {names}\n\n\n" + "\n\n".join(bodies)
    return files


def _test(name: str, index: int, case: Case) -> str:
    return f"def test_{name}_{index}():\n    assert {case.call} == {case.result}\n"


def _test_ids(task: MiniTask) -> list[str]:
    return [
        f"test_{path}::test_{name}_{index}"
        for path, functions in task.cases.items()
        for name, cases in functions
        for index in range(len(cases))
    ]
