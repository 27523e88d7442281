"""What ``agent-rl clean`` removes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from agent_rl.commands.clean import clean, size
from agent_rl.utils.directory_lock import lock_directory


def make_run(runs: Path, name: str, *, results: bool) -> Path:
    run = runs / name
    for directory in ("exports/step-000001", *(("checkpoints/step-000001",) if results else ())):
        (run / directory).mkdir(parents=True)
        (run / directory / "data").write_bytes(bytes(1000))
    for file in ("config.yaml", "state.json"):
        (run / file).write_text("{}")
    return run


def printed(directory: Path, *, remove: bool) -> str:
    console = Console(file=io.StringIO(), width=200)
    clean([directory], console, remove=remove)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    make_run(tmp_path, "whole", results=True)
    make_run(tmp_path, "failed", results=False)
    (tmp_path / ".fork.partial").mkdir()
    (tmp_path / "other").mkdir()
    return tmp_path


def test_nothing_goes_without_yes(runs: Path) -> None:
    before = sorted(runs.rglob("*"))
    assert "2.0 kB can be removed; nothing was" in printed(runs, remove=False)
    assert sorted(runs.rglob("*")) == before


def test_failed_starts_and_exports_go_and_checkpoints_stay(runs: Path) -> None:
    printed(runs, remove=True)
    assert sorted(path.name for path in runs.iterdir()) == ["other", "whole"]
    assert (runs / "whole/checkpoints/step-000001/data").exists()
    assert not (runs / "whole/exports").exists()
    assert "0 bytes" in printed(runs, remove=True)


def test_a_running_run_keeps_everything(runs: Path) -> None:
    with lock_directory(runs / "failed"):
        printed(runs, remove=True)
    assert (runs / "failed/exports").exists()


def test_a_linked_file_counts_once(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(bytes(10))
    (tmp_path / "two").hardlink_to(tmp_path / "one")
    assert size(tmp_path) == 10
