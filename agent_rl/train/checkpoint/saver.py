"""A rank's checkpoint files: copy the state to host memory, then write it in a thread while training continues.

The thread writes, syncs and computes checksums without Python's lock. The next copy waits until the previous one is on
the disk, so a rank holds its state at most twice. Imports torch.
"""

from __future__ import annotations

import io
import os
import pickle
import random
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from agent_rl.errors import TrainerError
from agent_rl.train.checkpoint.directory import rank_file, rng_file
from agent_rl.train.checkpoint.piece_files import Snapshot, write_pieces
from agent_rl.utils.run_files import disk_error


class CheckpointWriter:
    """Writes the checkpoints of rank ``rank``, one at a time."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[int] | None = None

    def begin(self, partial: Path, copy_state: Callable[[], Snapshot], rng: Mapping[str, Any]) -> dict[str, int]:
        """Copy the state and start to write the copy into ``partial``. Returns the optimizer's counts.

        Waits for the previous write; :meth:`written` raises its failure.
        """
        if self._writing is not None:
            self._writing.exception()
        snapshot = copy_state()
        self._writing = self._thread.submit(write_rank, partial, self._rank, snapshot, _bytes(rng))
        return snapshot.counts

    def written(self) -> int:
        """Wait until the files of the last :meth:`begin` are on the disk; their checksum. Raises as
        :func:`write_rank`."""
        if self._writing is None:
            raise TrainerError("no checkpoint write was started")
        return self._writing.result()

    def close(self) -> None:
        """Wait for a write in progress. Idempotent."""
        self._thread.shutdown()


def write_rank(directory: Path, rank: int, snapshot: Snapshot, rng: bytes) -> int:
    """Write and sync one rank's files; the CRC-32 of its state. Raises as :func:`disk_error`."""
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
    """The random state in a rank's file. Raises TrainerError where the file is missing or damaged."""
    path = rng_file(directory, rank)
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise TrainerError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from error


def _bytes(rng: Mapping[str, Any]) -> bytes:
    stream = io.BytesIO()
    torch.save(dict(rng), stream)
    return stream.getvalue()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def rng_state(device: str) -> dict[str, Any]:
    """Copies of the random states of torch, numpy, Python and Megatron's tracker, of types that ``torch.load`` reads
    with ``weights_only``."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if device == "cuda" else None,
        "numpy": (kind, torch.from_numpy(np.asarray(keys, np.int64)), position, has_gauss, cached),
        "python": random.getstate(),
        "megatron": {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()},
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore what :func:`rng_state` returned."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    random.setstate(state["python"])
    get_cuda_rng_tracker().set_states(state["megatron"])
