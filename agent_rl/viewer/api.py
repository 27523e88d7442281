"""The viewer's resources: maps a path to JSON, for one run directory or several.

::

    runs                                      all runs
    R/run  R/metrics  R/trajectories?...      of run number R
    R/steps/N  R/loads/N  R/eval/KEY          of one step, or of one evaluation
    R/t/N-K                                   of one trajectory
    R/routes/N-K  R/routes/N-K/map            of its first branch; branch B has N-K.B
    R/live                                    of the running step
    R/search?text=...&n=N                     the texts of one step; without n, of all

N is a global step, ``eval-20-sampled`` for an evaluation of a training run, or ``eval`` in an evaluation's directory. K
is the index of the trajectory in N. Every resource has ``notes`` on missing data. An unknown path and a damaged file
give an object with ``error``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from agent_rl.errors import AgentRlError, UserError
from agent_rl.utils.directory_lock import LOCK
from agent_rl.viewer import in_progress as live
from agent_rl.viewer import runs, trajectory
from agent_rl.viewer.index import Index, StepIndex, evaluation_key, file_stamp, output_columns, select
from agent_rl.viewer.search import search
from agent_rl.viewer.trajectory import Reader

Json = dict[str, Any]
_FILES = {"run": ("state.json", "summary.json", "guard.jsonl", LOCK), "metrics": ("metrics.jsonl",)}
_BROKEN = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError, OSError)


class ResourceNotFoundError(Exception):
    """No such resource. ``kind``: "absent" for a valid path without data, "unknown" for an invalid path."""

    def __init__(self, text: str, kind: str = "absent") -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class _Run:
    index: Index
    reader: Reader
    running: live.RunningStep


class Resources:
    """The resources of ``directories``. Reading blocks on the disk. Raises UserError for a missing directory."""

    def __init__(self, directories: Sequence[Path]) -> None:
        for directory in directories:
            if not directory.is_dir():
                raise UserError(f"{directory}: not a directory; expected the directory of a run or an evaluation")
        indexes = [Index(directory) for directory in directories]
        self._runs = [_Run(index, Reader(index), live.RunningStep(index.directory)) for index in indexes]

    def read(self, path: str, query: Mapping[str, str] | None = None) -> Json:
        """The resource at ``path``, ready for JSON. Never raises."""
        try:
            return self._read(path.strip("/").split("/"), query or {})
        except ResourceNotFoundError as error:
            return _error(error.kind, str(error))
        except UserError as error:
            return _error("unknown", str(error))
        except FileNotFoundError as error:
            return _error("absent", f"{error.filename}: no longer exists")
        except (AgentRlError, *_BROKEN) as error:
            return _error("damaged", f"{path}: {error or type(error).__name__}")

    def body(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        """:meth:`read` as JSON. NaN becomes null, a lone surrogate a question mark."""
        try:
            return as_json(self.read(path, query))
        except (TypeError, ValueError, RecursionError) as error:  # values that no JSON has
            return as_json(_error("damaged", f"{path}: {error}"))

    def stamps(self) -> dict[str, str]:
        """A stamp for each resource, which changes with its files. Cheap enough to call each second."""
        stamps: dict[str, str] = {}
        for number, index in enumerate(run.index for run in self._runs):
            for name, files in _FILES.items():
                stamps[f"{number}/{name}"] = "-".join(file_stamp(index.directory / file) for file in files)
            stamps[f"{number}/live"] = live.stamp(index.directory)
            for n, stamp in index.stamps().items():
                key = evaluation_key(n)
                stamps |= {f"{number}/{path}": stamp for path in (f"steps/{n}", key and f"eval/{key}") if path}
        return stamps

    def pages(self) -> Iterator[str]:
        """All paths except those of single trajectories, their routes, the running step and searches."""
        yield "runs"
        for number, index in enumerate(run.index for run in self._runs):
            index.refresh()
            yield from (f"{number}/{name}" for name in ("run", "metrics", "trajectories"))
            for n in index.step_indexes:
                yield from (f"{number}/steps/{n}", f"{number}/loads/{n}")
            evaluations = self.read(f"{number}/run").get("evaluations", ())
            yield from (f"{number}/eval/{evaluation['key']}" for evaluation in evaluations)

    def _read(self, parts: Sequence[str], query: Mapping[str, str]) -> Json:
        if parts == ["runs"]:
            return {"runs": [{"run": n, **runs.overview(run.index)} for n, run in enumerate(self._runs)], "notes": []}
        number, name, rest = parts[0], (parts[1] if len(parts) > 1 else ""), "/".join(parts[2:])
        if not number.isdecimal() or int(number) >= len(self._runs):
            raise ResourceNotFoundError(
                f"{'/'.join(parts)}: no such run; there are {len(self._runs)}, numbered from 0", "unknown"
            )
        run = self._runs[int(number)]
        if not run.index.directory.is_dir():
            raise ResourceNotFoundError(f"{run.index.directory}: no longer exists")
        if name not in ("metrics", "live"):  # these do not use trajectories
            run.index.refresh()
        if (collection := self._collections.get(name)) is not None and not rest:
            return collection(run, query)
        if (item := self._items.get(name)) is not None and rest:
            return item(run, rest, query)
        raise ResourceNotFoundError(f"{'/'.join(parts)}: no such resource", "unknown")

    _collections: Mapping[str, Callable[[_Run, Mapping[str, str]], Json]] = {
        "run": lambda run, query: runs.run(run.index),
        "metrics": lambda run, query: runs.metrics(run.index.directory),
        "trajectories": lambda run, query: _trajectories(run.index, query),
        "live": lambda run, query: run.running.episodes(),
        "search": lambda run, query: search(run.index, query.get("text", ""), query.get("n", "")),
    }
    _items: Mapping[str, Callable[[_Run, str, Mapping[str, str]], Json]] = {
        "steps": lambda run, n, query: _step(_step_index(run.index, n)),
        "loads": lambda run, n, query: trajectory.loads(_step_index(run.index, n)),
        "eval": lambda run, key, query: _evaluation(run.index, key),
        "t": lambda run, id, query: run.reader.trajectory(*_trajectory(run.index, id)),
        "routes": lambda run, id, query: _routes(run.index, run.reader, id, query),
    }


def as_json(resource: Json) -> bytes:
    """``resource`` as JSON text."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(resource, option=options)
    except TypeError:  # a model may write lone surrogates and integers over 64 bits
        return orjson.dumps(_plain(resource), option=options)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 63:
        return str(value)
    return value


def _error(kind: str, text: str) -> Json:
    return {"error": {"kind": kind, "text": " ".join(text.split())}, "notes": []}


def _step_index(index: Index, n: str) -> StepIndex:
    if (step_index := index.step_indexes.get(n)) is None:
        raise ResourceNotFoundError(f"{index.directory}: no trajectories of {n}")
    return step_index


def _trajectory(index: Index, id: str) -> tuple[StepIndex, int]:
    n, _, number = id.rpartition("-")
    step_index = _step_index(index, n)
    if not len(step_index) and step_index.notes:
        raise AgentRlError(step_index.notes[0])
    if not number.isdecimal() or int(number) >= len(step_index):
        raise ResourceNotFoundError(f"{id}: {n} has {len(step_index)} trajectories, numbered from 0")
    return step_index, int(number)


def _trajectories(index: Index, query: Mapping[str, str]) -> Json:
    table = index.table
    rows, found = select(table, query)
    return {
        "total": len(table["id"]),
        "found": found,
        "columns": {name: _column_json(name, values[rows]) for name, values in table.items()},
        "notes": [note for step_index in index.step_indexes.values() for note in step_index.notes],
    }


_COUNTS = ("step", "turns", "tokens", "sampled", "hacks", "branches", "versions", "group")


def _column_json(name: str, values: NDArray) -> NDArray | list[Any]:
    """Counts as integers, None for NaN; other values unchanged."""
    if name in _COUNTS:
        complete = not np.isnan(values).any()
        return values.astype(np.int64) if complete else [None if value != value else int(value) for value in values]
    return values.tolist() if values.dtype == object else values


def _step(index: StepIndex) -> Json:
    columns = output_columns(index)
    members: dict[int, list[int]] = {}
    for number, group in enumerate(columns["group"]):
        members.setdefault(group, []).append(number)
    groups = [
        {
            "group": group,
            "task": columns["task"][numbers[0]],
            "infrastructure_failures": index.columns["failures"][numbers[0]],
            "members": [columns["id"][number] for number in numbers],
            "trained": any(columns["training_status"][number] == "trained" for number in numbers),
        }
        for group, numbers in members.items()
    ]
    return {"n": index.n, "step": index.step, "columns": columns, "groups": groups, "notes": list(index.notes)}


def _evaluation(index: Index, key: str) -> Json:
    found = runs.evaluation(index, key)
    if found is None:
        raise ResourceNotFoundError(f"{index.directory}: no evaluation {key}")
    return found


def _routes(index: Index, reader: Reader, rest: str, query: Mapping[str, str]) -> Json:
    name, _, kind = rest.partition("/")
    step_index, branch_id = _branch(index, name)
    if kind == "map":
        return reader.layer_map(step_index, branch_id)
    if kind:
        raise ResourceNotFoundError(f"routes/{rest}: no such resource", "unknown")
    found = reader.routes(step_index, branch_id, _number(query, "from") or 0, _number(query, "to"))
    if found is None:
        raise ResourceNotFoundError(f"{name}: its routes were not recorded")
    return found


def _branch(index: Index, name: str) -> tuple[StepIndex, trajectory.BranchId]:
    id, _, branch = name.partition(".")
    step_index, number = _trajectory(index, id)
    count = step_index.columns["branches"][number]
    if branch and not (branch.isdecimal() and int(branch) < count):
        raise ResourceNotFoundError(f"{name}: {id} has {count} branches, numbered from 0")
    return step_index, (number, int(branch or 0))


def _number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name, "")
    return int(text) if text.isdecimal() else None
