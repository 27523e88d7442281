"""The running step: its finished episodes, from the journal."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_rl.errors import AgentRlError
from agent_rl.rollout.jsonl_zst import read_frames
from agent_rl.rollout.records import row_of_encoded
from agent_rl.rollout.step_index import sizes
from agent_rl.utils import foreign
from agent_rl.viewer.index import file_stamp


def stamp(directory: Path) -> str:
    """A text that changes when an episode finishes."""
    path = _newest(directory)
    return "" if path is None else f"{path.name}-{file_stamp(path)}"


@dataclass(slots=True)
class _Journal:
    """The content of a journal up to byte ``end``."""

    path: Path | None = None
    header: bytes = b""
    end: int = 0
    episodes: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_frame(self, payload: bytes) -> None:
        """Add a frame after the header: a line of JSON, then the encoded episode or turn."""
        line, _, encoded = payload.partition(b"\n")
        if encoded and b'"turn"' not in line:
            try:
                self.episodes.append(_episode(row_of_encoded(encoded, str(self.path))))
            except AgentRlError as error:
                self.notes.append(str(error))


class RunningStep:
    """The finished episodes of a run's newest journal. Reads only new frames, because a journal contains all arrays.
    Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._journal = _Journal()
        self._reading = threading.Lock()

    def episodes(self) -> dict[str, Any]:
        """The episodes in the order of completion, without one that is being written."""
        path = _newest(self._directory)
        if path is None:
            return {"step": None, "episodes": [], "expected": None, "notes": ["no step is running"]}
        with self._reading:
            self._read_new_frames(path)
            episodes, notes = list(self._journal.episodes), list(self._journal.notes)
        step = int(path.stem.removeprefix("step-"))
        return {"step": step, "episodes": episodes, "expected": _expected(self._directory), "notes": notes}

    def _read_new_frames(self, path: Path) -> None:
        foreign.require_regular(path)
        with path.open("rb") as file:
            frames = read_frames(file)
            header, end = next(frames, (b"", 0))
            known = self._journal
            if (path, header) != (known.path, known.header) or os.fstat(file.fileno()).st_size < known.end:
                self._journal = known = _Journal(path, header, end)
            file.seek(known.end)
            for payload, known.end in frames:
                known.add_frame(payload)


def _newest(directory: Path) -> Path | None:
    """The journal of the newest step if it has no trajectory file yet; None also if the directory disappears."""
    try:
        newest = max((directory / "journal").glob("step-*.journal"), default=None)
        written = [] if newest is None else list((directory / "trajectories").glob(f"{newest.stem}.jsonl*"))
    except OSError:
        return None
    return None if written else newest


def _episode(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "task": row["task_id"],
        **{name: row[name] for name in ("reward", "resolved", "stop", "seconds")},
        "turns": len(row["turns"]),
        **sizes(row),
        "began": row.get("began") or None,
    }


def _expected(directory: Path) -> int | None:
    """The number of episodes of a step without additional draws."""
    try:
        rollout = foreign.read_config(directory)["rollout"]
        return int(rollout["tasks_per_step"]) * int(rollout["group_size"])
    except (OSError, AgentRlError, KeyError, TypeError, ValueError):
        return None
