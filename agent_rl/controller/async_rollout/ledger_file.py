"""``ledger.jsonl`` of a run: what became of every position that its steps took, a line a step; and the proof of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from agent_rl.controller.async_rollout.task_ledger import Outcome
from agent_rl.errors import AgentRlError
from agent_rl.rollout.jsonl_zst import read_rows
from agent_rl.rollout.records import rows_path, step_stem
from agent_rl.rollout.step_index import columns, read_sidecar
from agent_rl.utils.run_files import write_atomic

NAME = "ledger.jsonl"


@dataclass(frozen=True, slots=True)
class StepRow:
    """What became of the positions that a step's batch took, and of which task each group of trajectories is."""

    step: int
    outcomes: Mapping[int, Outcome]
    tasks: tuple[str, ...]


class History:
    """The file, while a run writes it. It is rewritten whole at every step: it is small, and a kill leaves either the
    old or the new one."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / NAME
        self._rows = read_history(run_dir)

    def forget_after(self, step: int) -> None:
        """Drop the rows of steps later than ``step``: they are about to be done again."""
        self._rows = [row for row in self._rows if row.step <= step]
        self._write()

    def append(self, row: StepRow) -> dict[str, float]:
        """Write the row of a step; the figures then."""
        self._rows.append(row)
        self._write()
        return self.figures()

    def figures(self) -> dict[str, float]:
        """``ledger/*``: how many positions ended how, of all steps so far."""
        counts = Counter(outcome for each in self._rows for outcome in each.outcomes.values())
        return {f"ledger/{name}": float(counts[outcome]) for outcome, name in NAMES.items()}

    def _write(self) -> None:
        write_atomic(self._path, b"".join(_line(row) for row in self._rows))


NAMES = {
    Outcome.KEPT: "trained",
    Outcome.DISCARDED: "discarded",
    Outcome.DROPPED: "dropped",
    Outcome.LEFT_OUT: "left_out",
}


def _line(row: StepRow) -> bytes:
    outcomes = {str(position): outcome.value for position, outcome in row.outcomes.items()}
    return orjson.dumps({"step": row.step, "outcomes": outcomes, "tasks": row.tasks}) + b"\n"


def read_history(run_dir: Path) -> list[StepRow]:
    """The rows of a run's ``ledger.jsonl``; none where there is no such file. Raises AgentRlError for another form."""
    path = run_dir / NAME
    try:
        rows = [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
        return [
            StepRow(
                row["step"], {int(at): Outcome(outcome) for at, outcome in row["outcomes"].items()}, tuple(row["tasks"])
            )
            for row in rows
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AgentRlError(f"{path}: not a ledger: {error}") from None


def faults(run_dir: Path, rows: Iterable[StepRow]) -> list[str]:
    """What contradicts that every position of the data ended exactly once, in steps that follow each other, and that
    the trajectories on the disk are those of the steps' groups; a line each."""
    rows, found, seen = list(rows), list[str](), dict[int, int]()
    if (steps := [row.step for row in rows]) != list(range(1, len(steps) + 1)):
        found.append(f"the steps do not follow each other: {steps}")
    for row in rows:
        for position in row.outcomes:
            if position in seen:
                found.append(f"position {position} ended in step {seen[position]} and again in step {row.step}")
            seen[position] = row.step
        found += _other_trajectories(run_dir, row)
    return found


def gaps(rows: Iterable[StepRow]) -> list[int]:
    """The positions before the last one that ended which did not: groups that were still open."""
    ended = {position for row in rows for position in row.outcomes}
    return sorted(set(range(max(ended, default=-1) + 1)) - ended)


def _other_trajectories(run_dir: Path, row: StepRow) -> list[str]:
    stem = step_stem(run_dir, row.step)
    if not (path := rows_path(stem)).exists():
        return [f"step {row.step} has no trajectories: {path} is not there"]
    sidecar = read_sidecar(stem)
    table = columns(read_rows(path)) if sidecar is None else sidecar[0]
    groups = dict(zip(table["group"], table["task"], strict=True))
    if tuple(groups[index] for index in sorted(groups)) == row.tasks:
        return []
    return [f"step {row.step}: the trajectories in {path} are of other tasks than its groups"]
