"""Evaluations that have been made, read again: an evaluation's directory or file, or one of a training run's own.

::

    DIR, DIR/results.jsonl   what `agent-rl eval` wrote, also of an evaluation that is still under way
    DIR/report.json             its report alone
    RUN:step-20/sampled            an evaluation that a training run made, by its step and its decoding
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

RIGHT = "right would be an evaluation's directory, its results.jsonl or report.json, or RUN:step-N/sampled"


@dataclass(frozen=True, slots=True)
class Finished:
    """One evaluation: every task's score by its id, and the settings that are known of it."""

    name: str
    scores: Mapping[str, Score]
    settings: Mapping[str, Any]


def read_evaluation(name: str) -> Finished:
    """The evaluation that ``name`` leads to. Raises UserError, in one line, where there is none."""
    path = Path(name)
    if not path.exists():
        return _of_run(name)
    file = path / "results.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{name}: {_what_there_is(path)}; {RIGHT}")
    if file.suffix == ".jsonl":
        settings = file.with_name("settings.json")
        return Finished(name, _scores(read_results(file)), read_json(settings) if settings.exists() else {})
    return _of_report(name, _json(file))


def _of_run(name: str) -> Finished:
    directory, _, key = name.rpartition(":")
    state = Path(directory) / "state.json"
    if not directory or not state.is_file():
        raise UserError(f"{name}: there is no such evaluation; {RIGHT}")
    made = _json(state).get("evaluations", {})
    if key not in made:
        raise UserError(f"{name}: the run has no evaluation {key!r}; it has {', '.join(made) or 'none'}")
    whole = report_path(Path(directory), key)
    return _of_report(name, _json(whole) if whole.is_file() else made[key])


def report_path(run_dir: Path, key: str) -> Path:
    """The whole report of a training run's evaluation ``key``; older runs have theirs in ``state.json``."""
    stem = evaluation_stem(run_dir, key)
    return stem.with_name(f"{stem.name}.report.json")


def _of_report(name: str, report: Any) -> Finished:
    try:
        scores = {row["task_id"]: Score(row["resolved"], row["graded"]) for row in report["outcomes"]}
        return Finished(name, scores, {"env": report["env"], "policy": report["policy"]})
    except (TypeError, KeyError):
        raise UserError(f"{name}: no report of an evaluation; {RIGHT}") from None


def _json(path: Path) -> Any:
    try:
        return read_json(path)
    except ValueError as error:
        raise UserError(f"{path}: no JSON ({error}); {RIGHT}") from None


def _what_there_is(path: Path) -> str:
    state = path / "state.json"
    made = _json(state).get("evaluations", {}) if state.is_file() else {}
    return f"a run's directory, with the evaluations {', '.join(made)}" if made else "no evaluation is in it"


def _scores(results: list[EpisodeResult]) -> dict[str, Score]:
    graded: dict[str, list[bool]] = defaultdict(list)
    for (task, _), result in last_graded(results).items():
        graded[task].append(bool(result.resolved))
    return {r.task_id: Score(sum(graded.get(r.task_id, ())), len(graded.get(r.task_id, ()))) for r in results}
