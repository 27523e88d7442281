"""Starts training runs for the tests of this directory, and ends what a failed test leaves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent_rl.config.loader import install_model

sys.path.insert(0, str(Path(__file__).parent))  # for the module beside this one

from integration_run import Run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs in one directory, as one person at one machine would; what a failed test leaves is ended."""
    runs: list[Run] = []
    install_model(tmp_path / "model")

    def starter(*overrides: str, project: Path | None = None) -> Run:
        runs.append(Run(tmp_path, *overrides, project=project))
        return runs[-1]

    yield starter
    for run in runs:
        run.close()
