"""``agent-rl eval`` in the R2E-Gym scaffold finishes with a model in a repetition loop and with a broken grader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_rl.rollout.jsonl_zst import encode_rows
from envs.mini import generate, to_record
from tools import ToolCall, tool_format

pytestmark = [pytest.mark.bubblewrap, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
ELIFS = "if a:\n    pass\n" + "elif a:\n    pass\n" * 6000
TASKS = 2


def turns() -> list[str]:
    """A file of 6,000 ``elif`` is made, viewed and edited; then all is submitted."""
    calls = [
        {"command": "create", "path": "deep.py", "file_text": ELIFS, "enable_linting": "True"},
        {"command": "create", "path": "deep.py", "file_text": ELIFS},
        {"command": "view", "path": "deep.py"},
        {"command": "view", "path": "deep.py", "concise": "True"},
        {"command": "insert", "path": "deep.py", "insert_line": "0", "new_str": "b = 1", "enable_linting": "True"},
    ]
    said = [tool_format("r2egym").render(ToolCall("file_editor", arguments)) for arguments in calls]
    return [*said, tool_format("r2egym").render(ToolCall("finish", {"command": "submit"}))]


def evaluate(tmp_path: Path, environment: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    recording, out, config = tmp_path / "said.jsonl.zst", tmp_path / "out", tmp_path / "config.yaml"
    said = [{"text": text} for text in turns()]
    tasks = [to_record(task).id for task in generate("heldout", TASKS, 0)]
    recording.write_bytes(encode_rows({"task_id": task, "turns": said} for task in tasks)[0])
    limits = {"max_turns": 10, "max_tokens": 4_000_000, "max_new_tokens": 1_000_000, "concurrency": 2}
    config.write_text(yaml.safe_dump({"name": "hostile", "model": "none", "rollout": limits}))
    command = [
        sys.executable, "-m", "agent_rl.cli", "eval", str(config), "--tasks", str(TASKS), "--out", str(out),
        "--policy", f"replay:{recording}", "--split", "heldout", "sandbox.backend=bubblewrap",
        f"env.name={environment}", "env.scaffold=r2egym",
    ]  # fmt: skip
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, **paths}, capture_output=True, text=True, timeout=240)
    return run, out


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_an_evaluation_of_a_model_that_writes_6000_elif_finishes(tmp_path: Path) -> None:
    run, out = evaluate(tmp_path, "mini")
    assert run.returncode == 0, run.stderr
    assert [(row["stop"], row["resolved"], row["turns"]) for row in rows(out)] == [("submitted", False, 6)] * TASKS
    report = json.loads((out / "report.json").read_text())
    assert (report["graded"], report["infrastructure_failures"]) == (TASKS, 0)


def test_an_evaluation_whose_grader_breaks_reports_infrastructure(tmp_path: Path) -> None:
    """Its traceback is in the results; where nothing could be graded the command says in one line why."""
    run, out = evaluate(tmp_path, "faulty_mini:KeyErrorMini")
    assert run.returncode == 1, run.stderr
    last = run.stderr.splitlines()[-1]
    assert last.startswith(f"error: none of {TASKS} tasks could be graded; {TASKS} of them: KeyError: 'status' (")
    for row in rows(out):
        assert (row["resolved"], row["failures"]) == (None, 4), "tried again on the budget of 3 retries"
        assert "Traceback (most recent call last):" in row["error"]
