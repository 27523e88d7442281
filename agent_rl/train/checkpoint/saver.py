"""A rank's side of saving: the state is copied to host memory at once and written by a thread, while training goes on.

The thread computes nothing (it writes, syncs and sums up bytes, all without Python's lock), and one is enough: the next
copy is taken only when the former is on the disk, so a rank holds its state at most twice. Imports torch.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch

from agent_rl.errors import TrainerError
from agent_rl.train.checkpoint.directory import rank_file, rng_file
from agent_rl.train.checkpoint.pieces import Snapshot, write_pieces
from agent_rl.utils.run_files import disk_error


class RankSaver:
    """Writes the checkpoints of rank ``rank``, one at a time."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[int] | None = None

    def begin(self, partial: Path, copy_state: Callable[[], Snapshot], rng: Mapping[str, Any]) -> dict[str, int]:
        """Copy the state and start writing the copy into ``partial``; returns the optimizer's counts.

        Waits for the former write, if any; its failure is :meth:`written`'s to tell.
        """
        if self._writing is not None:
            self._writing.exception()
        snapshot = copy_state()
        self._writing = self._thread.submit(write_rank, partial, self._rank, snapshot, _bytes(rng))
        return snapshot.counts

    def written(self) -> int:
        """Wait until the file of the last :meth:`begin` is on the disk; its checksum. Raises as :func:`write_rank`."""
        if self._writing is None:
            raise TrainerError("no checkpoint was begun")
        return self._writing.result()

    def close(self) -> None:
        """Wait for the write that is under way. Idempotent."""
        self._thread.shutdown()


def write_rank(directory: Path, rank: int, snapshot: Snapshot, rng: bytes) -> int:
    """Write and sync one rank's files; the checksum of its state. Raises as :func:`disk_error`."""
    path = rank_file(directory, rank)
    try:
        with path.open("wb", buffering=0) as file:
            checksum = write_pieces(file, snapshot.pieces, snapshot.values)
            os.fsync(file.fileno())
        with rng_file(directory, rank).open("wb") as file:
            file.write(rng)
            _sync(file)
        return checksum
    except OSError as error:
        raise disk_error(path, error) from error


def read_rng(directory: Path, rank: int) -> dict[str, Any]:
    """One rank's random state. Raises TrainerError where its file is missing or damaged."""
    path = rng_file(directory, rank)
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise TrainerError(f"{path}: could not be read: {str(error).splitlines()[0]}") from error


def _bytes(rng: Mapping[str, Any]) -> bytes:
    stream = io.BytesIO()
    torch.save(dict(rng), stream)
    return stream.getvalue()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
