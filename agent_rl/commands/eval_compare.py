"""``agent-rl eval compare``: evaluations side by side on their common tasks, and the differences to the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson
from rich.console import Console
from rich.table import Column, Table

from agent_rl.commands.eval import pass_at_k_text
from agent_rl.errors import UserError
from agent_rl.evaluation.paired import ExcludedTasks, PairedComparison, Score, common_tasks, compare
from agent_rl.evaluation.report import PassAtK, pass_at_ks
from agent_rl.evaluation.saved import SavedEvaluation, read_evaluation
from agent_rl.evaluation.side_by_side import labels, matrix, mean_effort, merge, pool
from agent_rl.monitoring.console import cell
from sandbox import printable

REQUIRED_EQUAL = ("env", "env_options")
"""Settings that must be equal, because task ids are unique only within one environment."""
MAX_IDS = 5
"""Task ids listed per kind of excluded tasks."""


@dataclass(frozen=True, slots=True)
class Side:
    """One column: an evaluation, or the samples of repeated ones, on the common tasks.

    ``members``: the Pass@1 of each evaluation by name. ``pass_at_k``: k = 1, 2, 4, ... ``effort``: means per task.
    """

    label: str
    members: Mapping[str, float]
    samples: int
    pass_at_k: Mapping[str, PassAtK]
    effort: Mapping[str, float | None]
    excluded: ExcludedTasks


def run_eval_compare(
    names: Sequence[str], *, points: float, seed: int, pooled: bool, by_task: bool, json: bool
) -> None:
    """Print the evaluations side by side, each relative to the first, as tables or JSON.

    ``pooled``: evaluations with equal settings are one. ``by_task``: also each task's share of resolved samples. Raises
    UserError if they have no graded task in common.
    """
    read = [read_evaluation(name) for name in names]
    groups = pool(read) if pooled else [[one] for one in read]
    evaluations = [merge(group) if len(group) > 1 else group[0] for group in groups]
    columns = [printable(label) for label in labels(evaluations)]
    differing = _differing_settings(evaluations)
    tasks, excluded = common_tasks([one.scores for one in evaluations])
    if not tasks:
        raise UserError(f"{' and '.join(names)} have no graded task in common: {_excluded(columns, excluded)}")
    sides = [_side(*each, tasks) for each in zip(columns, groups, evaluations, excluded, strict=True)]
    scores = [[one.scores[task] for task in tasks] for one in evaluations]
    results = [compare(scores[0], other, target=points / 100, seed=seed) for other in scores[1:]]
    if json:
        output = _json(sides, results, len(tasks), differing, by_task, evaluations)
        print(orjson.dumps({**output, "points": points, "seed": seed}, option=orjson.OPT_INDENT_2).decode())
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(_table(sides, len(tasks)))
    for side, result in zip(sides[1:], results, strict=True):
        versus = f"{side.label} against {columns[0]}: " if len(results) > 1 else ""
        for line in _summary_lines(result, points, seed):
            console.print(f"{versus}{line}", markup=False)
    if any(one.missing or one.ungraded for one in excluded):
        console.print(f"excluded: {_excluded(columns, excluded)}", markup=False)
    for key, values in differing.items():
        each = ", ".join(f"{value!r} in {column}" for column, value in zip(columns, values, strict=True))
        console.print(f"note: {key} is {each}", markup=False)
    if by_task:
        _print_matrix(columns, evaluations, console)


def _side(
    label: str, group: Sequence[SavedEvaluation], whole: SavedEvaluation, excluded: ExcludedTasks, tasks: Sequence[str]
) -> Side:
    scores = [whole.scores[task] for task in tasks]
    return Side(
        label=label,
        members={one.name: _pass_at_1([one.scores[task] for task in tasks if task in one.scores]) for one in group},
        samples=sum(score.graded for score in scores),
        pass_at_k=pass_at_ks(scores, max(score.graded for score in scores)),
        effort=mean_effort(whole, tasks),
        excluded=excluded,
    )


def _pass_at_1(scores: Sequence[Score]) -> float:
    return pass_at_ks(scores, 1)["1"].rate


def _differing_settings(evaluations: Sequence[SavedEvaluation]) -> dict[str, list[Any]]:
    """The values of settings that all have and that differ. Raises UserError if the environments differ."""
    keys = sorted(set(evaluations[0].settings).intersection(*(one.settings for one in evaluations[1:])))
    values = {key: [one.settings[key] for one in evaluations] for key in keys}
    differing = {key: each for key, each in values.items() if any(value != each[0] for value in each)}
    for key in REQUIRED_EQUAL:
        if key in differing:
            each = " and ".join(f"{one.settings[key]!r} in {one.name}" for one in evaluations)
            raise UserError(f"{key} is {each}: the task ids are not comparable; evaluate all with the same environment")
    return differing


def _table(sides: Sequence[Side], tasks: int) -> Table:
    table = Table("", *(Column(cell(side.label), overflow="fold") for side in sides))
    for k in max((side.pass_at_k for side in sides), key=len):
        table.add_row(f"Pass@{k}", *(pass_at_k_text(side.pass_at_k.get(k), tasks) for side in sides))
    table.add_row("tasks compared", *(str(tasks) for _ in sides))
    table.add_row("samples", *(str(side.samples) for side in sides))
    if any(len(side.members) > 1 for side in sides):
        table.add_row("evaluations", *(_spread(list(side.members.values())) for side in sides))
    rows: Mapping[str, tuple[str, Callable[[float], str]]] = {
        "turns": ("turns", "{:.1f}".format),
        "seconds": ("seconds", "{:.1f}".format),
        "prompt_tokens": ("tokens in, a task", "{:,.0f}".format),
        "completion_tokens": ("tokens out, a task", "{:,.0f}".format),
        "cost": ("cost, a task", "{:.4f} USD".format),
    }
    for key, (name, text) in rows.items():
        values = [side.effort[key] for side in sides]
        if any(value is not None for value in values):
            table.add_row(name, *("unknown" if value is None else text(value) for value in values))
    return table


def _spread(rates: Sequence[float]) -> str:
    return "1" if len(rates) == 1 else f"{len(rates)}, Pass@1 {min(rates):.1%} to {max(rates):.1%}"


def _print_matrix(columns: Sequence[str], evaluations: Sequence[SavedEvaluation], console: Console) -> None:
    rows = matrix(evaluations)
    table = Table(Column("task", overflow="fold"), *(Column(cell(column), overflow="fold") for column in columns))
    for row in rows:
        table.add_row(cell(row.task_id), *(_share(score) for score in row.scores))
    console.print(table)
    differ = sum(row.disagreement > 0 for row in rows)
    console.print(f"resolved of graded samples, -: not evaluated; {differ} of {len(rows)} tasks differ", markup=False)


def _share(score: Score | None) -> str:
    return "-" if score is None else f"{score.resolved}/{score.graded}" if score.graded else "not graded"


def _summary_lines(result: PairedComparison, points: float, seed: int) -> list[str]:
    low, high = result.interval
    lines = [
        f"difference: {100 * result.difference:+.1f} points, 95 % interval {100 * low:+.1f} to {100 * high:+.1f} "
        f"(bootstrap over tasks, seed {seed}); better on {result.better_second} tasks, worse on {result.better_first}",
        f"p = {result.p_value:.3g} (exact sign test over tasks; McNemar's, with one sample a task)",
    ]
    if result.tasks_needed is None or result.detectable is None:
        return [*lines, "no power calculation: the evaluations differ on too few tasks"]
    return [
        *lines,
        f"detecting {points:g} points needs {result.tasks_needed:,} tasks; {result.tasks:,} tasks detect "
        f"{100 * result.detectable:.1f} points (significance 5 %, power 80 %, at this disagreement)",
    ]


def _json(
    sides: Sequence[Side],
    results: Sequence[PairedComparison],
    tasks: int,
    differing: Mapping[str, Sequence[Any]],
    by_task: bool,
    evaluations: Sequence[SavedEvaluation],
) -> dict[str, Any]:
    output = {
        "tasks": tasks,
        "evaluations": [asdict(side) for side in sides],
        "comparisons": [{"first": 0, "second": at, **asdict(result)} for at, result in enumerate(results, 1)],
        "settings_differ": differing,
    }
    if by_task:
        output["matrix"] = [asdict(row) | {"disagreement": row.disagreement} for row in matrix(evaluations)]
    return output


def _excluded(columns: Sequence[str], excluded: Sequence[ExcludedTasks]) -> str:
    kinds = [
        f"{len(ids)} {kind} {column} ({_some(ids)})"
        for column, tasks in zip(columns, excluded, strict=True)
        for kind, ids in (("not in", tasks.missing), ("not graded in", tasks.ungraded))
        if ids
    ]
    return "; ".join(kinds) or "all are empty"


def _some(ids: Sequence[str]) -> str:
    return printable(", ".join(ids[:MAX_IDS])) + (", ..." if len(ids) > MAX_IDS else "")
