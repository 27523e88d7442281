"""Reads saved evaluations: an evaluation's directory or file, or an evaluation of a training run.

::

    DIR, DIR/results.jsonl   an output of `agent-rl eval`, finished or not
    DIR/report.json          its report
    RUN:step-20/sampled      an evaluation of a training run, by step and decoding
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from agent_rl.errors import AgentRlError, UserError
from agent_rl.evaluation.directory import last_graded, read_results
from agent_rl.evaluation.paired import Score
from agent_rl.evaluation.report import EpisodeResult
from agent_rl.evaluation.usage import Usage
from agent_rl.rollout.records import evaluation_stem, rows_path
from agent_rl.utils import foreign

_KEY = re.compile(r"step-\d{1,9}/([A-Za-z0-9][\w.-]*/)?(sampled|greedy)", re.ASCII)
_MAX_SAMPLES = 1_000_000
EXPECTED = "expected an evaluation's directory, its results.jsonl or report.json, or RUN:step-N/sampled"


@dataclass(frozen=True, slots=True)
class Effort:
    """What a task took: mean turns and seconds of its samples; their tokens and cost (USD), None if unknown."""

    turns: float
    seconds: float | None
    usage: Usage | None
    cost: float | None


@dataclass(frozen=True, slots=True)
class SavedEvaluation:
    """One evaluation: each task's score by task id, and the known settings.

    ``model``: its name, or the policy's; empty if it is not recorded. ``efforts``: by task id, from the report; empty
    without one.
    """

    name: str
    scores: Mapping[str, Score]
    settings: Mapping[str, Any]
    model: str = ""
    efforts: Mapping[str, Effort] = field(default_factory=dict)


def read_evaluation(name: str) -> SavedEvaluation:
    """The evaluation ``name``. Raises UserError if there is none."""
    path = Path(name)
    if not path.exists():
        return _from_run(name)
    path = path.resolve()  # the user may name a link; links within the directory are not followed
    file = path / "results.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{name}: {_describe_contents(path)}; {EXPECTED}")
    if file.suffix == ".jsonl":
        _require_regular(file)
        settings = file.with_name("settings.json")
        known = _json(settings) if settings.exists() else {}
        known = known if isinstance(known, dict) else {}
        report = file.with_name("report.json")
        finished = _from_report(name, _json(report)) if report.exists() else SavedEvaluation(name, {}, {})
        model = finished.model or _model_name(known.get("model") if "request" in known else "", known)
        return SavedEvaluation(name, _scores(read_results(file)), known, model, finished.efforts)
    return _from_report(name, _json(file))


def _from_run(name: str) -> SavedEvaluation:
    directory, _, key = name.rpartition(":")
    run = Path(directory).resolve()
    if not directory or not (run / "state.json").is_file():
        raise UserError(f"{name}: no such evaluation; {EXPECTED}")
    reports = _reports(run)
    if key not in reports:
        raise UserError(f"{name}: the run has no evaluation {key!r}; it has {', '.join(reports) or 'none'}")
    full = report_path(run, key)
    return _from_report(name, _json(full) if full.is_file() else reports[key])


def _reports(run: Path) -> dict[str, Any]:
    """The reports in the run's ``state.json`` by step and decoding, without other keys."""
    state = _json(run / "state.json")
    reports = state.get("evaluations") if isinstance(state, dict) else None
    known = reports.items() if isinstance(reports, dict) else ()
    return {key: report for key, report in known if _KEY.fullmatch(key)}


def episodes_path(name: str) -> Path:
    """The directory with the logs of evaluation ``name`` (:func:`read_evaluation`), or the file with its episodes."""
    path = Path(name)
    if not path.exists():
        run, _, key = name.rpartition(":")
        return rows_path(evaluation_stem(Path(run).resolve(), key))
    return path.resolve() if path.is_dir() else path.resolve().parent


def report_path(run_dir: Path, key: str) -> Path:
    """The path of the full report of a training run's evaluation ``key``."""
    stem = evaluation_stem(run_dir, key)
    return stem.with_name(f"{stem.name}.report.json")


def _from_report(name: str, report: Any) -> SavedEvaluation:
    try:
        scores = {str(row["task_id"]): _score(row) for row in report["outcomes"]}
        efforts = {str(row["task_id"]): _effort(row) for row in report["outcomes"]}
        settings = {"env": report["env"], "policy": report["policy"]}
        return SavedEvaluation(name, scores, settings, _model_name(report.get("model"), settings), efforts)
    except (TypeError, KeyError, ValueError, AttributeError):
        raise UserError(f"{name}: not a report of an evaluation; {EXPECTED}") from None


def _model_name(model: object, settings: Mapping[str, Any]) -> str:
    """``model``, or the policy if it has no model; empty for an engine whose model has no recorded name."""
    policy = str(settings.get("policy", ""))
    return str(model or ("" if policy == "engine" else policy))


def _require_regular(path: Path) -> None:
    try:
        foreign.require_regular(path, foreign.MAX_BYTES)
    except AgentRlError as error:
        raise UserError(f"{path.parent}: {error}") from None


def _score(row: Mapping[str, Any]) -> Score:
    """Raises ValueError for counts that no evaluation has."""
    resolved, graded = int(row["resolved"]), int(row["graded"])
    if not 0 <= resolved <= graded <= _MAX_SAMPLES:
        raise ValueError(f"{resolved} of {graded} samples")
    return Score(resolved, graded)


def _effort(row: Mapping[str, Any]) -> Effort:
    """Raises TypeError or ValueError for values of another kind."""
    cost, seconds = row.get("cost"), row.get("seconds_mean")
    return Effort(
        turns=float(row["turns_mean"]),
        seconds=None if seconds is None else float(seconds),
        usage=Usage.parse(row.get("usage")),
        cost=None if cost is None else float(cost),
    )


def _json(path: Path) -> Any:
    _require_regular(path)
    try:
        return orjson.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); {EXPECTED}") from None


def _describe_contents(path: Path) -> str:
    reports = _reports(path) if (path / "state.json").is_file() else {}
    return f"a run's directory with the evaluations {', '.join(reports)}" if reports else "contains no evaluation"


def _scores(results: list[EpisodeResult]) -> dict[str, Score]:
    graded: dict[str, list[bool]] = defaultdict(list)
    for (task, _), result in last_graded(results).items():
        graded[task].append(bool(result.resolved))
    return {r.task_id: Score(sum(graded.get(r.task_id, ())), len(graded.get(r.task_id, ()))) for r in results}
