"""An evaluation on disk, so that a killed evaluation resumes.

::

    settings.json             the evaluation's settings; other settings are refused
    results.jsonl             one line for each finished sample, in the order of completion; a resume reads it
    logs/<task>/<sample>.json messages, tool calls, times and test statuses of a sample
    logs/<task>/<sample>.log  the end of its tests' output
    predictions.jsonl         each task's patch in SWE-bench's format (further samples: predictions-<sample>.jsonl)
    report.json               Pass@1 and all counts
    report-swebench.json      the same in SWE-bench's report format (schema version 2)
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
from agent_rl.evaluation.usage import Usage
from agent_rl.types import Trajectory
from agent_rl.utils.run_files import read_json, write_atomic, write_json
from envs import Task

_MAX_NAME_CHARS = 200


class EvaluationDirectory:
    """The directory of one evaluation. Its results depend on ``settings``.

    Raises ConfigError if the directory has graded samples of other settings. A directory without graded samples is
    cleared. ``defaults`` are the values of settings that ``settings.json`` lacks. Settings that only ``settings.json``
    has are ignored.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any], *, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.path = path
        self._results = path / "results.jsonl"
        self._settings = _json_round_trip(settings)
        if not any(result.resolved is not None for result in self.results()):
            self._clear()
        elif (path / "settings.json").exists():
            _check_same(path, {**_json_round_trip(defaults), **read_json(path / "settings.json")}, self._settings)

    def results(self) -> list[EpisodeResult]:
        """The finished samples. An incomplete last line is dropped, and its sample runs again."""
        if not self._results.exists():
            return []
        complete, _, incomplete = self._results.read_bytes().rpartition(b"\n")
        if incomplete:
            write_atomic(self._results, complete + b"\n" if complete else b"")
        return read_results(self._results)

    def record(self, result: EpisodeResult, trajectory: Trajectory | None) -> None:
        """Write a finished sample, its log first, so that every result has one. The first result also writes the
        settings, so that an evaluation without results leaves the directory unused."""
        if not (self.path / "settings.json").exists():
            write_json(self.path / "settings.json", self._settings)
        if trajectory is not None:
            # orjson rejects integers over 64 bits and lone surrogates, which a model may write.
            write_atomic(self.log_of(result), json.dumps(_log(result, trajectory), indent=1).encode())
            if trajectory.test_log:
                self.log_of(result).with_suffix(".log").write_text(trajectory.test_log, errors="replace")
        with self._results.open("ab") as file:
            file.write(json.dumps(asdict(result)).encode() + b"\n")

    def _clear(self) -> None:
        """Remove the settings and the results, none of which is graded."""
        for path in (self._results, self.path / "settings.json"):
            path.unlink(missing_ok=True)

    def log_of(self, result: EpisodeResult) -> Path:
        return log_path(self.path, result.task_id, result.sample)

    def finish(self, report: EvalReport, tasks: Sequence[Task], model: str) -> None:
        """Write the predictions and the report, also in SWE-bench's format."""
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
    """The complete lines of a ``results.jsonl``. Raises ConfigError for an invalid line."""
    complete = path.read_bytes().rpartition(b"\n")[0]
    return [_parse_result(path, number, line) for number, line in enumerate(complete.splitlines(), 1)]


def prediction(result: EpisodeResult, model: str) -> dict[str, str]:
    """A row of SWE-bench's predictions file."""
    return {"instance_id": result.task_id, "model_name_or_path": model, "model_patch": result.patch}


def swebench_report(
    task_ids: Sequence[str], first: Mapping[str, EpisodeResult], reasons: Mapping[str, str]
) -> dict[str, Any]:
    """The run report of SWE-bench's harness (swebench 5, schema version 2) over each task's first sample.

    An ungraded task is in ``error_ids`` and ``infra_failure_ids``, with its entry of ``reasons``. As in the harness an
    empty patch does not count as completed. ``ambiguous_failure_ids`` is always empty, because infrastructure failures
    are distinct here.
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
    """The path of a sample's log in an evaluation's directory."""
    return directory / "logs" / _dir_name(task_id) / f"{sample}.json"


def _dir_name(task_id: str) -> str:
    """The directory name of a task: not hidden, not ``.`` or ``..``, at most 200 characters."""
    name = quote(task_id, safe="@[]=,+", errors="surrogatepass") or "%"
    name = f"%2E{name[1:]}" if name.startswith(".") else name
    if len(name) <= _MAX_NAME_CHARS:
        return name
    digest = hashlib.sha256(task_id.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{name[: _MAX_NAME_CHARS - 17]}-{digest}"


def last_graded(results: Iterable[EpisodeResult]) -> dict[tuple[str, int], EpisodeResult]:
    """The last graded result of each task and sample."""
    return {(result.task_id, result.sample): result for result in results if result.resolved is not None}


def _json_round_trip(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings after a round trip through JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(settings)))
    return plain


def _check_same(path: Path, stored: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    for key in sorted(settings):
        if stored.get(key) != settings.get(key):
            raise ConfigError(
                f"{path}: contains an evaluation with {key} {_short(stored.get(key))}, this one has "
                f"{_short(settings.get(key))}: choose another --out, or remove the directory"
            )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _parse_result(path: Path, number: int, line: bytes) -> EpisodeResult:
    try:
        row = json.loads(line)
        parsed = {"suspected_hack": tuple(row["suspected_hack"]), "usage": Usage.parse(row.get("usage"))}
        result = EpisodeResult(**{**row, **parsed})
        if not (isinstance(result.task_id, str) and isinstance(result.sample, int)):
            raise ValueError("task_id is not a text or sample not a number")
        return result
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path}:{number}: not a result of an evaluation ({error}); remove the line") from None


def _log(result: EpisodeResult, trajectory: Trajectory) -> dict[str, Any]:
    return {
        **asdict(result),
        "messages": [dict(message) for message in trajectory.messages],
        "turns": [asdict(turn) for turn in trajectory.turns],
        "grade_seconds": trajectory.grade_seconds,
        "tests": dict(trajectory.tests),
        "model_calls": [asdict(call) for call in trajectory.model_calls],
    }
