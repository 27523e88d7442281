"""``ledger.jsonl`` and ``agent-rl ledger``: the proof finds what is wrong, and only that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from support.trajectories import trajectory

from agent_rl.commands.runs import check_ledger
from agent_rl.controller.async_rollout.task_ledger import (
    NAME,
    LedgerFile,
    LedgerRow,
    Outcome,
    faults,
    gaps,
    read_ledger,
)
from agent_rl.errors import AgentRlError, UserError
from agent_rl.rollout.records import write_trajectories
from agent_rl.types import Group

KEPT, DISCARDED, LEFT_OUT = Outcome.KEPT, Outcome.DISCARDED, Outcome.LEFT_OUT


def write_run(run: Path, *steps: dict[int, Outcome]) -> LedgerFile:
    """A run whose task at a position is named after it; its rows and its trajectories."""
    history = LedgerFile(run)
    for step, outcomes in enumerate(steps, 1):
        ended = [f"task-{at}" for at, outcome in outcomes.items() if outcome in (KEPT, DISCARDED)]
        groups = [Group(name, (trajectory(0.0, task_id=name), trajectory(1.0, task_id=name))) for name in ended]
        write_trajectories(run, step, groups)
        history.append(LedgerRow(step, outcomes, tuple(ended)))
    return history


def test_a_whole_run_is_proven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = write_run(tmp_path, {0: KEPT, 2: KEPT}, {1: KEPT, 3: LEFT_OUT, 4: DISCARDED, 5: KEPT})
    check_ledger(tmp_path, Console(highlight=False, width=200))
    said = capsys.readouterr().out
    assert "2 steps took 6 data positions: 4 trained, 1 discarded, 0 dropped, 1 left out" in said
    assert "0 earlier positions were open" in said
    assert "every position was used exactly once" in said
    assert "interrupted" not in said
    rows = ({"recover/episodes": 2.0, "recover/turns": 7.0, "recover/differed": 1.0}, {}, {"recover/turns": 1.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    check_ledger(tmp_path, Console(highlight=False, width=200))
    assert "2 interrupted episodes resumed and reused 8 turns; 1 restarted" in capsys.readouterr().out
    path = tmp_path / NAME
    inode, whole = path.stat().st_ino, path.read_bytes()
    path.write_bytes(whole[:-9])
    assert [row.step for row in read_ledger(tmp_path)] == [1], "a kill within the write of a row"
    LedgerFile(tmp_path).append(LedgerRow(2, {1: KEPT}, ("task-1",)))
    assert [row.step for row in read_ledger(tmp_path)] == [1, 2]
    assert path.stat().st_ino == inode, "a step appends"
    history.forget_after(1)
    assert [row.step for row in read_ledger(tmp_path)] == [1]
    assert gaps(read_ledger(tmp_path)) == [1]
    assert history.counts()["ledger/trained"] == 2


def test_faults_of_a_ledger_are_found(tmp_path: Path) -> None:
    write_run(tmp_path, {0: KEPT, 1: KEPT}, {1: KEPT, 2: KEPT})
    assert faults(tmp_path, read_ledger(tmp_path)) == ["position 1 ended in step 1 and again in step 2"]
    write_trajectories(tmp_path, 2, [])
    (tmp_path / "trajectories" / "step-000001.jsonl.zst").unlink()
    rows = [row for row in read_ledger(tmp_path) if row.step == 2]
    found = "\n".join(faults(tmp_path, read_ledger(tmp_path)))
    assert "step 1 has no trajectories" in found
    assert "to other tasks than its groups" in found
    assert faults(tmp_path, rows)[0] == "steps out of order: [2]"
    with pytest.raises(AgentRlError, match="again in step 2"):
        check_ledger(tmp_path, Console(quiet=True))


def test_a_directory_without_one_and_a_damaged_one_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected the directory of a run"):
        check_ledger(tmp_path, Console(quiet=True))
    (tmp_path / NAME).write_text('{"step": 1}\n')
    with pytest.raises(AgentRlError, match="invalid ledger"):
        read_ledger(tmp_path)
