"""Reads task rows from a file (JSONL, JSON, Parquet), a data set's directory or hub name, or a task repository.

A task repository is swebench 5's git layout with one directory per instance below ``tasks/``
(``swebench.task.repo``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from envs.rows import BrokenRowsError, Row, first_line, is_data_set_directory, read_rows
from envs.swe.datasets import has_grading_spec, join_spec
from envs.swe.datasets.swebench import has_images
from envs.swe.datasets.swebench_wheel import derive_specs, is_wheel
from envs.swe.records import SweRecord, validation_problems
from envs.types import TaskRecordError

REAL_TASKS = "real.jsonl"
"""The file in configs/real.yaml; `make real-tasks` creates it."""


@dataclass(frozen=True, slots=True)
class Records:
    """The records of a source. ``broken`` has one line per broken field of a skipped row. ``with_images`` is the number
    of records whose problem statement has images; records contain only text."""

    records: Sequence[SweRecord]
    broken: Sequence[str] = ()
    with_images: int = 0


def read_jsonl(path: Path | str) -> list[SweRecord]:
    """The records of a local file, one per line. Raises ``TaskRecordError`` for broken rows."""
    return list(read_records(path).records)


def read_records(
    source: Path | str, *, split: str | None = None, skip_broken: bool = False, specs: Path | str | None = None
) -> Records:
    """All records of ``source``; ``split`` selects the split of a data set with several.

    ``specs`` is another source of SWE-bench rows with their grading. A row of ``source`` without grading takes it from
    the row with the same ``instance_id`` there. A wheel of swebench 4 gives the grading of all its repositories.

    Raises ``BrokenRowsError`` for broken rows unless ``skip_broken`` is set, and ``TaskRecordError`` for a source that
    cannot be read or is empty.
    """
    records: list[SweRecord] = []
    problems: list[str] = []
    first_rows: dict[str, int] = {}
    specs_by_id = {} if specs is None else _by_instance(specs, split, source)
    with_images = 0
    for number, row in _rows(source, split):
        try:
            if isinstance(row, str):
                raise ValueError(row)
            record = SweRecord.model_validate(join_spec(row, specs_by_id))
            if (first := first_rows.setdefault(record.id, number)) != number:
                raise ValueError(f"task_id: {record.id!r} is the id of row {first} too; ids must be unique")
        except ValueError as error:
            found = validation_problems(error) if isinstance(error, ValidationError) else [str(error)]
            problems += [f"row {number}: {problem}" for problem in found]
        else:
            records.append(record)
            with_images += has_images(row)
    if problems and not skip_broken:
        raise BrokenRowsError(str(source), problems)
    if not records:
        raise TaskRecordError(f"{source}: contains no {'valid ' if problems else ''}task record")
    return Records(records, problems, with_images)


def is_data_set(path: Path) -> bool:
    """Whether ``path`` is the directory of one data set: saved, cloned from the hub, or a task repository."""
    return is_data_set_directory(path) or _is_task_repository(path)


def _is_task_repository(path: Path) -> bool:
    return (path / "sweb.yaml").is_file() and (path / "tasks").is_dir()


def _by_instance(specs: Path | str, split: str | None, source: Path | str) -> dict[str, Mapping[str, Any]]:
    """The rows of ``specs`` by ``instance_id``. Raises ``TaskRecordError`` if none has a grading."""
    if is_wheel(specs):
        return derive_specs(specs, [row for _, row in _rows(source, split) if not isinstance(row, str)])
    rows = [row for _, row in _rows(specs, split) if not isinstance(row, str)]
    by_id = {str(row["instance_id"]): row for row in rows if row.get("instance_id") and has_grading_spec(row)}
    if not by_id:
        raise TaskRecordError(f"specs: {specs}: no row with instance_id and eval_script; right would be swebench 5's")
    return by_id


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
            yield number, f"{directory.name}: not a complete task ({first_line(error)})"
            continue
        if split is None or row.get("split") in (None, split):
            yield number, row
