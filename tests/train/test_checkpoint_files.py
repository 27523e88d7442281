"""A checkpoint directory appears whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from support.checkpoint_pieces import whole_part
from support.small_disk import small_disk

from agent_rl.config import ParallelConfig
from agent_rl.errors import ConfigError, TrainerError, UserError
from agent_rl.train.checkpoint import directory as checkpoint
from agent_rl.train.checkpoint.directory import Manifest, latest_checkpoint, read_manifest
from agent_rl.train.checkpoint.piece_files import ParamShard, write_pieces

LAYOUT, WEIGHT = ParallelConfig(), whole_part(ParamShard("w", (2, 2)))
RUN = {"run_id": "r", "step": 3, "position": 24}


def written(directory: Path, value: float = 1.0) -> Path:
    """A checkpoint of one rank with one parameter of four elements."""
    commit(directory, write(checkpoint.begin(directory), value))
    return directory


def write(partial: Path, value: float) -> int:
    with checkpoint.rank_file(partial, 0).open("wb") as file:
        return write_pieces(file, [(WEIGHT, "master")], np.full(4, value, np.float32))


def commit(directory: Path, checksum: int) -> None:
    counts = {"updates": 3, "schedule": 3}
    manifest = Manifest(checkpoint.FORMAT, 3, counts, LAYOUT.model_dump(), "float32", (checksum,), RUN)
    checkpoint.commit(directory, manifest)


def value(directory: Path) -> float:
    reader = checkpoint.open_pieces(directory, read_manifest(directory))
    return float(reader.read(WEIGHT, "master")[0])


def test_a_committed_checkpoint_is_the_only_entry_of_its_directory(tmp_path: Path) -> None:
    directory = written(tmp_path / "step-000003")
    assert os.listdir(tmp_path) == ["step-000003"]
    manifest = read_manifest(directory)
    assert (manifest.updates, manifest.counts["schedule"], dict(manifest.run)) == (3, 3, RUN)
    assert manifest.written_by(LAYOUT)
    assert not manifest.written_by(ParallelConfig(world_size=2))
    checkpoint.verify(directory, manifest)


def test_a_killed_save_is_ignored_and_removed_by_the_next_save(tmp_path: Path) -> None:
    written(tmp_path / "step-000002")
    partial = checkpoint.begin(tmp_path / "step-000004")
    checkpoint.rank_file(partial, 0).write_text("half")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000002"
    directory = written(tmp_path / "step-000004", 4.0)
    assert value(directory) == 4
    assert sorted(os.listdir(tmp_path)) == ["step-000002", "step-000004"]


@pytest.mark.parametrize("dies_at", range(3))
def test_replacing_a_checkpoint_leaves_a_whole_one_at_every_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    """Replacing takes two renames, so the third kill never comes. The old or the new checkpoint is complete."""
    directory = written(tmp_path / "step-000001", 1.0)
    checksum = write(checkpoint.begin(directory), 2.0)
    renames, rename = iter(range(3)), Path.rename

    def dying(self: Path, target: Path) -> Path:
        if next(renames) == dies_at:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", dying)
    with suppress(KeyboardInterrupt):
        commit(directory, checksum)
    monkeypatch.undo()
    checkpoint.remove_partial(tmp_path)
    assert os.listdir(tmp_path) == ["step-000001"]
    checkpoint.verify(directory, read_manifest(directory))
    assert value(directory) == (1 if dies_at < 2 else 2)


def test_a_killed_removal_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = written(tmp_path / "step-000001")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None)  # killed right after the rename
        checkpoint.remove(directory)
    assert latest_checkpoint(tmp_path) is None
    checkpoint.remove_partial(tmp_path)
    assert os.listdir(tmp_path) == []


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


def test_another_format_is_refused_in_one_line(tmp_path: Path) -> None:
    directory = written(tmp_path / "step-000001")
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps({**manifest, "format": 1}))
    with pytest.raises(ConfigError, match=r"checkpoint format 1, this version reads 2: continue with the version"):
        read_manifest(directory)
    (directory / "manifest.json").write_text(json.dumps({"format": 2}))
    with pytest.raises(ConfigError, match="not a checkpoint manifest"):
        read_manifest(directory)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    directory = written(tmp_path / "step-000001")
    manifest, path = read_manifest(directory), checkpoint.rank_file(directory, 0)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(TrainerError, match=r"rank-00000\.safetensors: .*checksum differs.*remove .*step-000001"):
        checkpoint.verify(directory, manifest)
    for broken in (data[:-1], data[:20], b"", b"not such a file"):
        path.write_bytes(broken)
        with pytest.raises(TrainerError, match=r"rank-00000\.safetensors: cannot be read"):
            checkpoint.open_pieces(directory, manifest)
    path.unlink()
    with pytest.raises(TrainerError, match=r"rank-00000\.safetensors: cannot be read"):
        checkpoint.verify(directory, manifest)


def test_a_full_disk_is_reported_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the trainer environment")
    from agent_rl.train.checkpoint.piece_files import Snapshot
    from agent_rl.train.checkpoint.saver import write_rank

    snapshot = Snapshot([(whole_part(ParamShard("w", (1 << 20,))), "master")], np.zeros(1 << 20, np.float32), {})
    with small_disk(tmp_path / "small", "2m") as small:
        partial = checkpoint.begin(small / "step-000001")
        with pytest.raises(UserError, match=r"the disk is full; free space, set runs_dir, or lower train\.keep_ch"):
            write_rank(partial, 0, snapshot, b"")
