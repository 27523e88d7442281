"""``agent-rl eval`` in the R2E-Gym scaffold finishes with a model in a repetition loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
    create, view = {"command": "create", "file_text": ELIFS}, {"command": "view"}
    insert = {"command": "insert", "insert_line": "0", "new_str": "b = 1", "enable_linting": "True"}
    calls = create | {"enable_linting": "True"}, create, view, view | {"concise": "True"}, insert
    fmt = tool_format("r2egym")
    edits = [fmt.render(ToolCall("file_editor", {"path": "deep.py", **arguments})) for arguments in calls]
    return [*edits, fmt.render(ToolCall("finish", {"command": "submit"}))]


def test_an_evaluation_of_a_model_that_writes_6000_elif_finishes(tmp_path: Path) -> None:
    recording, out, config = tmp_path / "said.jsonl.zst", tmp_path / "out", tmp_path / "config.yaml"
    said = [{"text": text} for text in turns()]
    tasks = [to_record(task).id for task in generate("heldout", TASKS, 0)]
    recording.write_bytes(encode_rows({"task_id": task, "turns": said} for task in tasks)[0])
    limits = {"max_turns": 10, "max_tokens": 4_000_000, "max_new_tokens": 1_000_000, "concurrency": 2}
    config.write_text(yaml.safe_dump({"name": "hostile", "model": "none", "rollout": limits}))
    options = f"--tasks {TASKS} --out {out} --policy replay:{recording} --split heldout sandbox.backend=bubblewrap"
    command = [sys.executable, "-m", "agent_rl.cli", "eval", str(config), *options.split()]
    command += ["env.name=mini", "env.scaffold=r2egym"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [(row["stop"], row["resolved"], row["turns"]) for row in rows] == [("submitted", False, 6)] * TASKS
    report = json.loads((out / "report.json").read_text())
    assert (report["graded"], report["infrastructure_failures"]) == (TASKS, 0)
