"""``agent-rl eval diff``: two episodes of one task, from two evaluations or of one."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile, zip_longest
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from agent_rl.commands.show import MAX_LOG_BYTES, READ_ERRORS, EpisodeRecord, episodes, logged
from agent_rl.errors import UserError
from agent_rl.evaluation.directory import log_path
from agent_rl.evaluation.saved import episodes_path, read_evaluation
from agent_rl.evaluation.side_by_side import labels
from agent_rl.evaluation.usage import total, usage_of_turn
from agent_rl.monitoring.console import cell
from agent_rl.types import Turn
from agent_rl.utils import foreign
from sandbox import printable

MAX_CALL = 400
"""Characters printed of one call."""
MAX_TESTS = 10
"""Tests listed whose outcomes differ."""
Row = Mapping[str, Any]


def run_eval_diff(names: tuple[str, str], task: str, samples: tuple[int, int], console: Console) -> None:
    """Print the outcomes, where the conversations first differ, the calls turn by turn, and how the patches differ."""
    distinct = list(dict.fromkeys(names))
    label_of = dict(zip(distinct, labels([read_evaluation(name) for name in distinct]), strict=True))
    columns = [f"{label_of[name]}, sample {sample}" for name, sample in zip(names, samples, strict=True)]
    first, second = (_episode(name, task, sample) for name, sample in zip(names, samples, strict=True))
    try:
        console.print(_outcomes(columns, (first, second)))
        for line in (_first_differences(first.row, second.row), *_differing_tests(first.row, second.row)):
            console.print(printable(line), markup=False, soft_wrap=True)
        console.print(_calls(columns, first.row["turns"], second.row["turns"]))
        for line in _patch_diff(columns, first.row["patch"], second.row["patch"]):
            console.print(printable(line), markup=False, soft_wrap=True)
    except READ_ERRORS as error:
        raise UserError(f"{' or '.join(names)}: damaged episode ({type(error).__name__}: {error})") from None


def _episode(name: str, task: str, sample: int) -> EpisodeRecord:
    place = episodes_path(name)
    try:
        if place.is_dir():
            log = log_path(place, task, sample).relative_to(place)
            return logged(foreign.read(place, log.as_posix(), MAX_LOG_BYTES))
        foreign.require_regular(place)
        return next(one for one in episodes(place) if (one.task_id, one.sample) == (task, sample))
    except (FileNotFoundError, StopIteration):
        raise UserError(
            f"{name}: no graded episode of task {task}, sample {sample}; `agent-rl show` lists the episodes"
        ) from None
    except READ_ERRORS as error:
        raise UserError(f"{place}: no readable episode ({type(error).__name__}: {error})") from None


def _outcomes(columns: Sequence[str], both: Sequence[EpisodeRecord]) -> Table:
    table = Table("", *(Column(cell(column), overflow="fold") for column in columns))
    rows: Mapping[str, Callable[[EpisodeRecord], object]] = {
        "outcome": lambda one: one.outcome,
        "stop": lambda one: one.row["stop"],
        "turns": lambda one: len(one.row["turns"]),
        "seconds": lambda one: f"{one.row['seconds']:.1f}",
        "tokens": lambda one: _tokens(one.row["turns"]),
    }
    for name, value in rows.items():
        table.add_row(name, *(cell(str(value(one))) for one in both))
    return table


def _tokens(turns: Sequence[Row]) -> str:
    usage = total(usage_of_turn(Turn(**turn)) for turn in turns)
    return "unknown" if usage is None else f"{usage.prompt:,} in, {usage.completion:,} out"


def _first_differences(first: Row, second: Row) -> str:
    """The first turns in which text, call and observation differ."""
    parts: Mapping[str, Callable[[Row], object]] = {
        "text": lambda turn: turn["text"],
        "call": _call,
        "observation": lambda turn: turn["observation"],
    }
    turns = {name: _first_difference(first["turns"], second["turns"], part) for name, part in parts.items()}
    places = [f"{name} in turn {turn}" for name, turn in turns.items() if turn is not None]
    if _initial_prompt(first) != _initial_prompt(second):
        places.insert(0, "initial prompt")
    return f"first differences: {', '.join(places) or 'none, the conversations are equal'}"


def _initial_prompt(row: Row) -> Sequence[object]:
    return list(takewhile(lambda message: message["role"] != "assistant", row["messages"]))


def _first_difference(first: Sequence[Row], second: Sequence[Row], part: Callable[[Row], object]) -> int | None:
    """The number of the first turn in which ``part`` differs, or that only one conversation has."""
    pairs = enumerate(zip_longest(first, second), 1)
    return next((turn for turn, (a, b) in pairs if a is None or b is None or part(a) != part(b)), None)


def _differing_tests(first: Row, second: Row) -> list[str]:
    tests = first.get("tests", {}), second.get("tests", {})
    names = [name for name in sorted(set[str]().union(*tests)) if tests[0].get(name) != tests[1].get(name)]
    statuses = {name: " and ".join(each.get(name, "no result") for each in tests) for name in names[:MAX_TESTS]}
    lines = [f"test {name}: {status}" for name, status in statuses.items()]
    return lines + [f"{len(names) - MAX_TESTS} more tests differ"] * (len(names) > MAX_TESTS)


def _calls(columns: Sequence[str], first: Sequence[Row], second: Sequence[Row]) -> Table:
    """The calls side by side; = for an equal one."""
    table = Table("turn", *(Column(cell(column), overflow="fold", ratio=1) for column in columns), expand=True)
    for number, (a, b) in enumerate(zip_longest(first, second), 1):
        left, right = ("" if turn is None else _call(turn) for turn in (a, b))
        table.add_row(str(number), _shortened(left), _shortened("=" if left == right else right))
    return table


def _call(turn: Row) -> str:
    """The tool and its arguments, as one would type them."""
    if not turn["tool"]:
        return f"(no call: {turn['parse_failure'] or 'no tool'})"
    values = (value if isinstance(value, str) else json.dumps(value) for value in turn["arguments"].values())
    return " ".join([turn["tool"], *values])


def _shortened(call: str) -> Text:
    return cell(call if len(call) <= MAX_CALL else f"{call[:MAX_CALL]} ... ({len(call):,} characters)")


def _patch_diff(columns: Sequence[str], first: str, second: str) -> list[str]:
    if first == second:
        return ["the patches are equal" if first else "neither has a patch"]
    left, right = (f"patch of {column}" for column in columns)
    return list(difflib.unified_diff(first.splitlines(), second.splitlines(), left, right, lineterm=""))
