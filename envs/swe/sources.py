"""Where task rows come from: a file (JSONL, JSON, Parquet), a data set's directory or name on the hub, a task
repository.

A task repository is how swebench 5 keeps its instances in git: a directory each below ``tasks/``
(``swebench.task.repo``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from envs.rows import BrokenRowsError, Row, first_line, is_one_data_set, read_rows
from envs.swe.datasets import says_how, with_spec
from envs.swe.datasets.swebench import shows_images
from envs.swe.records import SweRecord, problems_of
from envs.types import TaskRecordError

REAL_TASKS = "real.jsonl"
"""The file that configs/real.yaml names, and `make real-tasks` makes."""


@dataclass(frozen=True, slots=True)
class Records:
    """What was read. ``broken`` has a line for every field that was wrong in a row that was skipped; ``pictured`` is
    the number of records whose problem statement comes with images, which no record holds."""

    records: Sequence[SweRecord]
    broken: Sequence[str] = ()
    pictured: int = 0


def read_jsonl(path: Path | str) -> list[SweRecord]:
    """The records of a local file, one a line. Raises ``TaskRecordError`` for broken rows."""
    return list(read_records(path).records)


def read_records(
    source: Path | str, *, split: str | None = None, skip_broken: bool = False, specs: Path | str | None = None
) -> Records:
    """All records of ``source``; ``split`` says which part of a data set is meant, where it has several.

    ``specs`` is another source, of SWE-bench rows that say how they are graded: a row of ``source`` that doesn't is
    graded as the one with its ``instance_id`` there.

    Raises ``BrokenRowsError`` for broken rows unless ``skip_broken``, and ``TaskRecordError`` for a source that cannot
    be read or holds nothing.
    """
    records: list[SweRecord] = []
    problems: list[str] = []
    seen: dict[str, int] = {}
    known = _by_instance(specs, split) if specs is not None else {}
    pictured = 0
    for number, row in _rows(source, split):
        found = [row] if isinstance(row, str) else _take(row, number, records, seen, known)
        problems += [f"row {number}: {problem}" for problem in found]
        pictured += not found and not isinstance(row, str) and shows_images(row)
    if problems and not skip_broken:
        raise BrokenRowsError(str(source), problems)
    if not records:
        raise TaskRecordError(f"{source}: holds no task record" + (" that is whole" if problems else ""))
    return Records(records, problems, pictured)


def is_data_set(path: Path) -> bool:
    """Whether ``path`` is a directory that holds one data set: saved, cloned from the hub, or a task repository."""
    return is_one_data_set(path) or _is_task_repository(path)


def _is_task_repository(path: Path) -> bool:
    return (path / "sweb.yaml").is_file() and (path / "tasks").is_dir()


def _by_instance(specs: Path | str, split: str | None) -> dict[str, Mapping[str, Any]]:
    """The rows of ``specs`` by ``instance_id``. Raises ``TaskRecordError`` where they don't say how they are graded."""
    rows = [row for _, row in _rows(specs, split) if not isinstance(row, str)]
    found = {str(row["instance_id"]): row for row in rows if row.get("instance_id") and says_how(row)}
    if not found:
        raise TaskRecordError(f"specs: {specs}: no row with instance_id and eval_script; right would be swebench 5's")
    return found


def _take(
    row: Mapping[str, Any],
    number: int,
    records: list[SweRecord],
    seen: dict[str, int],
    specs: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """Add the row's record, or say what is wrong with it."""
    try:
        record = SweRecord.model_validate(with_spec(row, specs))
    except ValidationError as error:
        return problems_of(error)
    except ValueError as error:
        return [str(error)]
    if (first := seen.setdefault(record.id, number)) != number:
        return [f"task_id: {record.id!r} is row {first}'s; ids are unique"]
    records.append(record)
    return []


def _rows(source: Path | str, split: str | None) -> Iterator[Row]:
    path = Path(source)
    if _is_task_repository(path):
        return _task_repository(path, split)
    return read_rows(source, split, missing="; `make real-tasks` builds it" if path.name == REAL_TASKS else "")


def _task_repository(path: Path, split: str | None) -> Iterator[Row]:
    try:
        from swebench.task.repo import load_task, task_dirs
    except ImportError:
        raise TaskRecordError(f"{path}: a task repository needs swebench: pip install 'agent-rl[swebench]'") from None
    for number, directory in enumerate(task_dirs(path), start=1):
        try:
            row = load_task(directory)
        except (OSError, ValueError, TypeError) as error:
            yield number, f"{directory.name}: no whole task ({first_line(error)})"
            continue
        if split is None or row.get("split") in (None, split):
            yield number, row
