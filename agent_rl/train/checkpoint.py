"""Checkpoints: one file a rank and a manifest, written beside the target and renamed into place.

A folder that holds ``manifest.json`` is complete: the manifest is written last, and the rename makes the whole folder
appear at once. A killed save leaves only a ``.partial`` folder, which the next save of that name removes.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent_rl.config import ParallelConfig
from agent_rl.errors import ConfigError, TrainerError, UserError

FORMAT = 1
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint was made with: it resumes only in the same layout."""

    format: int
    updates: int
    parallel: Mapping[str, int | str]
    dtype: str


def partial_folder(folder: Path) -> Path:
    """Where a checkpoint is written before it is renamed to ``folder``."""
    return folder.with_name(f".{folder.name}.partial")


def rank_file(folder: Path, rank: int) -> Path:
    """The file of one rank in a checkpoint."""
    return folder / f"rank-{rank:05d}.pt"


def begin(folder: Path) -> Path:
    """An empty partial folder for ``folder``; what an earlier killed save left there is removed."""
    partial = partial_folder(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def commit(folder: Path, manifest: Manifest) -> None:
    """Make the partial folder of ``folder`` appear as ``folder``, replacing an older one of that name."""
    partial = partial_folder(folder)
    path = partial / "manifest.json"
    path.write_text(json.dumps(asdict(manifest), indent=1))
    _sync(path)
    _sync(partial)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def abandon(folder: Path) -> None:
    """Remove the partial folder of a save that failed."""
    shutil.rmtree(partial_folder(folder), ignore_errors=True)


def read_manifest(folder: Path, parallel: ParallelConfig) -> Manifest:
    """The manifest of a complete checkpoint. Raises ConfigError where there is none, or it has another layout."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise ConfigError(f"{folder}: not a complete checkpoint (no manifest.json)")
    manifest = Manifest(**json.loads(path.read_text()))
    if manifest.format != FORMAT:
        raise ConfigError(f"{folder}: checkpoint format {manifest.format}, this version reads {FORMAT}")
    if ParallelConfig.model_validate(manifest.parallel) != parallel:
        raise ConfigError(
            f"{folder}: written with train.parallel {dict(manifest.parallel)}, the config has {parallel.model_dump()}"
        )
    return manifest


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete ``step-N`` checkpoint with the highest N in ``folder``, or None."""
    if not folder.is_dir():
        return None
    complete = [path for path in folder.iterdir() if _STEP.fullmatch(path.name) and (path / "manifest.json").is_file()]
    return max(complete, key=checkpoint_step, default=None)


def checkpoint_step(folder: Path) -> int:
    """N of a checkpoint folder named ``step-N``."""
    if not (match := _STEP.fullmatch(folder.name)):
        raise ConfigError(f"{folder}: a checkpoint folder is named step-NNNNNN")
    return int(match[1])


def write_rank(folder: Path, rank: int, state: Mapping[str, Any]) -> None:
    """Write and sync one rank's state. Raises UserError where the disk has no room."""
    import torch

    path = rank_file(folder, rank)
    try:
        with path.open("wb") as stream:
            torch.save(dict(state), stream)
            stream.flush()
            os.fsync(stream.fileno())
    except (OSError, RuntimeError) as error:
        # torch wraps the stream's OSError in a RuntimeError of its own.
        if shutil.disk_usage(folder).free < 1 << 20 or getattr(error, "errno", 0) == errno.ENOSPC:
            raise UserError(f"{folder}: no room on the disk for the checkpoint; free some or set runs_dir") from None
        raise TrainerError(f"{path}: could not be written: {error}") from error


def read_rank(folder: Path, rank: int) -> dict[str, Any]:
    """One rank's state, on the CPU. Raises TrainerError where its file is missing or damaged."""
    import torch

    path = rank_file(folder, rank)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise TrainerError(f"{path}: could not be read: {str(error).splitlines()[0]}") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
