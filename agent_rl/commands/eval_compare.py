"""``agent-rl eval compare``: whether one evaluation is better than another, and by how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from agent_rl.errors import UserError
from agent_rl.evaluation.finished import Finished, read_evaluation
from agent_rl.evaluation.paired import LeftOut, Paired, compare, pair

SAME = ("env", "env_options")
"""Settings under which a task's id means a task; where they differ, nothing can be paired."""
NAMED = 5


def run_eval_compare(first: str, second: str, *, points: float, seed: int, json: bool) -> None:
    """Print the comparison of two evaluations, ``second`` against ``first``, as tables or as JSON. Raises UserError
    where there is nothing to compare."""
    a, b = read_evaluation(first), read_evaluation(second)
    differing = _differing(a, b)
    tasks, left_out = pair(a.scores, b.scores)
    if not tasks:
        raise UserError(f"{first} and {second} have no task in common that both graded: {_left_out(left_out)}")
    found = compare([a.scores[t] for t in tasks], [b.scores[t] for t in tasks], wanted=points / 100, seed=seed)
    if json:
        facts = {"first": first, "second": second, "points": points, "seed": seed, "settings_differ": differing}
        answer = {**facts, **asdict(found), "left_out": asdict(left_out)}
        print(orjson.dumps(answer, option=orjson.OPT_INDENT_2).decode())
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(_table(found, (a, b), tasks))
    for line in _lines(found, points, seed):
        console.print(line, markup=False)
    if any(asdict(left_out).values()):
        console.print(f"left out: {_left_out(left_out)}", markup=False)
    for key, (held, other) in differing.items():
        console.print(f"note: {key} is {held!r} in the first and {other!r} in the second", markup=False)


def _differing(a: Finished, b: Finished) -> dict[str, tuple[Any, Any]]:
    """The settings that both name and that differ. Raises UserError where tasks of one id are not the same task."""
    both = {key: (a.settings[key], b.settings[key]) for key in sorted(a.settings.keys() & b.settings.keys())}
    found = {key: values for key, values in both.items() if values[0] != values[1]}
    for key in SAME:
        if key in found:
            raise UserError(
                f"{a.name} has {key} {found[key][0]!r} and {b.name} {found[key][1]!r}: tasks of one id are not the "
                "same task there; evaluate both on the same ones"
            )
    return found


def _table(found: Paired, both: tuple[Finished, Finished], tasks: Sequence[str]) -> Table:
    result = Table("", *(one.name for one in both))
    result.add_row("Pass@1", *(f"{rate:.1%}" for rate in found.pass_at_1))
    result.add_row("tasks compared", str(found.tasks), str(found.tasks))
    result.add_row("samples of them", *(str(sum(one.scores[task].graded for task in tasks)) for one in both))
    result.add_row("tasks it does better", str(found.better_first), str(found.better_second))
    return result


def _lines(found: Paired, points: float, seed: int) -> list[str]:
    low, high = found.interval
    answer = [
        f"difference: {100 * found.difference:+.1f} points, 95 % interval {100 * low:+.1f} to {100 * high:+.1f} "
        f"(bootstrap over tasks, seed {seed})",
        f"p = {found.p_value:.3g} (exact sign test over tasks; McNemar's, with one sample a task)",
    ]
    if found.tasks_needed is None or found.shown is None:
        return [*answer, "how many tasks a difference needs can't be told: these two differ on too few"]
    return [
        *answer,
        f"{points:g} points would be shown by {found.tasks_needed:,} tasks, and {found.tasks:,} tasks show "
        f"{100 * found.shown:.1f} points (5 %, power 80 %, where two evaluations differ as much as these)",
    ]


def _left_out(left_out: LeftOut) -> str:
    kinds: Mapping[str, tuple[str, ...]] = {
        "only in the first": left_out.missing_second,
        "only in the second": left_out.missing_first,
        "not graded in the first": left_out.ungraded_first,
        "not graded in the second": left_out.ungraded_second,
    }
    return "; ".join(f"{len(ids)} {kind} ({_some(ids)})" for kind, ids in kinds.items() if ids) or "both are empty"


def _some(ids: Sequence[str]) -> str:
    return ", ".join(ids[:NAMED]) + (", ..." if len(ids) > NAMED else "")
