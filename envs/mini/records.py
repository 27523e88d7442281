"""A generated task as a record of the shape all software-engineering tasks share (R2E-Gym's row and our own fields)."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from envs.mini.generator import MiniTask
from envs.swe.calls import Call
from envs.swe.diff.git_diff import diff_files
from envs.swe.records import SweRecord, parse_record


def to_record(task: MiniTask) -> SweRecord:
    """The record of ``task``: what the agent starts from, the hidden tests, and the true fix."""
    calls = _calls(task)
    row: dict[str, Any] = {
        "repo_name": task.id,
        "commit_hash": hashlib.sha256(json.dumps(task.files, sort_keys=True).encode()).hexdigest()[:40],
        "expected_output_json": json.dumps(dict.fromkeys(calls, "PASSED")),
        "problem_statement": f"[ISSUE]\n{task.issue}\n[/ISSUE]",
        "task_id": task.id,
        "files": task.files,
        "calls": calls,
        "gold_patch": diff_files(task.files, task.fixed),
    }
    return parse_record(row, task.id)


def _calls(task: MiniTask) -> dict[str, Call]:
    """The hidden tests by node ids such as pytest would give them."""
    return {
        f"tests/test_{path}::test_{name}_{index}": Call(
            module=path.removesuffix(".py"), call=case.call, result=case.result
        )
        for path, functions in task.cases.items()
        for name, cases in functions
        for index, case in enumerate(cases)
    }
