"""Where task rows come from: a file (JSONL, JSON, Parquet), a data set's folder or name on the hub, a task repository.

A task repository is how swebench 5 keeps its instances in git: a folder each below ``tasks/`` (``swebench.task.repo``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from envs.swe.datasets import says_how, with_spec
from envs.swe.datasets.swebench import shows_images
from envs.swe.records import SweRecord, problems_of
from envs.types import TaskRecordError

FILE_TYPES = (".jsonl", ".json", ".parquet")
REAL_TASKS = "real.jsonl"
"""The file that configs/real.yaml names, and `make real-tasks` makes."""
HUB_SECONDS = 5.0
_TOLD = 4

Row = tuple[int, Mapping[str, Any] | str]
"""A row's number, from 1, and the row; or a sentence on why there is none."""


@dataclass(frozen=True, slots=True)
class Records:
    """What was read. ``broken`` has a line for every field that was wrong in a row that was skipped; ``pictured`` is
    the number of records whose problem statement comes with images, which no record holds."""

    records: Sequence[SweRecord]
    broken: Sequence[str] = ()
    pictured: int = 0


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
    """Whether ``path`` is a folder that holds one data set: saved, cloned from the hub, or a task repository."""
    return _is_saved(path) or _is_task_repository(path) or any((path / "data").glob("*.parquet"))


def _is_saved(path: Path) -> bool:
    """Whether ``path`` is a folder that ``datasets`` wrote with ``save_to_disk``."""
    return any((path / file).is_file() for file in ("dataset_dict.json", "state.json"))


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
    if path.suffix in FILE_TYPES:
        if not path.is_file():
            made = "; `make real-tasks` builds it" if path.name == REAL_TASKS else ""
            raise TaskRecordError(f"{path}: no such file; right would be a file of task records{made}")
        readers = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}
        return readers[path.suffix](path)
    return _task_repository(path, split) if _is_task_repository(path) else _data_set(str(source), split)


def _jsonl(path: Path) -> Iterator[Row]:
    # What is not UTF-8 becomes text that no field of a record may hold, so that its row is named.
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


def _task_repository(path: Path, split: str | None) -> Iterator[Row]:
    try:
        from swebench.task.repo import load_task, task_dirs
    except ImportError:
        raise TaskRecordError(f"{path}: a task repository needs swebench: pip install 'agent-rl[swebench]'") from None
    for number, folder in enumerate(task_dirs(path), start=1):
        try:
            row = load_task(folder)
        except (OSError, ValueError, TypeError) as error:
            yield number, f"{folder.name}: no whole task ({_first_line(error)})"
            continue
        if split is None or row.get("split") in (None, split):
            yield number, row


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
        if _is_saved(Path(name)):
            found = datasets.load_from_disk(name)
        else:
            with nullcontext() if _hub_answers(name) else _from_cache_alone():
                found = datasets.load_dataset(name, split=split)
    except Exception as error:  # hub, network and file errors of a dozen classes; all mean that it can't be read
        raise TaskRecordError(f"{name}: no such data set, or it cannot be read ({_first_line(error)})") from None
    if isinstance(found, Mapping):
        if split is None and len(found) == 1:
            split = next(iter(found))
        if split not in found:
            raise TaskRecordError(f"{name}: data_split is {split!r}; it has {', '.join(sorted(found))}")
        found = found[split]
    yield from enumerate(found, start=1)


def _hub_answers(name: str) -> bool:
    """Whether the hub can be asked for data set ``name``; a folder does not need it."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        Path(name).exists() or get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception:  # of whichever HTTP library the client uses
        return False
    return True


@contextmanager
def _from_cache_alone() -> Iterator[None]:
    """Let the hub's client read its cache and ask nothing: it would go on for half a minute and print each failure."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
