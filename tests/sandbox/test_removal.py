"""Removal of closed sandboxes: any depth, width and permissions, in the background."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sandbox import SandboxSpec
from sandbox.bubblewrap.backend import BubblewrapBackend
from sandbox.removal import Remover, remove_tree

NEST = "import os\nfor i in range({depth}):\n os.mkdir('d'); os.chdir('d')"


def nest(directory: Path, depth: int) -> None:
    directory.mkdir()
    subprocess.run([sys.executable, "-c", NEST.format(depth=depth)], cwd=directory, check=True)


def test_directories_nested_deeper_than_a_path_is_long_are_removed(tmp_path: Path) -> None:
    nest(tmp_path / "deep", 1500)
    remove_tree(tmp_path / "deep")
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_190_000_nested_directories_are_removed(tmp_path: Path) -> None:
    nest(tmp_path / "deep", 190_000)
    began = time.monotonic()
    remove_tree(tmp_path / "deep")
    print(f"removed in {time.monotonic() - began:.0f} s")
    assert not list(tmp_path.iterdir())


def test_wide_locked_linked_and_oddly_named_entries_are_removed(tmp_path: Path) -> None:
    tree, outside = tmp_path / "tree", tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    (tree / "locked" / "inner").mkdir(parents=True)
    (tree / "locked" / "inner" / "file").write_text("x")
    (tree / "link").symlink_to(outside)
    (tree / "wide").mkdir()
    for number in range(9000):
        (tree / "wide" / str(number)).touch()
    os.mkfifo(tree / "pipe")
    (tree / "locked" / "inner").chmod(0)
    (tree / "locked").chmod(0)
    tree.chmod(0)
    remove_tree(tree)
    remove_tree(tree)
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]
    assert (outside / "kept").exists()


def test_discarding_moves_at_once_and_removes_until_the_remover_is_closed(tmp_path: Path) -> None:
    (tmp_path / "trash").mkdir()
    remover = Remover(tmp_path / "trash")
    for number in range(3):
        nest(tmp_path / f"box-{number}", 500)
        began = time.monotonic()
        remover.discard(tmp_path / f"box-{number}")
        assert time.monotonic() - began < 1.0
        assert not (tmp_path / f"box-{number}").exists()
    remover.discard(tmp_path / "absent")
    remover.close()
    assert not list((tmp_path / "trash").iterdir())


@pytest.mark.bubblewrap
async def test_closing_a_sandbox_does_not_wait_for_its_files(tmp_path: Path) -> None:
    backend = BubblewrapBackend(run_id="removal", base=tmp_path / "base")
    sandbox = await backend.start(SandboxSpec())
    assert (await sandbox.exec(["python3", "-c", NEST.format(depth=1500)], timeout=60)).ok
    began = time.monotonic()
    await sandbox.close()
    assert time.monotonic() - began < 2.0
    assert not list((tmp_path / "base").glob("*/sandboxes/*"))
    await backend.close()
    assert not [path for path in (tmp_path / "base").iterdir() if not path.name.startswith(".host")]
