"""``agent-rl runs``: every run below a directory in a line."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from agent_rl.cli import app


def listed(*directories: Path, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["runs", *map(str, directories)], env={"COLUMNS": "200"})
    assert (result.exit_code == 0) is (code == 0), result.output
    return " ".join((result.output or str(result.exception)).split())


def make(directory: Path, *, steps: int, total: int, stopped: bool = False) -> None:
    directory.mkdir(parents=True)
    rows = [{"step": step, "reward/mean": 0.5} for step in range(1, steps + 1)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "config.yaml").write_text(f"train: {{steps: {total}}}\n")
    report = {"pass_at_1": 0.75, "interval": [0.7, 0.8]}
    (directory / "state.json").write_text(json.dumps({"evaluations": {"step-0/sampled": report}}))
    if steps == total:
        (directory / "summary.json").write_text("{}")
    if stopped:
        (directory / "guard.jsonl").write_text(json.dumps({"step": steps, "event": "stop", "text": "k3"}) + "\n")


def test_runs_are_listed_with_their_state(tmp_path: Path) -> None:
    make(tmp_path / "one", steps=20, total=20)
    make(tmp_path / "two", steps=3, total=20)
    make(tmp_path / "three", steps=4, total=20, stopped=True)
    (tmp_path / "nothing").mkdir()
    text = listed(tmp_path)
    assert "one │ train │ 20 of 20 │ 75.0 % [70.0, 80.0] │ 75.0 % at 0 │ finished" in text
    assert "two │ train │ 3 of 20 │ 75.0 % [70.0, 80.0] │ 75.0 % at 0 │ stopped" in text
    assert "three │ train │ 4 of 20 │ 75.0 % [70.0, 80.0] │ 75.0 % at 0 │ guard │ 1" in text
    assert "nothing" not in text
    assert "20 of 20" in listed(tmp_path / "one")


def test_a_directory_without_a_run_is_one_line(tmp_path: Path) -> None:
    assert "no run found" in listed(tmp_path, code=2)
    assert "not a directory; expected" in listed(tmp_path / "absent", code=2)
