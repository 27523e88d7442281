"""Checkpoint directories: the files of every rank and a manifest, written beside the target and renamed into place.

::

    step-000010/
      manifest.json            format, counts, parallel layout, checksums, state of the run
      rank-00000.safetensors   pieces of the state on rank 0 (agent_rl/train/checkpoint/piece_files.py)
      rank-00000.rng.pt        its random state
      rank-00001...

A directory with ``manifest.json`` is complete: the manifest is written last, after all files are synced, and a rename
makes the directory appear atomically. A killed save leaves only a ``.partial`` directory, which :func:`remove_partial`
removes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from agent_rl.config import ParallelConfig
from agent_rl.errors import ConfigError, TrainerError
from agent_rl.train.checkpoint import piece_files
from agent_rl.train.checkpoint.piece_files import PieceReader
from agent_rl.utils.run_files import disk_error

FORMAT = 2
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a checkpoint. ``counts``: the optimizer's. ``parallel`` and ``dtype``: of the trainer that
    wrote it. ``checksums``: CRC-32 by rank. ``run``: plain values of the controller."""

    format: int
    updates: int
    counts: Mapping[str, int]
    parallel: Mapping[str, int | str | bool]
    dtype: str
    checksums: tuple[int, ...]
    run: Mapping[str, object] = field(default_factory=dict)

    def written_by(self, parallel: ParallelConfig) -> bool:
        """Whether a trainer with the layout ``parallel`` wrote it."""
        return ParallelConfig.model_validate(self.parallel) == parallel


def partial_dir(directory: Path) -> Path:
    """The directory of an unfinished checkpoint, later renamed to ``directory``."""
    return directory.with_name(f".{directory.name}.partial")


def rank_file(directory: Path, rank: int) -> Path:
    """The state of one rank in a checkpoint."""
    return directory / f"rank-{rank:05d}.safetensors"


def rng_file(directory: Path, rank: int) -> Path:
    """The random state of one rank in a checkpoint."""
    return directory / f"rank-{rank:05d}.rng.pt"


def begin(directory: Path) -> Path:
    """Create an empty partial directory for ``directory``; removes that of a killed save."""
    partial = partial_dir(directory)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def commit(directory: Path, manifest: Manifest) -> None:
    """Rename the partial directory to ``directory``, replacing an older one. Raises as :func:`disk_error`, and then
    removes the partial directory."""
    partial = partial_dir(directory)
    path = partial / "manifest.json"
    try:
        path.write_text(json.dumps(asdict(manifest), indent=1))
        _sync(path)
        _sync(partial)
    except OSError as error:
        abandon(directory)
        raise disk_error(path, error) from error
    old = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    partial.rename(directory)
    _sync(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def abandon(directory: Path) -> None:
    """Remove the partial directory of a save that failed."""
    shutil.rmtree(partial_dir(directory), ignore_errors=True)


def remove(directory: Path) -> None:
    """Remove a checkpoint. A kill in between leaves only what :func:`remove_partial` removes."""
    trash = partial_dir(directory)
    shutil.rmtree(trash, ignore_errors=True)
    directory.rename(trash)
    shutil.rmtree(trash)


def remove_partial(checkpoints: Path) -> None:
    """Remove the remains of killed saves in the directory of all checkpoints; restore a checkpoint that was being
    replaced."""
    for old in checkpoints.glob(".*.old"):
        directory = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
        if not directory.exists():
            old.rename(directory)
    for leftover in (*checkpoints.glob(".*.partial"), *checkpoints.glob(".*.old")):
        shutil.rmtree(leftover)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a complete checkpoint. Raises ConfigError where there is none or its format differs."""
    path = directory / "manifest.json"
    if not path.is_file():
        raise ConfigError(f"{directory}: not a complete checkpoint (no manifest.json)")
    try:
        fields = json.loads(path.read_text())
        if fields["format"] == FORMAT:
            return Manifest(**{**fields, "checksums": tuple(fields["checksums"])})
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a checkpoint manifest: {error}") from error
    raise ConfigError(
        f"{directory}: checkpoint format {fields['format']}, this version reads {FORMAT}: continue with the version "
        "that wrote it, or start a new run from an exported model"
    )


def open_pieces(directory: Path, manifest: Manifest) -> PieceReader:
    """The state in a checkpoint. Raises TrainerError where a file is missing or damaged."""
    return PieceReader([rank_file(directory, rank) for rank in range(len(manifest.checksums))])


def verify(directory: Path, manifest: Manifest, *, share: int = 0, shares: int = 1) -> None:
    """Check the checksums of all files, or of part ``share`` of ``shares``. Raises TrainerError for a missing or
    damaged file."""
    for rank in range(share, len(manifest.checksums), shares):
        path = rank_file(directory, rank)
        if piece_files.checksum(path) != manifest.checksums[rank]:
            raise TrainerError(
                f"{path}: its checksum differs from the manifest; remove {directory} to resume from an older one"
            )


def latest_checkpoint(directory: Path) -> Path | None:
    """The complete ``step-N`` checkpoint with the highest N in ``directory``, or None."""
    return max(complete_checkpoints(directory), key=checkpoint_step, default=None)


def complete_checkpoints(directory: Path) -> list[Path]:
    """The complete ``step-N`` checkpoints in ``directory``, by N."""
    named = [path for path in directory.glob("step-*") if _STEP.fullmatch(path.name)]
    return sorted((path for path in named if (path / "manifest.json").is_file()), key=checkpoint_step)


def checkpoint_step(directory: Path) -> int:
    """N of a checkpoint directory named ``step-N``."""
    if not (match := _STEP.fullmatch(directory.name)):
        raise ConfigError(f"{directory}: a checkpoint directory is named step-NNNNNN")
    return int(match[1])


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
