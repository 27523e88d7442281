"""Tables of reports for the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from rich.table import Column, Table

from agent_rl.evaluation.report import EvalReport, RepoOutcome
from agent_rl.monitoring.console import cell


def table(reports: Sequence[EvalReport]) -> Table:
    """The reports side by side, one column each."""
    result = Table("", *(Column(cell(f"{item.policy} on {item.env}")) for item in reports))
    rows: dict[str, Callable[[EvalReport], str]] = {
        "Pass@1": lambda item: f"{item.pass_at_1:.1%}",
        "95 % interval": lambda item: f"{item.interval[0]:.1%} to {item.interval[1]:.1%}",
        "tasks graded": lambda item: str(item.graded),
        "tasks not graded": lambda item: str(item.ungraded),
        "samples a task": lambda item: str(item.samples),
        "infrastructure failures": lambda item: str(item.infrastructure_failures),
        "suspected hacks": lambda item: str(item.suspected_hacks),
        "turns, mean": lambda item: f"{item.turns_mean:.1f}",
    }
    for name, value in rows.items():
        result.add_row(name, *map(value, reports))
    for k in list(reports[0].pass_at_k)[1:] if reports else ():
        result.add_row(f"Pass@{k}", *(f"{item.pass_at_k.get(k, math.nan):.1%}" for item in reports))
    return result


def breakdown(by_repo: Mapping[str, RepoOutcome]) -> Table:
    """Pass@1 by repository."""
    result = Table("repository", "Pass@1", "tasks", "ungraded")
    for repo, outcome in by_repo.items():
        result.add_row(cell(repo), f"{outcome.pass_at_1:.1%}", str(outcome.graded), str(outcome.ungraded))
    return result
