"""Reads saved evaluations: an evaluation's directory or file, or an evaluation of a training run.

::

    DIR, DIR/results.jsonl   an output of `agent-rl eval`, finished or not
    DIR/report.json          its report
    RUN:step-20/sampled      an evaluation of a training run, by step and decoding
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_rl.errors import UserError
from agent_rl.evaluation.directory import last_graded, read_results
from agent_rl.evaluation.paired import Score
from agent_rl.evaluation.report import EpisodeResult
from agent_rl.rollout.records import evaluation_stem
from agent_rl.utils.run_files import read_json

EXPECTED = "expected an evaluation's directory, its results.jsonl or report.json, or RUN:step-N/sampled"


@dataclass(frozen=True, slots=True)
class SavedEvaluation:
    """One evaluation: each task's score by task id, and the known settings."""

    name: str
    scores: Mapping[str, Score]
    settings: Mapping[str, Any]


def read_evaluation(name: str) -> SavedEvaluation:
    """The evaluation ``name``. Raises UserError if there is none."""
    path = Path(name)
    if not path.exists():
        return _from_run(name)
    file = path / "results.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{name}: {_describe_contents(path)}; {EXPECTED}")
    if file.suffix == ".jsonl":
        settings = file.with_name("settings.json")
        return SavedEvaluation(name, _scores(read_results(file)), read_json(settings) if settings.exists() else {})
    return _from_report(name, _json(file))


def _from_run(name: str) -> SavedEvaluation:
    directory, _, key = name.rpartition(":")
    state = Path(directory) / "state.json"
    if not directory or not state.is_file():
        raise UserError(f"{name}: no such evaluation; {EXPECTED}")
    reports = _json(state).get("evaluations", {})
    if key not in reports:
        raise UserError(f"{name}: the run has no evaluation {key!r}; it has {', '.join(reports) or 'none'}")
    full = report_path(Path(directory), key)
    return _from_report(name, _json(full) if full.is_file() else reports[key])


def report_path(run_dir: Path, key: str) -> Path:
    """The path of the full report of a training run's evaluation ``key``."""
    stem = evaluation_stem(run_dir, key)
    return stem.with_name(f"{stem.name}.report.json")


def _from_report(name: str, report: Any) -> SavedEvaluation:
    try:
        scores = {row["task_id"]: Score(row["resolved"], row["graded"]) for row in report["outcomes"]}
        return SavedEvaluation(name, scores, {"env": report["env"], "policy": report["policy"]})
    except (TypeError, KeyError):
        raise UserError(f"{name}: not a report of an evaluation; {EXPECTED}") from None


def _json(path: Path) -> Any:
    try:
        return read_json(path)
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); {EXPECTED}") from None


def _describe_contents(path: Path) -> str:
    state = path / "state.json"
    reports = _json(state).get("evaluations", {}) if state.is_file() else {}
    return f"a run's directory with the evaluations {', '.join(reports)}" if reports else "contains no evaluation"


def _scores(results: list[EpisodeResult]) -> dict[str, Score]:
    graded: dict[str, list[bool]] = defaultdict(list)
    for (task, _), result in last_graded(results).items():
        graded[task].append(bool(result.resolved))
    return {r.task_id: Score(sum(graded.get(r.task_id, ())), len(graded.get(r.task_id, ()))) for r in results}
