"""``agent-rl runs``: a table of runs, each in a line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_rl.errors import UserError
from agent_rl.monitoring.console import cell
from agent_rl.viewer.index import Index
from agent_rl.viewer.runs import overview

STYLES = {"running": "green", "guard": "red", "stopped": "yellow"}


def list_runs(directories: Sequence[Path], console: Console) -> None:
    """Print the runs and evaluations in ``directories``, each of which is one, or holds some. Raises UserError."""
    table = Table("run", "kind", "steps", "Pass@1", "state", "guard")
    found = [(path, told) for directory in directories for path, told in _runs(directory)]
    if not found:
        raise UserError(
            f"{', '.join(map(str, directories))}: no run there; right would be a run's directory, or one of several"
        )
    for path, told in found:
        state = told["state"]
        done, total = told["steps"], told["total"]
        steps = "" if told["kind"] != "train" else f"{done} of {total}" if total else str(done)
        crossed = str(told["guard"]) if told["guard"] else ""
        table.add_row(cell(str(path)), told["kind"], steps, _rate(told), Text(state, STYLES.get(state, "")), crossed)
    console.print(table)


def _runs(directory: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """``directory`` itself where it is a run's, else those in it."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no directory; right would be a run's, or one of several")
    told = overview(Index(directory))
    if told["kind"] != "empty":
        yield directory, told
        return
    for path in sorted(path for path in directory.iterdir() if path.is_dir()):
        told = overview(Index(path))
        if told["kind"] != "empty":
            yield path, told


def _rate(told: Mapping[str, Any]) -> str:
    if told["pass_at_1"] is None:
        return ""
    rate, low, high = (100 * value for value in told["pass_at_1"])
    return f"{rate:.1f} % [{low:.1f}, {high:.1f}]"
