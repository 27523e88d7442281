"""All trajectories of a run's directory in columns of numbers, made of the sidecars beside their rows.

::

    trajectories/step-000007.index.json.zst          ─┐
    evaluations/step-000020-sampled.index.json.zst   ─┼──▶ Shelf, one a step or evaluation ──▶ Index: columns, filters
    rows without a sidecar, an evaluation's logs     ─┘      (read again when its files change)
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_rl.errors import AgentRlError, UserError
from agent_rl.evaluation.directory import log_path, read_results
from agent_rl.evaluation.report import EpisodeResult
from agent_rl.rollout.jsonl_zst import Place, read_rows
from agent_rl.rollout.records import DIRECTORY, EVALUATIONS, rows_path
from agent_rl.rollout.step_index import COLUMNS, columns, read_sidecar, sidecar_path

EVAL = "eval"
"""Where the trajectories of an ``agent-rl eval`` directory are filed."""
RESULTS, REPORT = "results.jsonl", "report.json"
"""The files of such a directory."""
SHOWN = (
    *(
        "id",
        "n",
        "step",
        "group",
        "task",
        "reward",
        "resolved",
        "stop",
        "turns",
        "tokens",
        "sampled",
        "hacks",
        "training_status",
    ),
    *("advantage", "branches", "versions", "seconds", "began", "worst_gap", "worst_gap_without_replay"),
)
"""The columns that are handed out."""
RANGES = (
    *("step", "reward", "turns", "tokens", "sampled", "hacks", "branches", "versions", "seconds", "advantage"),
    *("worst_gap", "worst_gap_without_replay", "group"),
)
"""The columns that are filtered by a range."""
CHOICES = ("n", "stop", "training_status")
"""Those that are filtered by some of their values."""
_BROKEN = (KeyError, TypeError, ValueError, AttributeError, OSError, AgentRlError)

Columns = dict[str, list[Any]]


@dataclass(frozen=True, slots=True)
class Shelf:
    """What is filed under one name ``n``, a step's number or an evaluation's key: its columns, the places of its rows
    (none in an evaluation's directory), and what is wrong with it, in a line each."""

    n: str
    step: int
    stem: Path
    columns: Columns
    places: tuple[Place, ...] | None
    notes: tuple[str, ...] = ()
    results: tuple[EpisodeResult, ...] = ()

    def __len__(self) -> int:
        return len(self.columns["task"])


class Index:
    """The shelves of a run's directory. :meth:`refresh` reads what changed on the disk since. Threads may share it:
    what :attr:`shelves` and :attr:`table` gave stays as it is, and a later refresh puts others in their place."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shelves: dict[str, Shelf] = {}
        self._stamps: dict[str, str] = {}
        self._table: dict[str, NDArray] | None = None
        self._changing = threading.Lock()

    def refresh(self) -> None:
        """Take up what was added, changed or removed. A file that cannot be read makes a note, never an error."""
        with self._changing:
            found = _filed(self.directory)
            stamps = {n: files.stamp for n, files in found.items()}
            if stamps == self._stamps:
                return
            kept = {n: shelf for n, shelf in self.shelves.items() if stamps.get(n) == self._stamps.get(n)}
            self.shelves = {
                n: kept[n] if n in kept else _shelf(n, files.step, files.stem) for n, files in found.items()
            }
            self._stamps, self._table = stamps, None

    def stamps(self) -> Mapping[str, str]:
        """A stamp of the files of each shelf, by its name, as they are on the disk now."""
        return {n: files.stamp for n, files in _filed(self.directory).items()}

    @property
    def table(self) -> Mapping[str, NDArray]:
        """All shelves' columns, one behind the other: numbers as float64 (NaN: none), all others as objects."""
        with self._changing:
            if self._table is None:
                parts = [shown(shelf) for shelf in self.shelves.values()]
                self._table = {name: _column(name, [part[name] for part in parts]) for name in SHOWN}
            return self._table


def select(table: Mapping[str, NDArray], query: Mapping[str, str]) -> tuple[NDArray[np.int64], int]:
    """The rows of ``table``, an index's, that ``query`` asks for, in its order, and how many match in all. Raises
    UserError for a filter that is none."""
    chosen = np.ones(len(table["id"]), np.bool_)
    for key, text in query.items():
        if key not in ("sort", "limit", "offset"):
            chosen &= _matches(table, key, text)
    rows = np.flatnonzero(chosen)
    if order := query.get("sort"):
        rows = rows[_order(table, order.lstrip("-"), rows, descending=order.startswith("-"))]
    start = _whole(query, "offset", 0)
    return rows[start : start + _whole(query, "limit", len(rows))], len(rows)


def file_stamp(path: Path) -> str:
    """Changes whenever ``path`` does; empty where it is not there."""
    try:
        found = path.stat()
    except OSError:
        return ""
    return f"{found.st_mtime_ns:x}.{found.st_size:x}"


def evaluation_key(n: str) -> str | None:
    """The key of the evaluation that is filed under ``n``; None for a step."""
    kind, step, decoding = (*n.split("-", 2), "", "")[:3]
    return None if kind != EVAL else f"step-{step}/{decoding}" if step else EVAL


@dataclass(frozen=True, slots=True)
class _Files:
    """What is filed: its step, its directory, what the names of its files begin with, and a stamp that changes when
    they do."""

    step: int
    directory: Path
    name: str
    stamp: str

    @property
    def stem(self) -> Path:
        return self.directory / self.name


def _filed(directory: Path) -> dict[str, _Files]:
    """Everything that is filed in ``directory`` by its name ``n``, steps first."""
    trajectories = directory / DIRECTORY
    stamps = _stamps(trajectories)
    steps = sorted((step, name) for name in stamps if (step := _number(name)) is not None)
    found = {str(step): _Files(step, trajectories, name, stamps[name]) for step, name in steps}
    for name, stamp in sorted(_stamps(directory / EVALUATIONS).items()):
        _, digits, decoding = (*name.split("-", 2), "", "")[:3]
        if digits.isdecimal() and decoding:
            found[f"eval-{int(digits)}-{decoding}"] = _Files(int(digits), directory / EVALUATIONS, name, stamp)
    if file_stamp(directory / RESULTS):
        found[EVAL] = _Files(0, directory, EVAL, "-".join(file_stamp(directory / name) for name in (RESULTS, REPORT)))
    return found


def _stamps(directory: Path) -> dict[str, str]:
    """A stamp of all files that begin with the same name, for those of them that have rows. A directory has
    thousands of files and is looked at each second, so it is listed once."""
    parts: dict[str, list[str]] = {}
    rows = set()
    for entry in _entries(directory):
        name, _, suffix = entry.name.partition(".")
        with contextlib.suppress(OSError):  # one that goes away
            found = entry.stat()
            parts.setdefault(name, []).append(f"{suffix}.{found.st_mtime_ns:x}.{found.st_size:x}")
            if suffix in ("jsonl.zst", "jsonl"):
                rows.add(name)
    return {name: "-".join(sorted(parts[name])) for name in rows}


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:
        return []


def _number(name: str) -> int | None:
    digits = name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else None


def _shelf(n: str, step: int, stem: Path) -> Shelf:
    try:
        return _evaluation(stem) if n == EVAL else _of_rows(n, step, stem)
    except _BROKEN as error:
        note = f"{n}: cannot be read ({error or type(error).__name__})"
        return Shelf(n, step, stem, {name: [] for name in COLUMNS}, (), (note,))


def _of_rows(n: str, step: int, stem: Path) -> Shelf:
    path = rows_path(stem)
    rows_stamp = path.stat().st_mtime_ns
    sidecar = sidecar_path(stem)
    if sidecar.is_file() and sidecar.stat().st_mtime_ns >= rows_stamp and (found := read_sidecar(stem)) is not None:
        columns_of, places = found
        columns_of |= {
            name: [_once(value) for value in columns_of[name]] for name in ("task", "stop", "training_status")
        }
        return Shelf(n, step, stem, columns_of, tuple(places))
    rows = list(read_rows(path))
    return Shelf(n, step, stem, columns(rows), None)


def _once(value: Any) -> Any:
    """A text that many rows have, held once."""
    return sys.intern(value) if isinstance(value, str) else value


def _evaluation(stem: Path) -> Shelf:
    """The samples of an ``agent-rl eval`` directory, each as it ended last. A line that a kill cut off is left out."""
    ended = {(result.task_id, result.sample): result for result in read_results(stem.with_name(RESULTS))}
    results = tuple(ended.values())
    groups = {task: number for number, task in enumerate(dict.fromkeys(task for task, _ in ended))}
    found: Columns = {name: [None] * len(results) for name in COLUMNS}
    found |= {
        "group": [groups[result.task_id] for result in results],
        "task": [result.task_id for result in results],
        "reward": [None if result.resolved is None else float(result.resolved) for result in results],
        "resolved": [bool(result.resolved) for result in results],
        **{name: [getattr(result, name) for result in results] for name in ("stop", "turns", "seconds", "failures")},
        "hacks": [len(result.suspected_hack) for result in results],
        "branches": [1] * len(results),
    }
    return Shelf(EVAL, 0, stem, found, (), (), results)


def log_of(shelf: Shelf, number: int) -> Path:
    """The log of sample ``number`` of an evaluation's directory."""
    result = shelf.results[number]
    return log_path(shelf.stem.parent, result.task_id, result.sample)


def shown(shelf: Shelf) -> Columns:
    """The columns of one shelf that are handed out."""
    count = len(shelf)
    own: Columns = {
        "id": [f"{shelf.n}-{number}" for number in range(count)],
        "n": [shelf.n] * count,
        "step": [shelf.step] * count,
    }
    return {name: own[name] if name in own else shelf.columns[name] for name in SHOWN}


def _column(name: str, parts: Sequence[Sequence[Any]]) -> NDArray:
    values = list(chain.from_iterable(parts))
    if name in RANGES:
        return np.array([np.nan if value is None else value for value in values], np.float64)
    return np.array(values, object) if values else np.zeros(0, object)


def _matches(table: Mapping[str, NDArray], key: str, text: str) -> NDArray[np.bool_]:
    if key in RANGES:
        low, high = _range(key, text)
        return (table[key] >= low) & (table[key] <= high)
    if key in CHOICES:
        wanted = text.split(",")
        return _each(table[key], lambda value: value in wanted)
    if key == "task":
        return _each(table["task"], lambda task: text in task)
    if key == "resolved" and text in ("true", "false"):
        return _each(table[key], lambda value: value is (text == "true"))
    raise UserError(f"{key}={text}: no such filter; there are {', '.join((*RANGES, *CHOICES, 'task', 'resolved'))}")


def _each(values: NDArray, holds: Callable[[Any], bool]) -> NDArray[np.bool_]:
    """Whether each value holds, asked once for each different one."""
    held = values.tolist()
    known = {value: holds(value) for value in set(held)}
    return np.fromiter((known[value] for value in held), np.bool_, len(held))


def _range(key: str, text: str) -> tuple[float, float]:
    """``3..9``, ``3..``, ``..9`` or ``7``."""
    low, dots, high = text.partition("..")
    try:
        start = float(low) if low else -np.inf
        return start, (float(high) if high else np.inf) if dots else start
    except ValueError:
        raise UserError(f"{key}={text}: not a range; right would be 3..9, 3.., ..9 or 7") from None


def _order(table: Mapping[str, NDArray], name: str, rows: NDArray[np.int64], *, descending: bool) -> NDArray[np.int64]:
    """The order of ``rows`` by a column; what has no value comes last."""
    if name not in table:
        raise UserError(f"sort={name}: no such column; there are {', '.join(SHOWN)}")
    values = table[name][rows]
    if name not in RANGES:
        places = {value: place for place, value in enumerate(sorted(set(values.tolist()), key=str))}
        values = np.array([places[value] for value in values.tolist()], np.float64)
    return np.argsort(-values if descending else values, kind="stable")


def _whole(query: Mapping[str, str], key: str, default: int) -> int:
    text = query.get(key)
    if text is None:
        return default
    if not text.isdecimal():
        raise UserError(f"{key}={text}: not a number; right would be 0 or more")
    return int(text)
