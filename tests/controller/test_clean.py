"""What ``agent-rl clean`` removes."""

from __future__ import annotations

import io
import itertools
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from support.kill_points import contents, ends_before

from agent_rl.commands.clean import clean, size
from agent_rl.controller.run_models import resolve_run
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


def clean_all(directory: Path) -> None:
    clean([directory], Console(quiet=True), remove=True)


def test_clean_killed_at_each_change_of_a_file_can_be_run_again(tmp_path: Path) -> None:
    for number in itertools.count(1):
        runs = tmp_path / "runs"
        run = make_run(runs, "whole", results=True)
        make_run(runs, "failed", results=False)
        (run / "checkpoints/step-000001/manifest.json").write_text("{}")
        kept = {name: data for name, data in contents(runs).items() if name.startswith("whole/") and "exp" not in name}
        (run / "exports/step-000001/config.json").write_text("{}")
        (run / "weights").mkdir()
        export = contents(run / "exports")
        ended = ends_before(number, clean_all, runs)
        assert kept.items() <= contents(runs).items()
        if (run / "exports").exists():
            assert resolve_run(run, "model") == run / "exports/step-000001"
            assert contents(run / "exports") == export, "a half-removed export is used as a model"
        clean_all(runs)
        assert contents(runs) == kept
        assert [path.name for path in runs.iterdir()] == ["whole"]
        shutil.rmtree(runs)
        if ended:
            break
    assert number > 10
