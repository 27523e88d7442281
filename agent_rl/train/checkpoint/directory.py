"""Checkpoints as directories: every rank's files and a manifest, written beside the target and renamed into place.

::

    step-000010/
      manifest.json            format, counts, the layout that wrote, checksums, and what the run says of itself
      rank-00000.safetensors   the pieces of the state that rank 0 keeps (agent_rl/train/checkpoint/pieces.py)
      rank-00000.rng.pt        its random state
      rank-00001...

A directory that holds ``manifest.json`` is complete: the manifest is written last, when all files are synced, and the
rename makes the whole directory appear at once. A killed save leaves only a ``.partial`` directory; :func:`tidy`
removes it.
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
from agent_rl.train.checkpoint import pieces
from agent_rl.train.checkpoint.pieces import PieceReader
from agent_rl.utils.run_files import disk_error

FORMAT = 2
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is of. ``counts`` are the optimizer's; ``parallel`` and ``dtype`` those of the trainer that
    wrote; ``checksums`` its ranks' CRC-32s, in order; ``run`` is the controller's own, of plain values."""

    format: int
    updates: int
    counts: Mapping[str, int]
    parallel: Mapping[str, int | str | bool]
    dtype: str
    checksums: tuple[int, ...]
    run: Mapping[str, object] = field(default_factory=dict)

    def written_by(self, parallel: ParallelConfig) -> bool:
        """Whether a trainer of the layout ``parallel`` wrote it."""
        return ParallelConfig.model_validate(self.parallel) == parallel


def partial_dir(directory: Path) -> Path:
    """Where a checkpoint is written before it is renamed to ``directory``."""
    return directory.with_name(f".{directory.name}.partial")


def rank_file(directory: Path, rank: int) -> Path:
    """The state of one rank in a checkpoint."""
    return directory / f"rank-{rank:05d}.safetensors"


def rng_file(directory: Path, rank: int) -> Path:
    """The random state of one rank in a checkpoint."""
    return directory / f"rank-{rank:05d}.rng.pt"


def begin(directory: Path) -> Path:
    """An empty partial directory for ``directory``; what an earlier killed save left there is removed."""
    partial = partial_dir(directory)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def commit(directory: Path, manifest: Manifest) -> None:
    """Make the partial directory of ``directory`` appear as ``directory``, replacing an older one of that name.
    Raises as :func:`disk_error`, leaving no partial directory."""
    partial = partial_dir(directory)
    path = partial / "manifest.json"
    try:
        path.write_text(json.dumps(asdict(manifest), indent=1))
        _sync(path)
        _sync(partial)
    except OSError as error:
        abandon(directory)
        raise disk_error(path, error) from error
    old = _old_dir(directory)
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
    """Remove a checkpoint; killed on the way, it leaves only what :func:`tidy` removes."""
    gone = partial_dir(directory)
    shutil.rmtree(gone, ignore_errors=True)
    directory.rename(gone)
    shutil.rmtree(gone)


def tidy(checkpoints: Path) -> None:
    """Remove what killed saves left in the directory of all checkpoints; one that was being replaced is put back."""
    for old in checkpoints.glob(".*.old"):
        directory = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
        if not directory.exists():
            old.rename(directory)
    for rest in (*checkpoints.glob(".*.partial"), *checkpoints.glob(".*.old")):
        shutil.rmtree(rest)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a complete checkpoint. Raises ConfigError where there is none, or of another format."""
    path = directory / "manifest.json"
    if not path.is_file():
        raise ConfigError(f"{directory}: not a complete checkpoint (no manifest.json)")
    try:
        fields = json.loads(path.read_text())
        if fields["format"] == FORMAT:
            return Manifest(**{**fields, "checksums": tuple(fields["checksums"])})
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not the manifest of a checkpoint: {error}") from error
    raise ConfigError(
        f"{directory}: checkpoint format {fields['format']}, this version reads {FORMAT}: go on with the version that "
        "wrote it, or start a new run from an exported model"
    )


def open_pieces(directory: Path, manifest: Manifest) -> PieceReader:
    """The state in a checkpoint. Raises TrainerError where a file is missing or damaged."""
    return PieceReader([rank_file(directory, rank) for rank in range(len(manifest.checksums))])


def verify(directory: Path, manifest: Manifest, *, share: int = 0, shares: int = 1) -> None:
    """Read every file (of ``shares``, those of ``share``) and compare checksums. Raises TrainerError naming one that
    is missing or damaged."""
    for rank in range(share, len(manifest.checksums), shares):
        path = rank_file(directory, rank)
        if pieces.checksum(path) != manifest.checksums[rank]:
            raise TrainerError(
                f"{path}: damaged, its checksum is not the manifest's; remove {directory} to go on before"
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


def _old_dir(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.old")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
