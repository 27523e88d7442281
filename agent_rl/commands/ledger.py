"""``agent-rl ledger``: proves from a run's files that every position of its data ended exactly once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich.console import Console

from agent_rl.controller.async_rollout.ledger_file import NAME, NAMES, faults, gaps, read_history
from agent_rl.errors import AgentRlError, UserError
from agent_rl.monitoring.metrics_log import read_metrics
from sandbox import printable


def ledger(run_dir: Path, console: Console) -> None:
    """Print what became of the positions that the steps of the run in ``run_dir`` took. Raises UserError where there is
    no such run, AgentRlError where its files contradict each other."""
    if not (rows := read_history(run_dir)):
        raise UserError(f"{run_dir / NAME}: not there or empty: name the directory of a run that has done a step")
    counts = Counter(outcome for row in rows for outcome in row.outcomes.values())
    told = ", ".join(f"{counts[outcome]} {name.replace('_', ' ')}" for outcome, name in NAMES.items())
    still_open = gaps(rows)
    console.print(f"{len(rows)} steps took {counts.total()} positions of the data: {told}")
    console.print(f"{len(still_open)} positions before the last of them were open when its batch was taken")
    steps = read_metrics(run_dir)
    names = ("recover/episodes", "recover/turns", "recover/differed", "recover/too_old")
    episodes, turns, differed, too_old = (int(sum(step.get(name, 0) for step in steps)) for name in names)
    if episodes + differed + too_old:
        console.print(
            f"{episodes} interrupted episodes went on from {turns} turns sampled before; {differed} began anew because "
            f"a tool answered otherwise, {too_old} because their first tokens were too old"
        )
    if found := faults(run_dir, rows):
        raise AgentRlError("\n".join(printable(fault) for fault in found))
    console.print("every position ended once, and the trajectories are those of the steps' groups")
