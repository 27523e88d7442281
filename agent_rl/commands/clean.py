"""``agent-rl clean``: removes what runs no longer need. Lists it without ``--yes``.

A directory is renamed first, so a kill leaves only a hidden directory that the next start removes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from agent_rl.controller.run_state import has_results
from agent_rl.errors import UserError
from agent_rl.monitoring.console import cell
from agent_rl.utils.directory_lock import is_locked, lock_directory

_REMADE = {"exports": "exported models; the next use exports them again", "weights": "weights for engines"}
"""Directories of a run that are made again when they are needed."""


@dataclass(frozen=True, slots=True)
class Removable:
    """A directory that can go: of the run ``run``, or the run itself."""

    run: Path
    path: Path
    reason: str


def clean(directories: Sequence[Path], console: Console, *, remove: bool) -> None:
    """Print what can go from the runs in ``directories``, and remove it if ``remove``. A running run keeps everything.

    A run is removed only if it has not finished an episode. Raises UserError for what is not a directory.
    """
    found = [one for directory in directories for one in removable(directory)]
    table = Table("directory", "size", "reason")
    for one in found:
        table.add_row(cell(str(one.path)), decimal(size(one.path)), one.reason)
    if found:
        console.print(table)
    total = decimal(sum(size(one.path) for one in found))
    if not remove:
        console.print(f"{total} can be removed; nothing was. `agent-rl clean --yes` removes it")
        return
    for one in found:
        with lock_directory(one.run):  # a run that has started since is in use
            _remove(one.path)
    console.print(f"removed {total}")


def _remove(directory: Path) -> None:
    if not _is_leftover(directory):
        directory = directory.rename(directory.with_name(f".{directory.name}.partial"))
    shutil.rmtree(directory)


def removable(directory: Path) -> Iterator[Removable]:
    """What can go from the run ``directory``, or from the runs in it."""
    if not directory.is_dir():
        raise UserError(f"{directory}: not a directory; expected the directory of a run, or its parent")
    runs = [directory] if _is_run(directory) else sorted(path for path in directory.iterdir() if path.is_dir())
    for run in runs:
        if _is_leftover(run) and not is_locked(run):
            yield Removable(run, run, "left by a fork or a clean that was killed")
        elif _is_run(run) and not is_locked(run):
            yield from _of_run(run)


def _of_run(run: Path) -> Iterator[Removable]:
    if not has_results(run):
        yield Removable(run, run, "a start that failed: no episode ended")
        return
    for name, reason in _REMADE.items():
        if (run / f".{name}.partial").is_dir():
            yield Removable(run, run / f".{name}.partial", "left by a clean that was killed")
        if (run / name).is_dir() and not (run / name).is_symlink():
            yield Removable(run, run / name, reason)


def _is_leftover(directory: Path) -> bool:
    return directory.name.startswith(".") and directory.name.endswith(".partial") and not directory.is_symlink()


def _is_run(directory: Path) -> bool:
    return not directory.is_symlink() and all((directory / name).is_file() for name in ("config.yaml", "state.json"))


def size(directory: Path) -> int:
    """The bytes of the files below ``directory``. Links are not followed; a file with several names counts once."""
    seen: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(directory):
        for name in names:
            found = Path(parent, name).lstat()
            seen[found.st_dev, found.st_ino] = found.st_size
    return sum(seen.values())
