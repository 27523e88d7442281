"""All trajectories of a run's directory as columns, read from the step indexes next to the row files.

::

    trajectories/step-000007.index.json.zst          ─┐
    evaluations/step-000020-sampled.index.json.zst   ─┼──▶ Shelf, one for each step or evaluation ──▶ Index: columns,
    filters rows without a step index, an evaluation's logs     ─┘      (read again when its files change)
"""

from __future__ import annotations

import contextlib
import os
import re
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
from agent_rl.rollout.jsonl_zst import RowPosition, read_rows
from agent_rl.rollout.records import DIRECTORY, EVALUATIONS, arrays_path, rows_path
from agent_rl.rollout.step_index import COLUMNS, columns, read_step_index, step_index_path
from agent_rl.rollout.token_details import details_path
from agent_rl.utils import foreign

_EVALUATION = re.compile(r"step-(\d{1,9})[/-]((?:[A-Za-z0-9][\w.-]*[/-])?(?:sampled|greedy))", re.ASCII)
EVAL = "eval"
"""The name of the trajectories of an ``agent-rl eval`` directory."""
RESULTS, REPORT = "results.jsonl", "report.json"
"""Files of an ``agent-rl eval`` directory."""
SHOWN = (
    *("id", "n", "step", "group", "task", "reward", "resolved", "stop", "turns", "tokens", "sampled", "hacks"),
    *("training_status", "advantage", "branches", "versions", "seconds", "began"),
    *("worst_gap", "worst_gap_without_replay"),
)
"""The columns of the API."""
RANGES = (
    *("step", "reward", "turns", "tokens", "sampled", "hacks", "branches", "versions", "seconds", "advantage"),
    *("worst_gap", "worst_gap_without_replay", "group"),
)
"""Columns with a range filter."""
CHOICES = ("n", "stop", "training_status")
"""Columns with a filter by values."""
_BROKEN = (KeyError, TypeError, ValueError, AttributeError, OSError, AgentRlError)

Columns = dict[str, list[Any]]


@dataclass(frozen=True, slots=True)
class StepIndex:
    """The trajectories of ``n``, a step or an evaluation: their columns, the positions of their rows (None without a
    step index file), and notes on damaged files."""

    n: str
    step: int
    stem: Path
    columns: Columns
    positions: tuple[RowPosition, ...] | None
    notes: tuple[str, ...] = ()
    results: tuple[EpisodeResult, ...] = ()

    def __len__(self) -> int:
        return len(self.columns["task"])


class Index:
    """The step indexes of a run's directory. :meth:`refresh` reads changed files.

    Thread-safe: a refresh replaces :attr:`step_indexes` and :attr:`table` and does not modify earlier values.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.step_indexes: dict[str, StepIndex] = {}
        self._stamps: dict[str, str] = {}
        self._table: dict[str, NDArray] | None = None
        self._changing = threading.Lock()

    def refresh(self) -> None:
        """Read added and changed files and drop removed ones. A file that cannot be read becomes a note."""
        with self._changing:
            on_disk = _list_files(self.directory)
            stamps = {n: files.stamp for n, files in on_disk.items()}
            if stamps == self._stamps:
                return
            kept = {n: index for n, index in self.step_indexes.items() if stamps.get(n) == self._stamps.get(n)}
            self.step_indexes = {
                n: kept[n] if n in kept else _read_step_index(n, files.step, files.stem) for n, files in on_disk.items()
            }
            self._stamps, self._table = stamps, None

    def stamps(self) -> Mapping[str, str]:
        """The current stamp of the files of each step index, by name."""
        return {n: files.stamp for n, files in _list_files(self.directory).items()}

    @property
    def table(self) -> Mapping[str, NDArray]:
        """The concatenated columns of all step indexes: numbers as float64 (NaN for a missing value), others as
        objects."""
        with self._changing:
            if self._table is None:
                parts = [output_columns(step_index) for step_index in self.step_indexes.values()]
                self._table = {name: _column(name, [part[name] for part in parts]) for name in SHOWN}
            return self._table


def select(table: Mapping[str, NDArray], query: Mapping[str, str]) -> tuple[NDArray[np.int64], int]:
    """The selected rows of ``table`` in the order of ``query``, and the number of matches before offset and limit.
    Raises UserError for an unknown filter."""
    chosen = np.ones(len(table["id"]), np.bool_)
    for key, text in query.items():
        if key not in ("sort", "limit", "offset"):
            chosen &= _matches(table, key, text)
    rows = np.flatnonzero(chosen)
    if order := query.get("sort"):
        rows = rows[_order(table, order.lstrip("-"), rows, descending=order.startswith("-"))]
    start = _non_negative(query, "offset", 0)
    return rows[start : start + _non_negative(query, "limit", len(rows))], len(rows)


def file_stamp(path: Path) -> str:
    """A text that changes with ``path``; empty if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return ""
    return f"{found.st_mtime_ns:x}.{found.st_size:x}"


def evaluation_key(n: str) -> str | None:
    """The key of the evaluation ``n``; None for a step."""
    kind, step, decoding = (*n.split("-", 2), "", "")[:3]
    return None if kind != EVAL else f"step-{step}/{decoding}" if step else EVAL


def evaluation_of(key: str) -> tuple[int, str] | None:
    """Step and decoding of an evaluation's key or of the name of its files; None for any other text. The evaluation of
    a source has its name before the decoding. What is exported is named after them."""
    found = _EVALUATION.fullmatch(key)
    return None if found is None else (int(found[1]), found[2].replace("/", "-"))


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of a step or evaluation: its step, their directory and common name prefix, and their stamp."""

    step: int
    directory: Path
    name: str
    stamp: str

    @property
    def stem(self) -> Path:
        return self.directory / self.name


def _list_files(directory: Path) -> dict[str, _Files]:
    """The files of all steps and evaluations in ``directory`` by name ``n``, steps first."""
    trajectories = directory / DIRECTORY
    stamps = _stamps(trajectories)
    steps = sorted((step, name) for name in stamps if (step := _number(name)) is not None)
    found = {str(step): _Files(step, trajectories, name, stamps[name]) for step, name in steps}
    for name, stamp in sorted(_stamps(directory / EVALUATIONS).items()):
        if (known := evaluation_of(name)) is not None:
            step, decoding = known
            found[f"eval-{step}-{decoding}"] = _Files(step, directory / EVALUATIONS, name, stamp)
    if file_stamp(directory / RESULTS):
        found[EVAL] = _Files(0, directory, EVAL, "-".join(file_stamp(directory / name) for name in (RESULTS, REPORT)))
    return found


def _stamps(directory: Path) -> dict[str, str]:
    """A stamp for each name prefix with a row file. One directory listing, because the directory has thousands of files
    and is polled each second."""
    parts: dict[str, list[str]] = {}
    rows = set()
    for entry in _entries(directory):
        name, _, suffix = entry.name.partition(".")
        with contextlib.suppress(OSError):  # the file may disappear
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


def require_regular_files(stem: Path) -> None:
    """Raise AgentRlError if a file of a step or evaluation is a link or too large."""
    foreign.require_regular(step_index_path(stem), foreign.MAX_BYTES)
    for path in (rows_path(stem), arrays_path(rows_path(stem)), details_path(stem)):
        foreign.require_regular(path)


def _read_step_index(n: str, step: int, stem: Path) -> StepIndex:
    try:
        require_regular_files(stem)
        return _evaluation(stem) if n == EVAL else _from_rows(n, step, stem)
    except _BROKEN as error:
        note = f"{n}: cannot be read ({error or type(error).__name__})"
        return StepIndex(n, step, stem, {name: [] for name in COLUMNS}, (), (note,))


def _from_rows(n: str, step: int, stem: Path) -> StepIndex:
    path, file = rows_path(stem), step_index_path(stem)
    rows_stamp = path.stat().st_mtime_ns
    fresh = file.is_file() and file.stat().st_mtime_ns >= rows_stamp
    if fresh and (found := read_step_index(stem)) is not None:
        stored, positions = found
        stored |= {name: [_intern(value) for value in stored[name]] for name in ("task", "stop", "training_status")}
        return StepIndex(n, step, stem, stored, tuple(positions))
    return StepIndex(n, step, stem, columns(read_rows(path)), None)


def _intern(value: Any) -> Any:
    """``value`` with equal texts shared, because many rows repeat them."""
    return sys.intern(value) if isinstance(value, str) else value


def _evaluation(stem: Path) -> StepIndex:
    """The samples of an ``agent-rl eval`` directory with their last results, without an incomplete last line."""
    foreign.require_regular(stem.with_name(RESULTS), foreign.MAX_BYTES)
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
    return StepIndex(EVAL, 0, stem, found, (), (), results)


def log_of(step_index: StepIndex, number: int) -> Path:
    """The log file of sample ``number`` of an evaluation's directory."""
    result = step_index.results[number]
    return log_path(step_index.stem.parent, result.task_id, result.sample)


def output_columns(step_index: StepIndex) -> Columns:
    """The API's columns of one step index."""
    count = len(step_index)
    own: Columns = {
        "id": [f"{step_index.n}-{number}" for number in range(count)],
        "n": [step_index.n] * count,
        "step": [step_index.step] * count,
    }
    return {name: own[name] if name in own else step_index.columns[name] for name in SHOWN}


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


def _each(values: NDArray, predicate: Callable[[Any], bool]) -> NDArray[np.bool_]:
    """Apply ``predicate`` to each value, once for each distinct one."""
    items = values.tolist()
    results = {value: predicate(value) for value in set(items)}
    return np.fromiter((results[value] for value in items), np.bool_, len(items))


def _range(key: str, text: str) -> tuple[float, float]:
    """``3..9``, ``3..``, ``..9`` or ``7``."""
    low, dots, high = text.partition("..")
    try:
        start = float(low) if low else -np.inf
        return start, (float(high) if high else np.inf) if dots else start
    except ValueError:
        raise UserError(f"{key}={text}: not a range; expected 3..9, 3.., ..9 or 7") from None


def _order(table: Mapping[str, NDArray], name: str, rows: NDArray[np.int64], *, descending: bool) -> NDArray[np.int64]:
    """The order of ``rows`` by a column, missing values last."""
    if name not in table:
        raise UserError(f"sort={name}: no such column; there are {', '.join(SHOWN)}")
    values = table[name][rows]
    if name not in RANGES:
        ranks = {value: rank for rank, value in enumerate(sorted(set(values.tolist()), key=str))}
        values = np.array([ranks[value] for value in values.tolist()], np.float64)
    return np.argsort(-values if descending else values, kind="stable")


def _non_negative(query: Mapping[str, str], key: str, default: int) -> int:
    text = query.get(key)
    if text is None:
        return default
    if not text.isdecimal():
        raise UserError(f"{key}={text}: not a number; expected 0 or more")
    return int(text)
