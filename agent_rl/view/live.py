"""The step that is under way: the episodes of it that have ended, from its journal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from agent_rl.errors import AgentRlError
from agent_rl.rollout.frames import frames_of
from agent_rl.rollout.records import row_of_encoded
from agent_rl.rollout.sidecars import sizes
from agent_rl.view.index import file_stamp


def stamp(folder: Path) -> str:
    """Changes as episodes end."""
    path = _newest(folder)
    return "" if path is None else f"{path.name}-{file_stamp(path)}"


def episodes(folder: Path) -> dict[str, Any]:
    """The episodes of the newest journal, in the order they ended. An end that is being written is left out."""
    path, notes, found = _newest(folder), list[str](), list[dict[str, Any]]()
    if path is None:
        return {"step": None, "episodes": [], "expected": None, "notes": ["no step is under way"]}
    with path.open("rb") as file:
        frames = frames_of(file)
        next(frames, None)
        for payload, _ in frames:
            encoded = payload.partition(b"\n")[2] if payload.startswith(b"{") else payload
            if encoded:
                try:
                    found.append(_episode(row_of_encoded(encoded, str(path))))
                except AgentRlError as error:
                    notes.append(str(error))
    step = int(path.stem.removeprefix("step-"))
    return {"step": step, "episodes": found, "expected": _expected(folder), "notes": notes}


def _newest(folder: Path) -> Path | None:
    """The journal of the newest step, where that step has no trajectories yet."""
    newest = max((folder / "journal").glob("step-*.journal"), default=None)
    written = (folder / "trajectories").glob(f"{newest.stem}.jsonl*") if newest is not None else ()
    return None if any(True for _ in written) else newest


def _episode(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "task": row["task_id"],
        **{name: row[name] for name in ("reward", "resolved", "stop", "seconds")},
        "turns": len(row["turns"]),
        **sizes(row),
        "began": row.get("began") or None,
    }


def _expected(folder: Path) -> int | None:
    """Episodes of a step, unless further ones are drawn."""
    try:
        rollout = yaml.safe_load((folder / "config.yaml").read_text())["rollout"]
        return int(rollout["tasks_per_step"]) * int(rollout["group_size"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return None
