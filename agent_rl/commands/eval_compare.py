"""``agent-rl eval compare``: compares two evaluations on their common tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from agent_rl.errors import UserError
from agent_rl.evaluation.paired import ExcludedTasks, PairedComparison, compare, pair
from agent_rl.evaluation.saved import SavedEvaluation, read_evaluation
from sandbox import printable

REQUIRED_EQUAL = ("env", "env_options")
"""Settings that must be equal, because task ids are unique only within one environment."""
MAX_IDS = 5
"""Task ids listed per kind of excluded tasks."""


def run_eval_compare(first: str, second: str, *, points: float, seed: int, json: bool) -> None:
    """Print the comparison of two evaluations, ``second`` relative to ``first``, as tables or JSON.

    Raises UserError if they have no graded task in common.
    """
    a, b = read_evaluation(first), read_evaluation(second)
    differing = _differing_settings(a, b)
    tasks, left_out = pair(a.scores, b.scores)
    if not tasks:
        raise UserError(f"{first} and {second} have no graded task in common: {_excluded(left_out)}")
    result = compare([a.scores[t] for t in tasks], [b.scores[t] for t in tasks], target=points / 100, seed=seed)
    if json:
        settings = {"first": first, "second": second, "points": points, "seed": seed, "settings_differ": differing}
        output = {**settings, **asdict(result), "left_out": asdict(left_out)}
        print(orjson.dumps(output, option=orjson.OPT_INDENT_2).decode())
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(_table(result, (a, b), tasks))
    for line in _summary_lines(result, points, seed):
        console.print(line, markup=False)
    if any(asdict(left_out).values()):
        console.print(f"excluded: {_excluded(left_out)}", markup=False)
    for key, (first_value, second_value) in differing.items():
        console.print(f"note: {key} is {first_value!r} in the first and {second_value!r} in the second", markup=False)


def _differing_settings(a: SavedEvaluation, b: SavedEvaluation) -> dict[str, tuple[Any, Any]]:
    """Settings with different values in the two evaluations. Raises UserError if they use different environments."""
    common = {key: (a.settings[key], b.settings[key]) for key in sorted(a.settings.keys() & b.settings.keys())}
    differing = {key: values for key, values in common.items() if values[0] != values[1]}
    for key in REQUIRED_EQUAL:
        if key in differing:
            raise UserError(
                f"{key} is {differing[key][0]!r} in {a.name} and {differing[key][1]!r} in {b.name}: the task ids are "
                "not comparable; evaluate both with the same environment"
            )
    return differing


def _table(result: PairedComparison, both: tuple[SavedEvaluation, SavedEvaluation], tasks: Sequence[str]) -> Table:
    table = Table("", *(one.name for one in both))
    table.add_row("Pass@1", *(f"{rate:.1%}" for rate in result.pass_at_1))
    table.add_row("tasks compared", str(result.tasks), str(result.tasks))
    table.add_row("samples", *(str(sum(one.scores[task].graded for task in tasks)) for one in both))
    table.add_row("better on", str(result.better_first), str(result.better_second))
    return table


def _summary_lines(result: PairedComparison, points: float, seed: int) -> list[str]:
    low, high = result.interval
    lines = [
        f"difference: {100 * result.difference:+.1f} points, 95 % interval {100 * low:+.1f} to {100 * high:+.1f} "
        f"(bootstrap over tasks, seed {seed})",
        f"p = {result.p_value:.3g} (exact sign test over tasks; McNemar's, with one sample a task)",
    ]
    if result.tasks_needed is None or result.detectable is None:
        return [*lines, "no power calculation: the evaluations differ on too few tasks"]
    return [
        *lines,
        f"detecting {points:g} points needs {result.tasks_needed:,} tasks; {result.tasks:,} tasks detect "
        f"{100 * result.detectable:.1f} points (significance 5 %, power 80 %, at this disagreement)",
    ]


def _excluded(left_out: ExcludedTasks) -> str:
    kinds: Mapping[str, tuple[str, ...]] = {
        "only in the first": left_out.missing_second,
        "only in the second": left_out.missing_first,
        "not graded in the first": left_out.ungraded_first,
        "not graded in the second": left_out.ungraded_second,
    }
    return "; ".join(f"{len(ids)} {kind} ({_some(ids)})" for kind, ids in kinds.items() if ids) or "both are empty"


def _some(ids: Sequence[str]) -> str:
    return printable(", ".join(ids[:MAX_IDS])) + (", ..." if len(ids) > MAX_IDS else "")
