"""A run as a whole: what it is, how far it has come, its metrics and its evaluations."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import orjson
import yaml

from agent_rl.evaluation.finished import report_path
from agent_rl.evaluation.report import Z95, wilson_interval
from agent_rl.monitoring.metrics import METRICS
from agent_rl.types import StopReason
from agent_rl.utils.directory_lock import LOCK
from agent_rl.viewer.index import EVAL, REPORT, Index
from agent_rl.viewer.trajectory import layout_of

Answer = dict[str, Any]
_METRICS = {name: metric for metric in METRICS for name in metric.names}
_UNGRADED = ("", *(stop for stop in StopReason if stop.infrastructure))
"""Endings without a reward; an evaluation's sample that never ran has none."""
_REPORTED = (*("pass_at_1", "interval", "graded", "tasks", "ungraded", "infrastructure_failures", "seconds", "stops"),)


def overview(index: Index) -> Answer:
    """One line of the list of runs."""
    index.refresh()
    directory, notes = index.directory, list[str]()
    return _line(index, _config(directory, notes), _evaluations(index, notes), _events(directory, notes))


def _line(index: Index, config: Mapping[str, Any], evaluations: Sequence[Answer], guard: Sequence[Answer]) -> Answer:
    directory, kind, steps = index.directory, _kind(index), _last_step(index.directory)
    total = _mapping(config.get("train")).get("steps") if kind == "train" else None
    last = evaluations[-1] if evaluations else None
    return {
        "name": directory.resolve().name,
        "directory": str(directory),
        "kind": kind,
        "steps": steps,
        "total": total,
        "state": _state(directory, kind, steps, total, guard),
        "pass_at_1": [last["pass_at_1"], *last["interval"]] if last and last["pass_at_1"] is not None else None,
        "guard": sum(event.get("event") in ("warn", "stop") for event in guard),
    }


def run(index: Index) -> Answer:
    """All that is known of the run but its trajectories and metrics."""
    directory, notes = index.directory, list[str]()
    config, state = _config(directory, notes), _json(directory / "state.json", notes)
    summary, formats = _json(directory / "summary.json", notes), _formats(index)
    evaluations, guard = _evaluations(index, notes), _events(directory, notes)
    shelves = index.shelves.values()
    if not (directory / "tokenizer.json").is_file() and formats:
        notes.append("the run's directory has no tokenizer.json: tokens are shown as numbers")
    if 2 in formats:
        notes.append("written in format 2: without fates, tests, times and what the trainer saw of tokens")
    if shelves and all(stop in _UNGRADED for shelf in shelves for stop in shelf.columns["stop"]):
        notes.append("infrastructure failures only: no trajectory was graded")
    notes += [note for shelf in shelves for note in shelf.notes]
    return {
        **_line(index, config, evaluations, guard),
        "model": str(config["model"]) if "model" in config else None,
        "config": config,
        "facts": {"group_size": _mapping(config.get("rollout")).get("group_size"), **layout_of(index)},
        "format": min(formats, default=None),
        "filed": list(index.shelves),
        "detail": [shelf.n for shelf in shelves if shelf.columns["worst_gap"].count(None) < len(shelf)],
        "evaluations": evaluations,
        "guard": [{name: event.get(name) for name in ("step", "event", "text")} for event in guard],
        "resumes": state.get("resumes", []),
        "summary": summary or None,
        "notes": list(dict.fromkeys(notes)),
    }


def metrics(directory: Path) -> Answer:
    """All steps' metrics, column by column."""
    notes: list[str] = []
    rows = _by_step(directory / "metrics.jsonl", notes)
    if not rows and not notes:
        notes = ["no step has ended yet"]
    names = [name for name in dict.fromkeys(chain.from_iterable(rows)) if name not in ("step", "time/ended")]
    columns = {name: [row.get(name) for row in rows] for name in names}
    for name in (name for name in names if None in columns[name]):
        if missing := [int(row["step"]) for row in rows if name in row and row[name] is None]:
            notes.append(f"{name}: not a number in step {', '.join(map(str, missing[:5]))}")
    return {
        "steps": [int(row["step"]) for row in rows],
        "time": [row.get("time/ended") for row in rows],
        "sampled_tokens": _cumulated(rows),
        "columns": columns,
        "help": {name: _METRICS[name].text for name in names if name in _METRICS},
        "units": {name: _METRICS[name].unit for name in names if name in _METRICS},
        "notes": notes,
    }


def evaluation(index: Index, key: str) -> Answer | None:
    """One evaluation with the outcome of every task; None where there is none of that key."""
    notes: list[str] = []
    found = next((one for one in _evaluations(index, notes) if one["key"] == key), None)
    if found is None:
        return None
    directory = index.directory
    whole = directory / REPORT if key == EVAL else report_path(directory, key)
    report = _json(whole, notes) or _mapping(_json(directory / "state.json", notes).get("evaluations")).get(key, {})
    outcomes = report.get("outcomes") or _unreported(index, key)
    ids: dict[str, str] = {}
    if (shelf := index.shelves.get(found["n"] or "")) is not None:
        for number, task in enumerate(shelf.columns["task"]):
            ids.setdefault(task, f"{shelf.n}-{number}")
    else:
        notes.append("its trajectories were not kept")
    outcomes = [{**outcome, "id": ids.get(outcome["task_id"])} for outcome in outcomes]
    return {**found, "outcomes": outcomes, "notes": notes}


def _unreported(index: Index, key: str) -> list[Answer]:
    """The outcomes so far of an evaluation that has no report yet."""
    shelf = index.shelves.get(key)
    return [] if shelf is None else [
        {
            "task_id": result.task_id, "repo": "", "graded": int(result.resolved is not None),
            "resolved": int(bool(result.resolved)), "infrastructure_failures": result.failures,
            "suspected_hacks": int(bool(result.suspected_hack)), "stops": [result.stop], "turns_mean": result.turns,
            "error": result.error,
        }
        for result in shelf.results
    ]  # fmt: skip


def _kind(index: Index) -> str:
    directory = index.directory
    if (directory / "state.json").is_file() or (directory / "metrics.jsonl").is_file():
        return "train"
    if EVAL in index.shelves or (directory / REPORT).is_file():
        return "eval"
    return "rollout" if index.shelves else "empty"


def _state(directory: Path, kind: str, steps: int, total: int | None, guard: Sequence[Answer]) -> str:
    if _held(directory):
        return "running"
    if kind == "empty":
        return "empty"
    if kind != "train":
        return "finished" if kind == "rollout" or (directory / REPORT).is_file() else "stopped"
    if guard and guard[-1].get("event") == "stop" and guard[-1].get("step") == steps:
        return "guard"
    return "finished" if (directory / "summary.json").is_file() and steps == total else "stopped"


def _held(directory: Path) -> bool:
    """Whether the process that its lock names lives on this machine. The lock itself is left alone: to try it could
    turn a starting run away."""
    try:
        holder = orjson.loads((directory / LOCK).read_bytes())
        if holder["host"] != socket.gethostname():
            return False
        os.kill(int(holder["pid"]), 0)
    except PermissionError:
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _evaluations(index: Index, notes: list[str]) -> list[Answer]:
    directory = index.directory
    if EVAL in index.shelves or (not (directory / "state.json").is_file() and (directory / REPORT).is_file()):
        return [_of_dir(index, notes)]
    made = _mapping(_json(directory / "state.json", notes).get("evaluations"))
    found = []
    for key, report in made.items():
        step, _, decoding = key.removeprefix("step-").partition("/")
        n = f"eval-{step}-{decoding}"
        found.append(
            {
                "key": key,
                "n": n if n in index.shelves else None,
                "step": int(step) if step.isdecimal() else 0,
                "decoding": decoding,
                **{name: report.get(name) for name in _REPORTED},
            }
        )
    return sorted(found, key=lambda one: (one["step"], one["decoding"]))


def _of_dir(index: Index, notes: list[str]) -> Answer:
    """An ``agent-rl eval`` directory's: its report, or of what ended so far."""
    report = _json(index.directory / REPORT, notes)
    n = EVAL if EVAL in index.shelves else None
    if not report:
        notes.append("the evaluation has no report yet: it is under way, or was stopped")
        report = _so_far(index)
    return {"key": EVAL, "n": n, "step": 0, "decoding": "", **{name: report.get(name) for name in _REPORTED}}


def _so_far(index: Index) -> Answer:
    results = index.shelves[EVAL].results if EVAL in index.shelves else ()
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
        found for shelf in index.shelves.values() if shelf.n != EVAL for found in set(shelf.columns["format"]) if found
    }


def _cumulated(rows: list[dict[str, Any]]) -> list[float]:
    total, sums = 0.0, []
    for row in rows:
        total += (row.get("rollout/trajectories") or 0.0) * (row.get("rollout/sampled_tokens_mean") or 0.0)
        sums.append(total)
    return sums


def _last_step(directory: Path) -> int:
    """The step of the last row of metrics that can be read; 0 without one. A list of runs reads no other row."""
    with contextlib.suppress(OSError):
        for line in reversed((directory / "metrics.jsonl").read_bytes().splitlines()):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return int(orjson.loads(line)["step"])
    return 0


def _events(directory: Path, notes: list[str]) -> list[Answer]:
    return _by_step(directory / "guard.jsonl", notes)


def _by_step(path: Path, notes: list[str]) -> list[Answer]:
    """The rows of a file of JSON lines, each of a step, up to the first that is damaged, which is noted."""
    rows: list[Answer] = []
    try:
        for line in path.read_bytes().splitlines():
            row = orjson.loads(line)
            row["step"] = int(row["step"])
            rows.append(row)
    except (ValueError, KeyError, TypeError):
        notes.append(f"{path.name}, line {len(rows) + 1}: damaged; shown up to there")
    except OSError:
        pass
    return rows


def _config(directory: Path, notes: list[str]) -> dict[str, Any]:
    try:
        return dict(_mapping(yaml.safe_load((directory / "config.yaml").read_text())))
    except (yaml.YAMLError, UnicodeDecodeError):
        notes.append("config.yaml: damaged")
    except OSError:
        pass
    return {}


def _json(path: Path, notes: list[str]) -> dict[str, Any]:
    """What ``path`` holds; nothing where it is not there, or is damaged, which is noted."""
    try:
        return dict(_mapping(orjson.loads(path.read_bytes())))
    except ValueError as error:
        notes.append(f"{path.name}: damaged ({error})")
    except OSError:
        pass
    return {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
