"""Tasks that training and evaluation skip: a JSON file that the doctor writes and a user may edit.

``{"tasks": {"<task id>": ["why", ...], ...}}``

A training run also has its own quarantine file, with the tasks that proved undecidable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from agent_rl.errors import ConfigError
from agent_rl.rollout.group import RolloutEvent
from agent_rl.utils.run_files import read_json, write_json


def read_quarantine(path: Path) -> dict[str, list[str]]:
    """The reasons by task id. Raises ConfigError for a missing or invalid file."""
    try:
        tasks = read_json(path)["tasks"]
        return {str(task): [str(reason) for reason in reasons] for task, reasons in tasks.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'env.quarantine: {path}: not a quarantine file ({type(error).__name__}): expected {{"tasks": '
            f'{{"<task id>": ["why"]}}}}, as `agent-rl doctor` writes it'
        ) from None


class Quarantine:
    """The quarantine of a run, stored in ``path``. Raises ConfigError for an invalid file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tasks = read_quarantine(path) if path.exists() else {}
        self._graded = False

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._tasks

    def add_undecidable(self, event: RolloutEvent) -> str | None:
        """Add the task of ``event`` if it is undecidable, and return a log line.

        Only after a graded episode: on a machine that grades nothing, the machine may be the cause.
        """
        if event.trajectory is not None and not event.trajectory.stop.infrastructure:
            self._graded = True
        if event.dropped is None or not (event.dropped.undecidable and self._graded):
            return None
        reason = event.dropped.errors[-1]
        self._tasks[event.dropped.task_id] = [reason]
        write_quarantine(self._path, self._tasks)
        return f"quarantined ({self._path}): {reason}"


def write_quarantine(path: Path, tasks: Mapping[str, Sequence[str]]) -> None:
    write_json(path, {"tasks": {task: list(reasons) for task, reasons in tasks.items()}})
