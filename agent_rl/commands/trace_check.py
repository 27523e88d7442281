"""``agent-rl r3 check``: prints the report of :mod:`r3.trace.check`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from agent_rl.utils.run_files import write_json
from r3.trace.check import CheckReport, check_dir

MAX_BREAKS = 10


def run_check(directory: Path, *, forward_verify: bool, shard_identity: bool, json: Path | None) -> bool:
    """Check the traces in ``directory`` and print the report. Returns True if all routes match. Raises TraceError."""
    report = check_dir(directory, require_forward_verify=forward_verify, require_shard_identity=shard_identity)
    console = Console()
    console.print(_table_and_key(report))
    for line in _summary(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if json is not None:
        write_json(json, report.as_json())
    return report.holds


def _table_and_key(report: CheckReport) -> Table:
    steps = ", ".join(map(str, report.steps))
    table = Table("hand-over", "pass", title=f"routes of step {steps}, {report.records} records")
    table.add_column("checked", justify="right")
    table.add_column("broken", justify="right")
    table.add_column("result")
    for tally in report.tallies:
        result = "[red]broken" if tally.broken else "[green]identical"
        table.add_row(tally.hand_over.title, tally.stage or "", str(tally.checked), str(tally.broken), result)
    return table


def _summary(report: CheckReport) -> list[str]:
    if report.holds:
        return ["token identity held at every hand-over"]
    first, *others = report.breaks
    lines = [f"first broken at {first}"]
    lines += [f"      also at {other}" for other in others[: MAX_BREAKS - 1]]
    return lines + (
        [f"      and {len(report.breaks) - MAX_BREAKS} more (--json lists all)"] if len(others) >= MAX_BREAKS else []
    )
