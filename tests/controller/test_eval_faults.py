"""An evaluation in real sandboxes, killed at random while sandboxes break, gives the report of one that nothing
happened to."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent_rl.evaluation.report import wilson_interval
from agent_rl.rollout.jsonl_zst import encode_rows
from agent_rl.rollout.scripted_policies import gold, noop
from envs import EnvContext, Task
from envs.mini import MiniEnvironment, generate, to_record
from tools.formats import tool_format

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "count", "kills"),
    [
        pytest.param("bubblewrap", 16, 2, marks=pytest.mark.bubblewrap),
        pytest.param("docker", 10, 1, marks=[pytest.mark.docker, pytest.mark.exhaustive]),
    ],
)
@pytest.mark.slow
def test_killed_while_sandboxes_break_it_reports_the_same(tmp_path: Path, backend: str, count: int, kills: int) -> None:
    solved = record_policy(tmp_path / "said.jsonl.zst", count)
    out, seed = tmp_path / "out", random.randrange(1000)
    options = f"--tasks {count} --policy replay:{tmp_path}/said.jsonl.zst --out {out} --split heldout".split()
    overrides = [f"sandbox.backend={backend}", "env.name=faulty_mini:FaultyMini", "rollout.concurrency=2"]
    evaluation = [sys.executable, "-m", "agent_rl.cli", "eval", "configs/quickstart.yaml", *options, *overrides]
    moments = random.Random(seed)
    for _ in range(kills):
        run_and_kill(evaluation, out / "results.jsonl", moments.randint(1, count // 4))
    last = start(evaluation, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said, _ = last.communicate(timeout=240)
    assert last.returncode == 0, said
    assert f"of {count} episodes are there already" in said

    report = json.loads((out / "report.json").read_text())
    told = f"seed {seed}: {report}"
    assert {row["task_id"]: row["resolved"] for row in report["outcomes"]} == solved, told
    assert (report["graded"], report["ungraded"]) == (count, 0), told
    assert report["pass_at_1"] == pytest.approx(sum(solved.values()) / count), told
    assert report["interval"] == pytest.approx(wilson_interval(report["pass_at_1"], count))
    assert report["infrastructure_failures"] >= 1, told
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert sorted(line["task_id"] for line in lines) == sorted(solved), "every sample is graded once"
    logs = [out / "logs" / task / "0.log" for task in solved if solved[task]]
    assert all("short test summary" in log.read_text() for log in logs), "what the tests printed is kept"


def record_policy(path: Path, count: int) -> dict[str, int]:
    """Write a recording that solves half of the tasks and gives the others up; whether each is solved, by task."""
    environment, fmt = MiniEnvironment(EnvContext(None)), tool_format("xml")
    solved: dict[str, int] = {}
    rows = []
    for number, record in enumerate(map(to_record, generate("heldout", count, 0))):
        solved[record.id] = number % 2
        calls = (gold if number % 2 else noop)(environment, Task(record.id, "mini", record.model_dump()))
        rows.append({"task_id": record.id, "turns": [{"text": fmt.render(call)} for call in calls]})
    path.write_bytes(encode_rows(rows)[0])
    return solved


def run_and_kill(command: list[str], results: Path, after: int) -> None:
    """Start ``command`` and end it with SIGKILL once it has written ``after`` results more."""
    held = count_lines(results)
    run = start(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while count_lines(results) < held + after:
        assert run.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.kill()
    run.wait()


def start(command: list[str], **options: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **options)


def count_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0
