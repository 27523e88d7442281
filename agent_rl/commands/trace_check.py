"""``agent-rl r3 check``: what the checker of :mod:`r3.trace.check` found, for people and as JSON."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from agent_rl.utils.run_files import write_json
from r3.trace.check import CheckReport, check_dir

SHOWN = 10


def run_check(directory: Path, *, forward_verify: bool, shard_identity: bool, json: Path | None) -> bool:
    """Check the traces in ``directory``, print the table, write the JSON; whether all held. Raises TraceError."""
    report = check_dir(directory, require_forward_verify=forward_verify, require_shard_identity=shard_identity)
    console = Console()
    console.print(_table(report))
    for line in _verdict(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if json is not None:
        write_json(json, report.as_json())
    return report.holds


def _table(report: CheckReport) -> Table:
    steps = ", ".join(map(str, report.steps))
    table = Table("hand-over", "pass", title=f"routes of step {steps}, {report.records} records")
    table.add_column("checked", justify="right")
    table.add_column("broken", justify="right")
    table.add_column("verdict")
    for tally in report.tallies:
        verdict = "[red]broken" if tally.broken else "[green]holds"
        table.add_row(tally.hand_over.title, tally.stage or "", str(tally.checked), str(tally.broken), verdict)
    return table


def _verdict(report: CheckReport) -> list[str]:
    if report.holds:
        return ["token identity held at every hand-over"]
    first, *others = report.breaks
    lines = [f"first broken at {first}"]
    lines += [f"      also at {other}" for other in others[: SHOWN - 1]]
    return lines + ([f"      and {len(report.breaks) - SHOWN} more (--json lists all)"] if len(others) >= SHOWN else [])
