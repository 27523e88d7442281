"""Reads rows from a file (JSONL, JSON, Parquet), a data set's directory, or a data set on the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from envs.types import TaskRecordError

FILE_TYPES = (".jsonl", ".json", ".parquet")
HUB_SECONDS = 5.0
_MAX_LISTED_PROBLEMS = 4

Record = TypeVar("Record")
Row = tuple[int, Mapping[str, Any] | str]
"""A row's number, from 1, and the row, or the reason why it cannot be read."""


class BrokenRowsError(TaskRecordError):
    """Broken rows. ``problems`` has a line for each broken field: row number, field, fault."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        if len(problems) == 1:
            message = f"{source}: {problems[0]}"
        else:
            more = [f"and {len(problems) - _MAX_LISTED_PROBLEMS} more"] if len(problems) > _MAX_LISTED_PROBLEMS else []
            listed = "; ".join([*problems[:_MAX_LISTED_PROBLEMS], *more])
            message = f"{source}: {len(problems)} broken fields (skip_broken: true leaves their rows out): {listed}"
        super().__init__(message)


def select_split(
    path: Path, split: str, heldout: int | None, read: Callable[[str], Sequence[Record]], *, is_data_set: bool
) -> Sequence[Record]:
    """The records of ``split``; ``read`` returns the records of a source.

    A directory has a file for each split, unless ``is_data_set``. In any other source the last ``heldout`` records are
    the split "heldout" and the others "train"; with None every split has all records. Raises ``TaskRecordError`` for an
    unknown split.
    """
    if path.is_dir() and not is_data_set:
        files = {file.stem: file for file in sorted(path.iterdir()) if file.suffix in FILE_TYPES}
        if not files:
            raise TaskRecordError(f"{path}: the directory has no file of task records ({', '.join(FILE_TYPES)})")
        if split not in files:
            raise TaskRecordError(f"{path}: no split {split!r}; it holds: {', '.join(sorted(files))}")
        return read(str(files[split]))
    records = read(str(path))
    if heldout is None:
        return records
    count = max(0, len(records) - heldout)
    splits = {"train": records[:count], "heldout": records[count:]}
    if split not in splits:
        raise TaskRecordError(f"{path}: no split {split!r}; a single file has train and heldout")
    return splits[split]


def is_data_set_directory(path: Path) -> bool:
    """Whether ``path`` is the directory of one data set: saved with ``save_to_disk``, or cloned from the hub."""
    return _is_saved(path) or any((path / "data").glob("*.parquet"))


def read_rows(source: Path | str, split: str | None, *, missing: str = "") -> Iterator[Row]:
    """The rows of ``source``. ``split`` selects the part of a data set with several. ``missing`` is appended to the
    error for a missing file. Raises ``TaskRecordError`` for a source that cannot be read."""
    path = Path(source)
    if path.suffix not in FILE_TYPES:
        return _data_set(str(source), split)
    if not path.is_file():
        raise TaskRecordError(f"{path}: no such file; right would be a file of task records{missing}")
    readers = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}
    return readers[path.suffix](path)


def _is_saved(path: Path) -> bool:
    """Whether ``datasets`` wrote the directory with ``save_to_disk``."""
    return any((path / file).is_file() for file in ("dataset_dict.json", "state.json"))


def _jsonl(path: Path) -> Iterator[Row]:
    # surrogateescape turns bytes that are not UTF-8 into text that no field accepts, so that the error names the row.
    with path.open(encoding="utf-8", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _object(line)


def _object(line: str) -> Mapping[str, Any] | str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error}); right would be one JSON object a line"
    return row if isinstance(row, dict) else f"a {type(row).__name__}; right would be one JSON object a line"


def _json(path: Path) -> Iterator[Row]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
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
    """The rows of a data set: a directory of ``save_to_disk``, or a name for ``load_dataset``."""
    try:
        import datasets
    except ImportError:
        raise TaskRecordError(
            f"{name}: neither a file of task records ({', '.join(FILE_TYPES)}) nor a directory of them; if it is a "
            "data "
            "set's name on the Hugging Face hub, it needs datasets: pip install 'agent-rl[datasets]'"
        ) from None
    try:
        if _is_saved(Path(name)):
            data = datasets.load_from_disk(name)
        else:
            with nullcontext() if _is_reachable(name) else _offline():
                data = datasets.load_dataset(name, split=split)
    except Exception as error:  # hub, network and file errors have no common base
        raise TaskRecordError(f"{name}: no such data set, or it cannot be read ({first_line(error)})") from None
    if isinstance(data, Mapping):
        if split is None and len(data) == 1:
            split = next(iter(data))
        if split not in data:
            raise TaskRecordError(f"{name}: data_split is {split!r}; it has {', '.join(sorted(data))}")
        data = data[split]
    yield from enumerate(data, start=1)


def _is_reachable(name: str) -> bool:
    """Whether the hub is reachable; True for a directory, which does not need it."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        Path(name).exists() or get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception:  # depends on the client's HTTP library
        return False
    return True


@contextmanager
def _offline() -> Iterator[None]:
    """Make the hub's client use only its cache. Online it would retry for 30 s and print each failure."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def first_line(error: Exception) -> str:
    """The first line of the error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
