"""Where task rows come from: a local file (JSONL, JSON, Parquet), a saved data set, a name on the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from envs.swe.records import SweRecord, problems_of
from envs.types import TaskRecordError

FILE_TYPES = (".jsonl", ".json", ".parquet")
_TOLD = 4

Row = tuple[int, Mapping[str, Any] | str]
"""A row's number, from 1, and the row; or a sentence on why there is none."""


@dataclass(frozen=True, slots=True)
class Records:
    """What was read. ``broken`` has a line for every field that was wrong in a row that was skipped."""

    records: Sequence[SweRecord]
    broken: Sequence[str] = ()


class BrokenRowsError(TaskRecordError):
    """Rows cannot be used. ``problems`` has a line for every broken field: the row's number, the field, its fault."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        if len(problems) == 1:
            message = f"{source}: {problems[0]}"
        else:
            more = [f"and {len(problems) - _TOLD} more"] if len(problems) > _TOLD else []
            listed = "; ".join([*problems[:_TOLD], *more])
            message = f"{source}: {len(problems)} broken fields (skip_broken: true leaves their rows out): {listed}"
        super().__init__(message)


def read_jsonl(path: Path | str) -> list[SweRecord]:
    """The records of a local file, one a line. Raises ``TaskRecordError`` for broken rows."""
    return list(read_records(path).records)


def read_records(source: Path | str, *, split: str | None = None, skip_broken: bool = False) -> Records:
    """All records of ``source``; ``split`` says which part of a data set is meant, where it has several.

    Raises ``BrokenRowsError`` for broken rows unless ``skip_broken``, and ``TaskRecordError`` for a source that cannot
    be read or holds nothing.
    """
    records: list[SweRecord] = []
    problems: list[str] = []
    seen: dict[str, int] = {}
    for number, row in _rows(source, split):
        found = [row] if isinstance(row, str) else _take(row, number, records, seen)
        problems += [f"row {number}: {problem}" for problem in found]
    if problems and not skip_broken:
        raise BrokenRowsError(str(source), problems)
    if not records:
        raise TaskRecordError(f"{source}: holds no task record" + (" that is whole" if problems else ""))
    return Records(records, problems)


def is_saved_data_set(path: Path) -> bool:
    """Whether ``path`` is a folder that ``datasets`` wrote with ``save_to_disk``."""
    return any((path / file).is_file() for file in ("dataset_dict.json", "state.json"))


def _take(row: Mapping[str, Any], number: int, records: list[SweRecord], seen: dict[str, int]) -> list[str]:
    """Add the row's record, or say what is wrong with it."""
    try:
        record = SweRecord.model_validate(row)
    except ValidationError as error:
        return problems_of(error)
    if (first := seen.setdefault(record.id, number)) != number:
        return [f"task_id: {record.id!r} is row {first}'s; ids are unique"]
    records.append(record)
    return []


def _rows(source: Path | str, split: str | None) -> Iterator[Row]:
    path = Path(source)
    if path.suffix in FILE_TYPES:
        if not path.is_file():
            raise TaskRecordError(f"{path}: no such file; right would be a file of task records")
        readers = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}
        return readers[path.suffix](path)
    return _data_set(str(source), split)


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _object(line)


def _object(line: str) -> Mapping[str, Any] | str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return f"not JSON ({error}); right would be one JSON object a line"
    return row if isinstance(row, dict) else f"a {type(row).__name__}; right would be one JSON object a line"


def _json(path: Path) -> Iterator[Row]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise TaskRecordError(f"{path}: not JSON ({error}); right would be a list of objects") from None
    if not isinstance(rows, list):
        raise TaskRecordError(f"{path}: a {type(rows).__name__}; right would be a list of objects")
    for number, row in enumerate(rows, start=1):
        yield number, row if isinstance(row, dict) else f"a {type(row).__name__}; right would be an object"


def _parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise TaskRecordError(f"{path}: reading Parquet needs pyarrow: pip install 'agent-rl[datasets]'") from None
    try:
        with ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=64):
                for row in batch.to_pylist():
                    yield (number := number + 1), row
    except ArrowInvalid as error:
        raise TaskRecordError(f"{path}: not Parquet ({str(error).splitlines()[0]})") from None


def _data_set(name: str, split: str | None) -> Iterator[Row]:
    """The rows of a data set: a folder that ``save_to_disk`` wrote, or one that ``load_dataset`` finds."""
    try:
        import datasets
    except ImportError:
        raise TaskRecordError(
            f"{name}: neither a file of task records ({', '.join(FILE_TYPES)}) nor a folder of them; if it is a data "
            "set's name on the Hugging Face hub, it needs datasets: pip install 'agent-rl[datasets]'"
        ) from None
    try:
        found = (
            datasets.load_from_disk(name) if is_saved_data_set(Path(name)) else datasets.load_dataset(name, split=split)
        )
    except Exception as error:  # hub, network and file errors of a dozen classes; all mean that it can't be read
        raise TaskRecordError(f"{name}: no such data set, or it cannot be read ({_first_line(error)})") from None
    if isinstance(found, Mapping):
        if split is None and len(found) == 1:
            split = next(iter(found))
        if split not in found:
            raise TaskRecordError(f"{name}: data_split is {split!r}; it has {', '.join(sorted(found))}")
        found = found[split]
    yield from enumerate(found, start=1)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
