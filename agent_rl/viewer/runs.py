"""Resources of a whole run: its state, metrics and evaluations."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from agent_rl.errors import AgentRlError
from agent_rl.evaluation.report import Z95, EpisodeResult, best_step, wilson_interval
from agent_rl.evaluation.saved import report_path
from agent_rl.monitoring.metrics import METRICS
from agent_rl.types import StopReason
from agent_rl.utils import foreign
from agent_rl.utils.directory_lock import LOCK
from agent_rl.viewer.index import EVAL, REPORT, Index, StepIndex, evaluation_of, output_columns
from agent_rl.viewer.trajectory import model_layout

Json = dict[str, Any]
_LOCK_BYTES = 1 << 16
_METRICS = {name: metric for metric in METRICS for name in metric.names}
_UNGRADED = ("", *(stop for stop in StopReason if stop.infrastructure))
"""Endings without a reward; "" is a sample of an evaluation that never ran."""
_SAMPLE = ("id", "reward", "resolved", "stop", "turns", "seconds", "tokens")
"""Columns of a sample in the result of its task."""
_REPORTED = (
    *("pass_at_1", "interval", "graded", "tasks", "ungraded", "infrastructure_failures", "seconds", "stops"),
    *("samples", "pass_at_k", "policy", "model", "available", "requested", "usage", "cost"),
)
"""Fields of a report that the viewer shows; None in reports without them."""


def overview(index: Index) -> Json:
    """The entry of a run in the list of runs."""
    index.refresh()
    directory, notes = index.directory, list[str]()
    return _summary(index, _config(directory, notes), _evaluations(index, notes), _events(directory, notes))


def _summary(index: Index, config: Mapping[str, Any], evaluations: Sequence[Json], guard: Sequence[Json]) -> Json:
    directory, kind, steps = index.directory, _kind(index), _last_step(index.directory)
    total = _mapping(config.get("train")).get("steps") if kind == "train" else None
    last = evaluations[-1] if evaluations else None
    best = best_step({item["key"]: item for item in evaluations}) if kind == "train" else None
    return {
        "name": directory.resolve().name,
        "directory": str(directory),
        "kind": kind,
        "steps": steps,
        "total": total,
        "state": _state(directory, kind, steps, total, guard),
        "pass_at_1": [last["pass_at_1"], *last["interval"]] if last and last["pass_at_1"] is not None else None,
        "best": best and [best.step, best.pass_at_1],
        "cost": last["cost"] if last else None,
        "guard": sum(event.get("event") in ("warn", "stop") for event in guard),
    }


def run(index: Index) -> Json:
    """The state, config and evaluations of a run, without trajectories and metrics."""
    directory, notes = index.directory, list[str]()
    config, state = _config(directory, notes), _json(directory, "state.json", notes)
    summary, formats = _json(directory, "summary.json", notes), _formats(index)
    evaluations, guard = _evaluations(index, notes), _events(directory, notes)
    steps = index.step_indexes.values()
    if not (directory / "tokenizer.json").is_file() and formats:
        notes.append("the run's directory has no tokenizer.json: tokens are shown as numbers")
    if steps and all(stop in _UNGRADED for step in steps for stop in step.columns["stop"]):
        notes.append("infrastructure failures only: no trajectory was graded")
    notes += [note for step in steps for note in step.notes]
    notes += _history(directory, state, notes)
    return {
        **_summary(index, config, evaluations, guard),
        "model": str(config["model"]) if "model" in config else None,
        "config": config,
        "facts": {"group_size": _mapping(config.get("rollout")).get("group_size"), **model_layout(index)},
        "format": min(formats, default=None),
        "filed": list(index.step_indexes),
        "detail": [step.n for step in steps if step.columns["worst_gap"].count(None) < len(step)],
        "evaluations": evaluations,
        "guard": [{name: event.get(name) for name in ("step", "event", "text")} for event in guard],
        "resumes": state.get("resumes", []),
        "summary": summary or None,
        "notes": list(dict.fromkeys(notes)),
    }


def metrics(directory: Path) -> Json:
    """The metrics of all steps, by column."""
    notes: list[str] = []
    rows = _by_step(directory, "metrics.jsonl", notes)
    if not rows and not notes:
        notes = ["no step has finished yet"]
    names = [name for name in dict.fromkeys(chain.from_iterable(rows)) if name not in ("step", "time/ended")]
    columns = {name: [row.get(name) for row in rows] for name in names}
    for name in (name for name in names if None in columns[name]):
        if missing := [int(row["step"]) for row in rows if name in row and row[name] is None]:
            notes.append(f"{name}: not a number in step {', '.join(map(str, missing[:5]))}")
    return {
        "steps": [int(row["step"]) for row in rows],
        "time": [row.get("time/ended") for row in rows],
        "sampled_tokens": _cumulative_tokens(rows),
        "columns": columns,
        "help": {name: _METRICS[name].text for name in names if name in _METRICS},
        "units": {name: _METRICS[name].unit for name in names if name in _METRICS},
        "notes": notes,
    }


def evaluation(index: Index, key: str) -> Json | None:
    """One evaluation with the outcome of each task; None for an unknown key."""
    notes: list[str] = []
    found = next((one for one in _evaluations(index, notes) if one["key"] == key), None)
    if found is None:
        return None
    directory = index.directory
    whole = REPORT if key == EVAL else str(report_path(directory, key).relative_to(directory))
    report = _json(directory, whole, notes) or _mapping(_json(directory, "state.json", notes).get("evaluations")).get(
        key, {}
    )
    outcomes = report.get("outcomes") or _unreported(index, key)
    step_index = index.step_indexes.get(found["n"] or "")
    if step_index is None:
        notes.append("its trajectories were not recorded")
    samples = {} if step_index is None else _samples(step_index)
    outcomes = [{**outcome, "samples": samples.get(outcome["task_id"], [])} for outcome in outcomes]
    return {**found, "outcomes": outcomes, "notes": notes}


def _samples(index: StepIndex) -> dict[str, list[Json]]:
    """The trajectories of each task, in the order of their samples."""
    columns, samples = output_columns(index), dict[str, list[Json]]()
    numbers = sorted(range(len(index)), key=lambda number: index.results[number].sample if index.results else number)
    for number in numbers:
        samples.setdefault(columns["task"][number], []).append({name: columns[name][number] for name in _SAMPLE})
    return samples


def _unreported(index: Index, key: str) -> list[Json]:
    """The outcomes so far of an evaluation without a report."""
    step_index = index.step_indexes.get(key)
    by_task: dict[str, list[EpisodeResult]] = {}
    for result in () if step_index is None else step_index.results:
        by_task.setdefault(result.task_id, []).append(result)
    return [_outcome_so_far(task, results) for task, results in by_task.items()]


def _outcome_so_far(task: str, results: Sequence[EpisodeResult]) -> Json:
    graded = [result for result in results if result.resolved is not None]
    return {
        "task_id": task, "repo": "", "graded": len(graded), "resolved": sum(bool(result.resolved) for result in graded),
        "infrastructure_failures": sum(result.failures for result in results),
        "suspected_hacks": sum(bool(result.suspected_hack) for result in graded),
        "stops": [result.stop for result in graded],
        "turns_mean": sum(result.turns for result in graded) / len(graded) if graded else 0.0,
        "error": next((result.error for result in results if result.error), ""),
    }  # fmt: skip


def _kind(index: Index) -> str:
    directory = index.directory
    if (directory / "state.json").is_file() or (directory / "metrics.jsonl").is_file():
        return "train"
    if EVAL in index.step_indexes or (directory / REPORT).is_file():
        return "eval"
    return "rollout" if index.step_indexes else "empty"


def _state(directory: Path, kind: str, steps: int, total: int | None, guard: Sequence[Json]) -> str:
    if _is_locked(directory):
        return "running"
    if kind == "empty":
        return "empty"
    if kind != "train":
        return "finished" if kind == "rollout" or (directory / REPORT).is_file() else "stopped"
    if guard and guard[-1].get("event") == "stop" and guard[-1].get("step") == steps:
        return "guard"
    return "finished" if (directory / "summary.json").is_file() and steps == total else "stopped"


def _is_locked(directory: Path) -> bool:
    """Whether the process in the directory's lock file runs on this machine. Does not try to lock, which could stop a
    starting run."""
    try:
        holder = orjson.loads(foreign.read(directory, LOCK, _LOCK_BYTES))
        if holder["host"] != socket.gethostname():
            return False
        os.kill(int(holder["pid"]), 0)
    except PermissionError:
        return True
    except (OSError, ValueError, KeyError, TypeError, AgentRlError):
        return False
    return True


def _evaluations(index: Index, notes: list[str]) -> list[Json]:
    directory = index.directory
    if EVAL in index.step_indexes or (not (directory / "state.json").is_file() and (directory / REPORT).is_file()):
        return [_from_eval_directory(index, notes)]
    reports = _mapping(_json(directory, "state.json", notes).get("evaluations"))
    evaluations = []
    for key, report in reports.items():
        if (known := evaluation_of(key)) is None:
            notes.append(f"state.json: {key[:80]!r} is no evaluation; expected step-N/sampled or step-N/greedy")
            continue
        step, decoding = known
        n = f"eval-{step}-{decoding}"
        evaluations.append(
            {
                "key": key,
                "n": n if n in index.step_indexes else None,
                "step": step,
                "decoding": decoding,
                **{name: _mapping(report).get(name) for name in _REPORTED},
            }
        )
    return sorted(evaluations, key=lambda item: (item["step"], item["decoding"]))


def _from_eval_directory(index: Index, notes: list[str]) -> Json:
    """The evaluation of an ``agent-rl eval`` directory: its report, or the results so far."""
    report = _json(index.directory, REPORT, notes)
    n = EVAL if EVAL in index.step_indexes else None
    if not report:
        notes.append("the evaluation has no report yet: it is running or was stopped")
        report = _partial_report(index)
    return {"key": EVAL, "n": n, "step": 0, "decoding": "", **{name: report.get(name) for name in _REPORTED}}


def _partial_report(index: Index) -> Json:
    results = index.step_indexes[EVAL].results if EVAL in index.step_indexes else ()
    graded = [result for result in results if result.resolved is not None]
    rate = sum(bool(result.resolved) for result in graded) / len(graded) if graded else None
    stops = [result.stop for result in results]
    return {
        "pass_at_1": rate,
        "interval": wilson_interval(rate or 0.0, len(graded), Z95),
        "graded": len(graded),
        "tasks": len(results),
        "ungraded": len(results) - len(graded),
        "infrastructure_failures": sum(result.failures for result in results),
        "seconds": sum(result.seconds for result in results),
        "stops": {stop: stops.count(stop) for stop in dict.fromkeys(stops)},
    }


def _formats(index: Index) -> set[int]:
    return {
        found
        for step_index in index.step_indexes.values()
        if step_index.n != EVAL
        for found in set(step_index.columns["format"])
        if found
    }


def _cumulative_tokens(rows: list[dict[str, Any]]) -> list[float]:
    total, sums = 0.0, []
    for row in rows:
        total += (row.get("rollout/trajectories") or 0.0) * (row.get("rollout/sampled_tokens_mean") or 0.0)
        sums.append(total)
    return sums


def _last_step(directory: Path) -> int:
    """The step of the last valid row of metrics; 0 without one. Does not parse other rows."""
    with contextlib.suppress(OSError, AgentRlError):
        for line in reversed(foreign.read(directory, "metrics.jsonl").splitlines()):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return int(orjson.loads(line)["step"])
    return 0


def _events(directory: Path, notes: list[str]) -> list[Json]:
    return _by_step(directory, "guard.jsonl", notes)


def _history(directory: Path, state: Mapping[str, Any], notes: list[str]) -> list[str]:
    """The run's origin, and the changes of its config, a line each."""
    lines = [f"forked from {str(state['forked_from'])[:200]}"] if "forked_from" in state else []
    for row in _by_step(directory, "config_history.jsonl", notes):
        keys = ", ".join(sorted(map(str, _mapping(row.get("values")))))
        lines.append(f"config changed after step {row['step']}: {keys[:500]}")
    return lines


def _by_step(directory: Path, name: str, notes: list[str]) -> list[Json]:
    """The rows of a JSON lines file up to the first damaged one, which becomes a note."""
    rows: list[Json] = []
    try:
        for line in foreign.read(directory, name).splitlines():
            row = orjson.loads(line)
            row["step"] = int(row["step"])
            rows.append(row)
    except (ValueError, KeyError, TypeError):
        notes.append(f"{name}, line {len(rows) + 1}: damaged; shown up to there")
    except AgentRlError as error:
        notes.append(str(error))
    except OSError:
        pass
    return rows


def _config(directory: Path, notes: list[str]) -> dict[str, Any]:
    try:
        return foreign.read_config(directory)
    except AgentRlError as error:
        notes.append(str(error))
    except OSError:
        pass
    return {}


def _json(directory: Path, name: str, notes: list[str]) -> dict[str, Any]:
    """The object in the file ``name``; empty if it is missing or damaged. Damage becomes a note."""
    try:
        return dict(_mapping(orjson.loads(foreign.read(directory, name))))
    except ValueError as error:
        notes.append(f"{name}: damaged ({error})")
    except AgentRlError as error:
        notes.append(str(error))
    except OSError:
        pass
    return {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
