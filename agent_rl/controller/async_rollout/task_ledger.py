"""Records the outcome of every position of the data. Pure bookkeeping; it refuses to count a position twice.

::

    admitted ─▶ running ─┬─▶ kept ───────┐
                         ├─▶ discarded ──┤ taken by a batch: closed
                         ├─▶ dropped ────┤
                         └─▶ left out ───┘

Positions are admitted in order without gaps; they may be closed in another order.

``ledger.jsonl`` of a run has one line per step with the outcome of every position that the step took. ``agent-rl
ledger`` verifies it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

import orjson

from agent_rl.errors import AgentRlError
from agent_rl.rollout.jsonl_zst import read_rows
from agent_rl.rollout.records import rows_path, step_stem
from agent_rl.rollout.step_index import columns, read_step_index
from agent_rl.utils.run_files import LineFile, read_lines


class Outcome(StrEnum):
    """The outcome of an admitted position."""

    RUNNING = "running"  # its episodes run
    KEPT = "kept"  # its group is trained on
    DISCARDED = "discarded"  # all rewards of its group are equal; dynamic sampling draws another
    DROPPED = "dropped"  # infrastructure failures exceeded its budget
    LEFT_OUT = "left_out"  # its task cannot be graded; another is drawn in its place


class TaskLedger:
    """The positions from ``position`` on; an earlier start of the run closed those in ``ahead``."""

    def __init__(self, position: int = 0, ahead: Iterable[int] = ()) -> None:
        self._lowest = self._next = position
        self._ahead = set(ahead)
        self._open: dict[int, Outcome] = {}
        self._closed: Counter[Outcome] = Counter()
        self._admitted = 0
        self._pass_closed()

    @property
    def position(self) -> int:
        """The lowest position that is not closed."""
        return self._lowest

    @property
    def ahead(self) -> tuple[int, ...]:
        """The closed positions after :attr:`position`, in order."""
        return tuple(sorted(self._ahead))

    @property
    def next(self) -> int:
        """The next position to admit."""
        return self._next

    @property
    def open(self) -> Mapping[int, Outcome]:
        """The positions that were admitted and not closed, in order."""
        return MappingProxyType(self._open)

    def count(self, outcome: Outcome) -> int:
        """Number of open positions with this outcome."""
        return sum(each is outcome for each in self._open.values())

    def admit(self) -> int:
        """Admit the next position; its episodes may start."""
        position = self._next
        self._open[position] = Outcome.RUNNING
        self._admitted += 1
        self._next += 1
        self._pass_closed()
        return position

    def end(self, position: int, outcome: Outcome) -> None:
        """Record the outcome of ``position``. Raises AgentRlError unless it was running."""
        if outcome is Outcome.RUNNING or self._open.get(position) is not Outcome.RUNNING:
            raise AgentRlError(
                f"position {position} of the data ended as {outcome} while it was {self._open.get(position)}"
            )
        self._open[position] = outcome

    def close(self, positions: Iterable[int]) -> None:
        """A batch took ``positions``. Raises AgentRlError unless each of them is open and ended."""
        for position in positions:
            outcome = self._open.pop(position, Outcome.RUNNING)
            if outcome is Outcome.RUNNING:
                raise AgentRlError(f"position {position} of the data was taken by a batch before it ended")
            self._closed[outcome] += 1
            self._ahead.add(position)
        while self._lowest in self._ahead:
            self._ahead.remove(self._lowest)
            self._lowest += 1

    def check(self) -> None:
        """Raises AgentRlError unless every admitted position is closed once, or open."""
        if self._closed.total() + len(self._open) != self._admitted:
            raise AgentRlError(
                f"{self._admitted} positions of the data were admitted, {self._closed.total()} closed, and "
                f"{len(self._open)} are open"
            )

    def _pass_closed(self) -> None:
        while self._next in self._ahead:
            self._next += 1


NAME = "ledger.jsonl"


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """The outcomes of the positions in a step's batch, and the task of each group of trajectories. ``solved``: the
    share of each group's trajectories that are resolved; empty if unknown."""

    step: int
    outcomes: Mapping[int, Outcome]
    tasks: tuple[str, ...]
    solved: tuple[float, ...] = ()


class LedgerFile:
    """The file while a run writes it."""

    def __init__(self, run_dir: Path) -> None:
        self._file = LineFile(run_dir / NAME)
        self._rows = read_ledger(run_dir)

    def forget_after(self, step: int) -> None:
        """Remove the rows of steps after ``step``, which will be repeated."""
        self._rows = [row for row in self._rows if row.step <= step]
        self._file.rewrite(map(_line, self._rows))

    def append(self, row: LedgerRow) -> dict[str, float]:
        """Write the row of a step; returns the counts."""
        self._rows.append(row)
        self._file.append(_line(row))
        return self.counts()

    def solve_rates(self) -> dict[str, float]:
        """The latest solve rate of each task."""
        return {task: rate for row in self._rows for task, rate in zip(row.tasks, row.solved, strict=False)}

    def counts(self) -> dict[str, float]:
        """``ledger/*``: number of positions by outcome, over all steps so far."""
        totals = Counter(outcome for each in self._rows for outcome in each.outcomes.values())
        return {f"ledger/{name}": float(totals[outcome]) for outcome, name in NAMES.items()}


NAMES = {
    Outcome.KEPT: "trained",
    Outcome.DISCARDED: "discarded",
    Outcome.DROPPED: "dropped",
    Outcome.LEFT_OUT: "left_out",
}


def _line(row: LedgerRow) -> bytes:
    outcomes = {str(position): outcome.value for position, outcome in row.outcomes.items()}
    return orjson.dumps({"step": row.step, "outcomes": outcomes, "tasks": row.tasks, "solved": row.solved}) + b"\n"


def read_ledger(run_dir: Path) -> list[LedgerRow]:
    """The rows of a run's ``ledger.jsonl``; empty without the file. Raises AgentRlError for invalid content."""
    path = run_dir / NAME
    try:
        rows = [orjson.loads(line) for line in read_lines(path)]
        return [
            LedgerRow(
                row["step"],
                {int(position): Outcome(outcome) for position, outcome in row["outcomes"].items()},
                tuple(row["tasks"]),
                tuple(row.get("solved", ())),
            )
            for row in rows
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AgentRlError(f"{path}: invalid ledger: {error}") from None


def faults(run_dir: Path, rows: Iterable[LedgerRow]) -> list[str]:
    """Contradictions, one line each: a position that ended more than once, steps out of order, or trajectories on
    disk that do not belong to a step's groups."""
    rows, errors, seen = list(rows), list[str](), dict[int, int]()
    if (steps := [row.step for row in rows]) != list(range(1, len(steps) + 1)):
        errors.append(f"steps out of order: {steps}")
    for row in rows:
        for position in row.outcomes:
            if position in seen:
                errors.append(f"position {position} ended in step {seen[position]} and again in step {row.step}")
            seen[position] = row.step
        errors += _check_trajectories(run_dir, row)
    return errors


def gaps(rows: Iterable[LedgerRow]) -> list[int]:
    """The positions before the last ended one that did not end: groups that were still open."""
    ended = {position for row in rows for position in row.outcomes}
    return sorted(set(range(max(ended, default=-1) + 1)) - ended)


def _check_trajectories(run_dir: Path, row: LedgerRow) -> list[str]:
    stem = step_stem(run_dir, row.step)
    if not (path := rows_path(stem)).exists():
        return [f"step {row.step} has no trajectories: {path} does not exist"]
    index = read_step_index(stem)
    table = columns(read_rows(path)) if index is None else index[0]
    groups = dict(zip(table["group"], table["task"], strict=True))
    if tuple(groups[number] for number in sorted(groups)) == row.tasks:
        return []
    return [f"step {row.step}: the trajectories in {path} belong to other tasks than its groups"]
