"""A checkpoint folder appears whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_rl.config import ParallelConfig
from agent_rl.errors import ConfigError, TrainerError
from agent_rl.train import checkpoint
from agent_rl.train.checkpoint import Manifest, latest_checkpoint, read_manifest

LAYOUT = ParallelConfig()


def written(folder: Path, content: str = "weights") -> Path:
    partial = checkpoint.begin(folder)
    checkpoint.rank_file(partial, 0).write_text(content)
    checkpoint.commit(folder, Manifest(checkpoint.FORMAT, 3, LAYOUT.model_dump(), "float32"))
    return folder


def test_commit_makes_it_appear_and_leaves_nothing_beside(tmp_path: Path) -> None:
    folder = written(tmp_path / "step-000003")
    assert os.listdir(tmp_path) == ["step-000003"]
    assert read_manifest(folder, LAYOUT).updates == 3


def test_a_killed_save_is_not_seen_and_its_rest_is_removed(tmp_path: Path) -> None:
    written(tmp_path / "step-000002")
    partial = checkpoint.begin(tmp_path / "step-000004")
    checkpoint.rank_file(partial, 0).write_text("half")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000002"
    folder = written(tmp_path / "step-000004", "whole")
    assert checkpoint.rank_file(folder, 0).read_text() == "whole"
    assert sorted(os.listdir(tmp_path)) == ["step-000002", "step-000004"]


def test_saving_again_replaces(tmp_path: Path) -> None:
    written(tmp_path / "step-000001", "first")
    folder = written(tmp_path / "step-000001", "second")
    assert checkpoint.rank_file(folder, 0).read_text() == "second"
    assert os.listdir(tmp_path) == ["step-000001"]


def test_an_abandoned_save_leaves_nothing(tmp_path: Path) -> None:
    checkpoint.begin(tmp_path / "step-000001")
    checkpoint.abandon(tmp_path / "step-000001")
    assert os.listdir(tmp_path) == []


def test_the_latest_is_the_highest_step(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "absent") is None
    assert latest_checkpoint(tmp_path) is None
    for step in (9, 10, 100):
        written(tmp_path / f"step-{step:06d}")
    (tmp_path / "step-000999").mkdir()  # no manifest: not complete
    (tmp_path / "notes").mkdir()
    latest = latest_checkpoint(tmp_path)
    assert latest is not None
    assert checkpoint.checkpoint_step(latest) == 100


def test_another_layout_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = written(tmp_path / "step-000001")
    with pytest.raises(ConfigError, match=r"written with train\.parallel .*'world_size': 1.*'world_size': 2"):
        read_manifest(folder, ParallelConfig(world_size=2))


def test_a_damaged_rank_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the trainer environment")
    folder = written(tmp_path / "step-000001", "not a torch file")
    with pytest.raises(TrainerError, match=r"rank-00000\.pt: could not be read"):
        checkpoint.read_rank(folder, 0)
    with pytest.raises(TrainerError, match=r"rank-00001\.pt: could not be read"):
        checkpoint.read_rank(folder, 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_told_in_one_line(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the trainer environment")
    import subprocess

    from agent_rl.errors import UserError

    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("no right to mount a file system here")
    try:
        partial = checkpoint.begin(small / "step-000001")
        with pytest.raises(UserError, match="no room on the disk"):
            checkpoint.write_rank(partial, 0, {"model": torch.zeros(1 << 20)})
    finally:
        subprocess.run(["umount", small], check=True)
