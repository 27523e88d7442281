"""``agent-rl runs``, ``agent-rl ledger`` and ``agent-rl view``: a table of runs, a check of one run's data ledger, and
the viewer's page."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import webbrowser
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Column, Table
from rich.text import Text

from agent_rl.commands.clean import size
from agent_rl.controller.async_rollout.task_ledger import NAME, NAMES, faults, gaps, read_ledger
from agent_rl.errors import AgentRlError, UserError
from agent_rl.monitoring.console import cell
from agent_rl.monitoring.metrics_log import read_metrics
from agent_rl.viewer.api import Resources
from agent_rl.viewer.export import export
from agent_rl.viewer.index import Index
from agent_rl.viewer.runs import overview
from agent_rl.viewer.server import HOST, listen, web_server
from sandbox import printable

UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
STYLES = {"running": "green", "guard": "red", "stopped": "yellow"}


def list_runs(directories: Sequence[Path], console: Console) -> None:
    """Print a table of the runs and evaluations in ``directories``, which are runs or parents of runs.

    Raises UserError if there is none.
    """
    rows = [row for directory in directories for row in _runs(directory)]
    if not rows:
        raise UserError(
            f"{', '.join(map(str, directories))}: no run found; expected the directory of a run, or its parent"
        )
    costs = any(summary["cost"] is not None for _, summary in rows)
    table = Table(
        Column("run", overflow="fold"),
        *("kind", "steps", "Pass@1", "best", *["cost"] * costs, "state", "guard", "age", "size"),
    )
    for path, summary in rows:
        state = summary["state"]
        done, total = summary["steps"], summary["total"]
        steps = "" if summary["kind"] != "train" else f"{done} of {total}" if total else str(done)
        crossed = str(summary["guard"]) if summary["guard"] else ""
        table.add_row(
            *(
                cell(str(path)),
                summary["kind"],
                steps,
                _pass_rate(summary),
                "" if summary["best"] is None else f"{100 * summary['best'][1]:.1f} % at {summary['best'][0]}",
                *["" if summary["cost"] is None else f"{summary['cost']:.2f} USD"] * costs,
                Text(state, STYLES.get(state, "")),
                crossed,
            ),
            *(_age(path), decimal(size(path))),
        )
    console.print(table)


def _runs(directory: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """``directory`` if it is a run or evaluation, else those in it, and the evaluations of each; with summaries."""
    if not directory.is_dir():
        raise UserError(f"{directory}: not a directory; expected the directory of a run, or its parent")
    found = list(_with_evaluations(directory))
    visible = (path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))
    for path in sorted(visible) if not found else ():
        found += _with_evaluations(path)
    yield from found


def _with_evaluations(run: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    for path in (run, *sorted(path for path in run.glob("eval/*") if path.is_dir())):
        summary = overview(Index(path))
        if summary["kind"] != "empty":
            yield path, summary


def _age(directory: Path) -> str:
    """The time since a file of the directory last changed, in its largest unit."""
    newest = max((path.stat().st_mtime for path in directory.iterdir() if path.is_file()), default=time.time())
    seconds = max(0.0, time.time() - newest)
    unit, length = next(one for one in UNITS if seconds >= one[1] or one[1] == 1)
    return f"{seconds / length:.0f} {unit}"


def _pass_rate(summary: Mapping[str, Any]) -> str:
    if summary["pass_at_1"] is None:
        return ""
    rate, low, high = (100 * value for value in summary["pass_at_1"])
    return f"{rate:.1f} % [{low:.1f}, {high:.1f}]"


def check_ledger(run_dir: Path, console: Console) -> None:
    """Verify and print how the run in ``run_dir`` used each data position.

    Raises UserError if there is no run, AgentRlError if its files contradict each other.
    """
    if not (rows := read_ledger(run_dir)):
        raise UserError(f"{run_dir / NAME}: missing or empty; expected the directory of a run with at least one step")
    counts = Counter(outcome for row in rows for outcome in row.outcomes.values())
    totals = ", ".join(f"{counts[outcome]} {name.replace('_', ' ')}" for outcome, name in NAMES.items())
    open_positions = gaps(rows)
    console.print(f"{len(rows)} steps took {counts.total()} data positions: {totals}")
    console.print(f"{len(open_positions)} earlier positions were open when the last batch was taken")
    steps = read_metrics(run_dir)
    names = ("recover/episodes", "recover/turns", "recover/differed", "recover/too_old")
    episodes, turns, differed, too_old = (int(sum(step.get(name, 0) for step in steps)) for name in names)
    if episodes + differed + too_old:
        console.print(
            f"{episodes} interrupted episodes resumed and reused {turns} turns; {differed} restarted because a tool "
            f"result differed, {too_old} because their tokens were too old"
        )
    if problems := faults(run_dir, rows):
        raise AgentRlError("\n".join(map(printable, problems)))
    console.print("every position was used exactly once, and all trajectories match their step's groups")


def run_view(paths: Sequence[Path], *, port: int, out: Path | None, trajectories: int, open_browser: bool) -> None:
    """Serve the page until Ctrl-C, or export it to ``out``. Raises UserError for an invalid directory or used port."""
    resources = Resources(paths)
    if out is not None:
        print(f"{out}: {export(resources, out, trajectories) / 1e6:.1f} MB")
        return
    with listen(port) as listener:
        address = f"http://{HOST}:{listener.getsockname()[1]}/"
        print(f"{address} (Ctrl-C stops it)", flush=True)
        if open_browser and _has_display():
            webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            web_server(resources).run(sockets=[listener])


def _has_display() -> bool:
    """Whether a graphical browser can open. Without a display Python opens a text browser in the terminal."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
