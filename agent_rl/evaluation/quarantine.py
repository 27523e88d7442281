"""Tasks that training and evaluation leave out: a JSON file that the doctor writes and a person may edit.

``{"tasks": {"<task id>": ["why", ...], ...}}``

A training run keeps one of its own, of tasks that it found it can never grade.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from agent_rl.errors import ConfigError
from agent_rl.rollout.group import RolloutEvent
from agent_rl.utils.run_files import read_json, write_json


def read_quarantine(path: Path) -> dict[str, list[str]]:
    """Task id -> reasons. Raises ConfigError where the file is absent or of another form."""
    try:
        tasks = read_json(path)["tasks"]
        return {str(task): [str(reason) for reason in reasons] for task, reasons in tasks.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'env.quarantine: {path}: no quarantine file ({type(error).__name__}): right would be {{"tasks": '
            f'{{"<task id>": ["why"]}}}}, as `agent-rl doctor` writes it'
        ) from None


class Quarantine:
    """A run's own quarantine, in the file ``path``. Raises ConfigError where that is none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tasks = read_quarantine(path) if path.exists() else {}
        self._graded = False

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._tasks

    def learn(self, event: RolloutEvent) -> str | None:
        """Take in the task of ``event`` if that proved undecidable, and return a line that says so.

        Only where something was graded before: on a machine that grades nothing, the task need not be the cause.
        """
        if event.trajectory is not None and not event.trajectory.stop.infrastructure:
            self._graded = True
        if event.dropped is None or not (event.dropped.undecidable and self._graded):
            return None
        reason = event.dropped.errors[-1]
        self._tasks[event.dropped.task_id] = [reason]
        write_quarantine(self._path, self._tasks)
        return f"left out from now on ({self._path}): {reason}"


def write_quarantine(path: Path, tasks: Mapping[str, Sequence[str]]) -> None:
    write_json(path, {"tasks": {task: list(reasons) for task, reasons in tasks.items()}})
