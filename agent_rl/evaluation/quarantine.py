"""Tasks that training and evaluation leave out: a JSON file that the doctor writes and a person may edit.

``{"tasks": {"<task id>": ["why", ...], ...}}``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from agent_rl.errors import ConfigError
from agent_rl.observe.files import read_json, write_json


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


def write_quarantine(path: Path, tasks: Mapping[str, Sequence[str]]) -> None:
    write_json(path, {"tasks": {task: list(reasons) for task, reasons in tasks.items()}})
