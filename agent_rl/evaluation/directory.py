"""An evaluation on disk, so that one that was killed goes on where it stopped.

::

    settings.json             what is evaluated; another evaluation is refused the same directory
    results.jsonl             one line a sample that ended, in the order they ended; what a resume reads
    logs/<task>/<sample>.json the messages, tool calls, times and every test's status of that sample
    logs/<task>/<sample>.log  what its tests printed (the end of it)
    predictions.jsonl         each task's patch in SWE-bench's format (further samples: predictions-<sample>.jsonl)
    report.json               Pass@1 with everything it is made of
    report-swebench.json      the same in the format of SWE-bench's own reports (schema version 2)
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from agent_rl.errors import ConfigError
from agent_rl.evaluation.report import EpisodeResult, EvalReport
from agent_rl.types import Trajectory
from agent_rl.utils.run_files import read_json, write_atomic, write_json
from envs import Task

_LONGEST_NAME = 200


class EvaluationDirectory:
    """The directory of one evaluation. ``settings`` are what its figures depend on. Raises ConfigError for a
    directory that holds graded samples of other settings; one in which nothing was graded is begun anew.

    ``defaults`` are the settings that a release may add: one that an older directory says nothing of had this value.
    A setting that only the directory has is of another release, and is not compared.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any], *, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.path = path
        self._results = path / "results.jsonl"
        self._settings = _plain(settings)
        if not any(result.resolved is not None for result in self.results()):
            self._forget()
        elif (path / "settings.json").exists():
            _check_same(path, {**_plain(defaults), **read_json(path / "settings.json")}, self._settings)

    def results(self) -> list[EpisodeResult]:
        """The samples that ended so far. A last line that a kill cut off is dropped, and its sample run again."""
        if not self._results.exists():
            return []
        whole, _, torn = self._results.read_bytes().rpartition(b"\n")
        if torn:
            write_atomic(self._results, whole + b"\n" if whole else b"")
        return read_results(self._results)

    def record(self, result: EpisodeResult, trajectory: Trajectory | None) -> None:
        """Write a sample that ended, its log first: a result that stands in the directory has one. The first result
        comes with the settings: an evaluation that never got anywhere leaves its directory free."""
        if not (self.path / "settings.json").exists():
            write_json(self.path / "settings.json", self._settings)
        if trajectory is not None:
            # Not orjson: a model may write integers over 64 bits and lone surrogates, which it refuses.
            write_atomic(self.log_of(result), json.dumps(_log(result, trajectory), indent=1).encode())
            if trajectory.test_log:
                self.log_of(result).with_suffix(".log").write_text(trajectory.test_log, errors="replace")
        with self._results.open("ab") as file:
            file.write(json.dumps(asdict(result)).encode() + b"\n")

    def _forget(self) -> None:
        """Remove the results, none of which was graded, and what they were results of."""
        for path in (self._results, self.path / "settings.json"):
            path.unlink(missing_ok=True)

    def log_of(self, result: EpisodeResult) -> Path:
        return log_path(self.path, result.task_id, result.sample)

    def finish(self, report: EvalReport, tasks: Sequence[Task], model: str) -> None:
        """Write the report and the predictions, in our format and in SWE-bench's."""
        report.write(self.path / "report.json")
        graded = last_graded(self.results())
        for sample in range(report.samples):
            name = "predictions.jsonl" if sample == 0 else f"predictions-{sample}.jsonl"
            rows = [prediction(graded[task.id, sample], model) for task in tasks if (task.id, sample) in graded]
            write_atomic(self.path / name, "".join(json.dumps(row) + "\n" for row in rows).encode())
        first = {task_id: result for (task_id, sample), result in graded.items() if sample == 0}
        reasons = {result.task_id: result.error for result in self.results() if result.sample == 0 and result.error}
        write_json(self.path / "report-swebench.json", swebench_report([task.id for task in tasks], first, reasons))


def read_results(path: Path) -> list[EpisodeResult]:
    """The whole lines of a ``results.jsonl``. Raises ConfigError for one that is no result."""
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [_read(path, number, line) for number, line in enumerate(whole.splitlines(), 1)]


def prediction(result: EpisodeResult, model: str) -> dict[str, str]:
    """A row of SWE-bench's predictions file."""
    return {"instance_id": result.task_id, "model_name_or_path": model, "model_patch": result.patch}


def swebench_report(
    task_ids: Sequence[str], first: Mapping[str, EpisodeResult], reasons: Mapping[str, str]
) -> dict[str, Any]:
    """The run report of SWE-bench's harness (swebench 5, schema version 2) over each task's first sample.

    A task that could not be graded is one of its ``error_ids`` and ``infra_failure_ids``, ``reasons`` saying why; as
    there, an empty patch is not counted as completed. We tell infrastructure and policy apart, so nothing is ambiguous.
    """
    ids: dict[str, list[str]] = defaultdict(list)
    for task_id in sorted(task_ids):
        result = first.get(task_id)
        if result is None:
            ids["error"].append(task_id)
            ids["infra_failure"].append(task_id)
        elif not result.patch:
            ids["empty_patch"].append(task_id)
        else:
            ids["completed"].append(task_id)
            ids["resolved" if result.resolved else "unresolved"].append(task_id)
    kinds = ("completed", "resolved", "unresolved", "infra_failure", "ambiguous_failure", "empty_patch", "error")
    return {
        "total_instances": len(task_ids),
        "submitted_instances": len(task_ids),
        **{f"{kind}_instances": len(ids[kind]) for kind in kinds},
        "submitted_ids": sorted(task_ids),
        "incomplete_ids": [],
        **{f"{kind}_ids": ids[kind] for kind in kinds},
        "failure_reasons": {task_id: reasons.get(task_id, "") for task_id in ids["infra_failure"]},
        "schema_version": 2,
    }


def log_path(directory: Path, task_id: str, sample: int) -> Path:
    """The log of a sample in an evaluation's directory."""
    return directory / "logs" / _dir_name(task_id) / f"{sample}.json"


def _dir_name(task_id: str) -> str:
    """A directory's name for a task: never ``.`` or ``..``, no hidden one, and short enough for every file system."""
    name = quote(task_id, safe="@[]=,+", errors="surrogatepass") or "%"
    name = f"%2E{name[1:]}" if name.startswith(".") else name
    if len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(task_id.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{name[: _LONGEST_NAME - 17]}-{digest}"


def last_graded(results: Iterable[EpisodeResult]) -> dict[tuple[str, int], EpisodeResult]:
    """By task and sample, those that were graded: of a sample that ended several times, how it ended last."""
    return {(result.task_id, result.sample): result for result in results if result.resolved is not None}


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as they come back from JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(settings)))
    return plain


def _check_same(path: Path, held: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    for key in sorted(asked):
        if held.get(key) != asked.get(key):
            raise ConfigError(
                f"{path}: holds an evaluation with {key} {_short(held.get(key))}, this one has "
                f"{_short(asked.get(key))}: give another --out, or remove the directory"
            )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read(path: Path, number: int, line: bytes) -> EpisodeResult:
    try:
        row = json.loads(line)
        return EpisodeResult(**{**row, "suspected_hack": tuple(row["suspected_hack"])})
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{path}:{number}: no result of an evaluation ({error}); remove the line") from None


def _log(result: EpisodeResult, trajectory: Trajectory) -> dict[str, Any]:
    return {
        **asdict(result),
        "messages": [dict(message) for message in trajectory.messages],
        "turns": [asdict(turn) for turn in trajectory.turns],
        "grade_seconds": trajectory.grade_seconds,
        "tests": dict(trajectory.tests),
    }
