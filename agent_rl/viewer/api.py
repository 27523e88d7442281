"""What the viewer's page reads: one function from a path to JSON, over one run's directory or several.

::

    runs                                      all runs
    R/run  R/metrics  R/trajectories?...      of run number R
    R/steps/N  R/loads/N  R/eval/KEY          of one step, or of one evaluation
    R/t/N-K                                   of one trajectory
    R/routes/N-K  R/routes/N-K/map            of its first branch; those of branch B are of N-K.B
    R/live                                    of the step that is under way

N is a global step, ``eval-20-sampled`` for an evaluation of a training run, or ``eval`` in the directory of an
evaluation; K is the trajectory's number in it. Every answer has ``notes``: what is missing and why. A path that
leads to nothing, and a file that is damaged, is an answer with ``error``.
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
from agent_rl.viewer.index import Index, Shelf, evaluation_key, file_stamp, select, shown
from agent_rl.viewer.trajectory import Reader

Answer = dict[str, Any]
_FILES = {"run": ("state.json", "summary.json", "guard.jsonl", LOCK), "metrics": ("metrics.jsonl",)}
_BROKEN = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError, OSError)


class Absent(Exception):
    """There is no such resource; ``kind`` says whether the path is one at all."""

    def __init__(self, text: str, kind: str = "absent") -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class _Run:
    index: Index
    reader: Reader
    running: live.Running


class Resources:
    """The resources of ``directories``. Raises UserError for one that is no directory. Reading blocks on the disk."""

    def __init__(self, directories: Sequence[Path]) -> None:
        for directory in directories:
            if not directory.is_dir():
                raise UserError(f"{directory}: no directory; right would be a run's or an evaluation's")
        indexes = [Index(directory) for directory in directories]
        self._runs = [_Run(index, Reader(index), live.Running(index.directory)) for index in indexes]

    def read(self, path: str, query: Mapping[str, str] | None = None) -> Answer:
        """The resource at ``path``, ready for JSON. Never raises."""
        try:
            return self._read(path.strip("/").split("/"), query or {})
        except Absent as error:
            return _error(error.kind, str(error))
        except UserError as error:
            return _error("unknown", str(error))
        except FileNotFoundError as error:
            return _error("absent", f"{error.filename}: it is gone")
        except (AgentRlError, *_BROKEN) as error:
            return _error("damaged", f"{path}: {error or type(error).__name__}")

    def body(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        """:meth:`read` as JSON; what is no number is null, a lone surrogate a question mark."""
        return as_json(self.read(path, query))

    def stamps(self) -> dict[str, str]:
        """By resource, a text that changes whenever its files do; cheap enough to ask each second."""
        found: dict[str, str] = {}
        for number, index in enumerate(run.index for run in self._runs):
            for name, files in _FILES.items():
                found[f"{number}/{name}"] = "-".join(file_stamp(index.directory / file) for file in files)
            found[f"{number}/live"] = live.stamp(index.directory)
            for n, stamp in index.stamps().items():
                key = evaluation_key(n)
                found |= {f"{number}/{path}": stamp for path in (f"steps/{n}", key and f"eval/{key}") if path}
        return found

    def pages(self) -> Iterator[str]:
        """Every path but those of single trajectories, their routes, and what is under way."""
        yield "runs"
        for number, index in enumerate(run.index for run in self._runs):
            index.refresh()
            yield from (f"{number}/{name}" for name in ("run", "metrics", "trajectories"))
            for n in index.shelves:
                yield from (f"{number}/steps/{n}", f"{number}/loads/{n}")
            evaluations = self.read(f"{number}/run").get("evaluations", ())
            yield from (f"{number}/eval/{evaluation['key']}" for evaluation in evaluations)

    def _read(self, parts: Sequence[str], query: Mapping[str, str]) -> Answer:
        if parts == ["runs"]:
            return {"runs": [{"run": n, **runs.overview(run.index)} for n, run in enumerate(self._runs)], "notes": []}
        number, name, rest = parts[0], (parts[1] if len(parts) > 1 else ""), "/".join(parts[2:])
        if not number.isdecimal() or int(number) >= len(self._runs):
            raise Absent(f"{'/'.join(parts)}: no such run; there are {len(self._runs)}, from 0", "unknown")
        run = self._runs[int(number)]
        if not run.index.directory.is_dir():
            raise Absent(f"{run.index.directory}: it is gone")
        if name not in ("metrics", "live"):  # these are made of no trajectories
            run.index.refresh()
        if (whole := self._whole.get(name)) is not None and not rest:
            return whole(run, query)
        if (single := self._single.get(name)) is not None and rest:
            return single(run, rest, query)
        raise Absent(f"{'/'.join(parts)}: no such resource", "unknown")

    _whole: Mapping[str, Callable[[_Run, Mapping[str, str]], Answer]] = {
        "run": lambda run, query: runs.run(run.index),
        "metrics": lambda run, query: runs.metrics(run.index.directory),
        "trajectories": lambda run, query: _trajectories(run.index, query),
        "live": lambda run, query: run.running.episodes(),
    }
    _single: Mapping[str, Callable[[_Run, str, Mapping[str, str]], Answer]] = {
        "steps": lambda run, n, query: _step(_shelf(run.index, n)),
        "loads": lambda run, n, query: trajectory.loads(_shelf(run.index, n)),
        "eval": lambda run, key, query: _evaluation(run.index, key),
        "t": lambda run, id, query: run.reader.whole(*_member(run.index, id)),
        "routes": lambda run, id, query: _routes(run.index, run.reader, id, query),
    }


def as_json(answer: Answer) -> bytes:
    """``answer`` as JSON."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(answer, option=options)
    except TypeError:  # a model may write lone surrogates and integers over 64 bits
        return orjson.dumps(_plain(answer), option=options)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(held) for held in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 63:
        return str(value)
    return value


def _error(kind: str, text: str) -> Answer:
    return {"error": {"kind": kind, "text": " ".join(text.split())}, "notes": []}


def _shelf(index: Index, n: str) -> Shelf:
    if (found := index.shelves.get(n)) is None:
        raise Absent(f"{index.directory}: no trajectories of {n}")
    return found


def _member(index: Index, id: str) -> tuple[Shelf, int]:
    n, _, number = id.rpartition("-")
    shelf = _shelf(index, n)
    if not len(shelf) and shelf.notes:
        raise AgentRlError(shelf.notes[0])
    if not number.isdecimal() or int(number) >= len(shelf):
        raise Absent(f"{id}: {n} has {len(shelf)} trajectories, numbered from 0")
    return shelf, int(number)


def _trajectories(index: Index, query: Mapping[str, str]) -> Answer:
    table = index.table
    rows, found = select(table, query)
    return {
        "total": len(table["id"]),
        "found": found,
        "columns": {name: _listed(name, values[rows]) for name, values in table.items()},
        "notes": [note for shelf in index.shelves.values() for note in shelf.notes],
    }


_COUNTS = ("step", "turns", "tokens", "sampled", "hacks", "branches", "versions", "group")


def _listed(name: str, values: NDArray) -> NDArray | list[Any]:
    """Counts as whole numbers, None where there is none; other numbers as they are, of which JSON makes NaN null."""
    if name in _COUNTS:
        counted = not np.isnan(values).any()
        return values.astype(np.int64) if counted else [None if value != value else int(value) for value in values]
    return values.tolist() if values.dtype == object else values


def _step(shelf: Shelf) -> Answer:
    columns = shown(shelf)
    members: dict[int, list[int]] = {}
    for number, group in enumerate(columns["group"]):
        members.setdefault(group, []).append(number)
    groups = [
        {
            "group": group,
            "task": columns["task"][own[0]],
            "infrastructure_failures": shelf.columns["failures"][own[0]],
            "members": [columns["id"][number] for number in own],
            "trained": any(columns["training_status"][number] == "trained" for number in own),
        }
        for group, own in members.items()
    ]
    return {"n": shelf.n, "step": shelf.step, "columns": columns, "groups": groups, "notes": list(shelf.notes)}


def _evaluation(index: Index, key: str) -> Answer:
    found = runs.evaluation(index, key)
    if found is None:
        raise Absent(f"{index.directory}: no evaluation {key}")
    return found


def _routes(index: Index, reader: Reader, rest: str, query: Mapping[str, str]) -> Answer:
    name, _, kind = rest.partition("/")
    shelf, which = _branch(index, name)
    if kind == "map":
        return reader.layer_map(shelf, which)
    if kind:
        raise Absent(f"routes/{rest}: no such resource", "unknown")
    found = reader.routes(shelf, which, _number(query, "from") or 0, _number(query, "to"))
    if found is None:
        raise Absent(f"{name}: its routes were not kept")
    return found


def _branch(index: Index, name: str) -> tuple[Shelf, trajectory.Which]:
    id, _, branch = name.partition(".")
    shelf, number = _member(index, id)
    count = shelf.columns["branches"][number]
    if branch and not (branch.isdecimal() and int(branch) < count):
        raise Absent(f"{name}: {id} has {count} branches, numbered from 0")
    return shelf, (number, int(branch or 0))


def _number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name, "")
    return int(text) if text.isdecimal() else None
