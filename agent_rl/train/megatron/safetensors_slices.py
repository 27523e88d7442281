"""Reads parts of tensors out of safetensors files into parameters: each byte that is needed once, and no other.

Files are read and not mapped: pages of a mapped file would count as this process's memory, and on a network file system
each fault would wait for a round trip. What is in host memory at once is one block.
"""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agent_rl.errors import TrainerError
from agent_rl.train.hf_index import DTYPES, Entry, LoadProgress, check_tensor, read_heads

BLOCK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Part of the checkpoint's tensor ``name``, and the parameter (or view of one) ``target`` that it goes to.

    It begins at ``start`` on ``axis`` (0, or 1 of a matrix) and is as long as ``target`` there; of the checkpoint's
    tensor that axis has the size ``whole``, and the others those of ``target``.
    """

    name: str
    target: Tensor
    axis: int
    start: int
    whole: int

    @classmethod
    def share(cls, name: str, target: Tensor, axis: int = 0, rank: int = 0, size: int = 1) -> Piece:
        """One of ``size`` equal parts of a tensor."""
        length = target.shape[axis]
        return cls(name, target, axis, rank * length, size * length)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The checkpoint's tensor's."""
        sizes = list(self.target.shape)
        sizes[self.axis] = self.whole
        return tuple(sizes)


@dataclass(frozen=True, slots=True)
class _Grid:
    """Bytes of a piece: ``rows`` stretches of ``width``, the first at ``start`` in the file, ``pitch`` apart."""

    start: int
    rows: int
    width: int
    pitch: int


class SliceReader:
    """The checkpoint in a directory, open for reading. A context manager."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError, one line, where it is no whole checkpoint."""
        self._directory, self._entries = directory, read_heads(directory)
        self._files: dict[Path, int] = {}
        self._open = ExitStack()
        self._block = torch.empty(BLOCK_BYTES, dtype=torch.uint8)

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def check(self, piece: Piece) -> None:
        """Raises ConfigError where the checkpoint lacks the tensor, or has it in another shape or a dtype that is not
        read."""
        check_tensor(self._entries, piece.name, piece.full_shape, str(self._directory))

    def place(self, piece: Piece) -> tuple[str, int]:
        """File and byte at which a piece begins: read in this order, a disk is read forwards."""
        entry = self._entries[piece.name]
        return entry.file.name, _grid(piece, entry).start

    def nbytes(self, piece: Piece) -> int:
        """How much is read for it."""
        return piece.target.numel() * _dtype(self._entries[piece.name]).itemsize

    def fill(self, piece: Piece, progress: LoadProgress) -> None:
        """Read a piece, block by block, into its target. Raises TrainerError where the file can't be read."""
        entry = self._entries[piece.name]
        grid, dtype, file = _grid(piece, entry), _dtype(entry), self._file(entry.file)
        step = max(1, BLOCK_BYTES // grid.width)
        for row in range(0, grid.rows, step):
            rows = piece.target[row : row + step]
            block = self._room(len(rows) * grid.width)
            try:
                _read_rows(file, block, grid, row)
            except OSError as error:
                raise TrainerError(f"{entry.file}: {piece.name} can't be read: {error.strerror or error}") from None
            rows.copy_(block.view(dtype).view(rows.shape))
            progress.read += block.nbytes

    def _file(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._open.callback(os.close, file)
            # Reads are large, and what follows is another rank's: the kernel should not read ahead.
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        return self._files[path]

    def _room(self, size: int) -> Tensor:
        if size > len(self._block):  # a row wider than a block
            self._block = torch.empty(size, dtype=torch.uint8)
        return self._block[:size]


def _dtype(entry: Entry) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, DTYPES[entry.dtype])
    return dtype


def _grid(piece: Piece, entry: Entry) -> _Grid:
    item, shape = _dtype(entry).itemsize, entry.shape
    pitch = math.prod(shape[1:]) * item
    if piece.axis == 0:
        return _Grid(entry.start + piece.start * pitch, len(piece.target), pitch, pitch)
    return _Grid(entry.start + piece.start * item, shape[0], piece.target.shape[1] * item, pitch)


def _read_rows(file: int, block: Tensor, grid: _Grid, row: int) -> None:
    """As many rows as ``block`` holds, from ``row`` on."""
    bytes_: Any = block.numpy()
    view = memoryview(bytes_)
    start = grid.start + row * grid.pitch
    if grid.width == grid.pitch:
        _read(file, view, start)
        return
    rows = len(view) // grid.width
    # The rows' other parts are read by the host's other ranks: the kernel fetches the whole stretch once for all.
    os.posix_fadvise(file, start, rows * grid.pitch, os.POSIX_FADV_WILLNEED)
    for at in range(rows):
        _read(file, view[at * grid.width : (at + 1) * grid.width], start + at * grid.pitch)


def _read(file: int, into: Any, start: int) -> None:
    while len(into):
        count = os.preadv(file, [into], start)
        if count == 0:
            raise OSError("the file ends before the tensor does")
        into, start = into[count:], start + count
