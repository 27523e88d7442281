"""Read slices of tensors from safetensors files into parameters; every needed byte is read once. Quantized tensors are
multiplied by their scales on the way.

Files are read and not mapped: mapped pages would count as memory of this process, and every page fault on a network
file system would wait for a round trip. One block at a time is in host memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agent_rl.errors import TrainerError
from agent_rl.models.cuts import Piece
from agent_rl.train.hf_index import DTYPES, LoadProgress, check_tensor, read_weights
from agent_rl.train.quantized.dequantize import dequantized
from agent_rl.train.quantized.formats import ITEM_BYTES, Entry, Weight, source_bytes

BLOCK_BYTES = 16 << 20
_STORED = {
    **{name: getattr(torch, dtype) for name, dtype in DTYPES.items()},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "BOOL": torch.bool, "U8": torch.uint8},
    **{"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64},
}
"""Torch's dtype by safetensors' name."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorSlice:
    """A slice of the checkpoint's tensor ``name``, and the parameter (or view) ``target`` that receives it.

    The slice starts at ``start`` on ``axis`` (0, or 1 of a matrix) and has ``length`` entries there. ``target`` has its
    elements in the slice's order; its last axis may be divided in two. ``full_shape`` is that of the checkpoint's
    tensor.
    """

    name: str
    target: Tensor
    full_shape: tuple[int, ...]
    axis: int
    start: int
    length: int

    @classmethod
    def of(cls, piece: Piece, parameter: Tensor) -> TensorSlice:
        """The slice of a piece, whose target is the piece's view of ``parameter``."""
        view, shape = parameter[piece.target], piece.shape
        if piece.interleaved:
            view, shape = view.unflatten(0, (2, -1)).movedim(0, -1), (*shape[:-1], shape[-1] // 2, 2)
        if piece.transposed:
            view = view.transpose(0, 1)
        return cls(piece.tensor.name, view.view(shape), piece.tensor.shape, piece.axis, piece.start, piece.length)

    def region(self, full: Tensor) -> Tensor:
        """The slice of ``full``, the checkpoint's tensor, in the shape of the target."""
        return full.narrow(self.axis, self.start, self.length).view(self.target.shape)


def fill_tensors(full: dict[str, Tensor], slices: Iterable[TensorSlice]) -> None:
    """Copy the targets of ``slices`` into the tensors ``full``; make those that ``full`` lacks, without a copy where a
    slice is a full tensor."""
    for each in slices:
        if each.name not in full:
            if each.target.shape == each.full_shape:
                full[each.name] = each.target
                continue
            full[each.name] = each.target.new_empty(each.full_shape)
        each.region(full[each.name]).copy_(each.target)


@dataclass(frozen=True, slots=True)
class _ByteRows:
    """The bytes of a slice: ``rows`` of ``width`` bytes, the first at ``start`` in the file, ``pitch`` bytes apart."""

    start: int
    rows: int
    width: int
    pitch: int


class SliceReader:
    """The checkpoint in a directory, open for reading. A context manager."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError where ``directory`` has no complete checkpoint."""
        self._directory, self.weights = directory, read_weights(directory)
        self._scales: tuple[str, Tensor] = ("", torch.empty(0))  # of the quantized tensor that was read last
        self._files: dict[Path, int] = {}
        self._open = ExitStack()
        self._block = torch.empty(BLOCK_BYTES, dtype=torch.uint8)

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def check(self, piece: TensorSlice) -> None:
        """Raises ConfigError for a tensor that is missing or has another shape or an unsupported dtype."""
        check_tensor(self.weights, piece.name, piece.full_shape, str(self._directory))

    def position(self, piece: TensorSlice) -> tuple[str, int]:
        """The file and byte where a slice starts, the sort key for reading files forwards."""
        entry = self.weights[piece.name].sources[0]
        return entry.file.name, _byte_rows(piece, entry).start

    def nbytes(self, piece: TensorSlice) -> int:
        """The number of bytes to read for a slice, without scales."""
        grid = _byte_rows(piece, self.weights[piece.name].sources[0])
        return grid.rows * grid.width

    def parts(self, name: str, progress: LoadProgress) -> Iterator[Tensor]:
        """The tensor ``name`` in parts along its first axis: one for each expert in mxfp4, otherwise one."""
        weight = self.weights[name]
        shape = weight.shape or (1,)
        rows = 1 if weight.kind == "mxfp4" else shape[0]
        for start in range(0, shape[0], rows or 1):
            part = torch.empty((rows, *shape[1:]), dtype=_STORED[weight.dtype])
            self.fill(TensorSlice(name, part, shape, 0, start, rows), progress)
            yield part

    def fill(self, piece: TensorSlice, progress: LoadProgress) -> None:
        """Read a slice into its target, block by block. Raises TrainerError where the file cannot be read."""
        weight = self.weights[piece.name]
        entry = weight.sources[0]
        grid, file = _byte_rows(piece, entry), self._file(entry.file)
        scales = None if weight.kind == "copy" else self._scales_of(weight, progress)
        step = max(1, BLOCK_BYTES // max(1, grid.width))
        for row in range(0, grid.rows, step):
            rows = piece.target[row : row + step]
            block = self._block_of(len(rows) * grid.width)
            try:
                _read_rows(file, block, grid, row)
            except OSError as error:
                raise TrainerError(f"{entry.file}: {piece.name} cannot be read: {error.strerror or error}") from None
            stored = block.view(_STORED[entry.dtype]).view(len(rows), -1)
            if scales is not None:
                start = (piece.start + row, 0) if piece.axis == 0 else (row, piece.start)
                stored = dequantized(weight, stored, scales, start)
            rows.copy_(stored.view(rows.shape))
            progress.read += block.nbytes

    def _scales_of(self, weight: Weight, progress: LoadProgress) -> Tensor:
        """All scales of a weight. ``progress`` needs them once they are read."""
        if self._scales[0] != weight.name:
            entry = weight.sources[1]
            scales = torch.empty(source_bytes(entry), dtype=torch.uint8)
            view: Any = scales.numpy()
            _read(self._file(entry.file), memoryview(view), entry.start)
            self._scales = weight.name, scales.view(_STORED[entry.dtype]).view(entry.shape)
            progress.needed += scales.nbytes
            progress.read += scales.nbytes
        return self._scales[1]

    def _file(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._open.callback(os.close, file)
            # Reads are large and the next bytes belong to another rank: no read-ahead.
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        return self._files[path]

    def _block_of(self, size: int) -> Tensor:
        if size > len(self._block):  # a row wider than a block
            self._block = torch.empty(size, dtype=torch.uint8)
        return self._block[:size]


def _byte_rows(piece: TensorSlice, entry: Entry) -> _ByteRows:
    item, shape = ITEM_BYTES[entry.dtype], entry.shape
    pitch = math.prod(shape[1:]) * item
    if piece.axis == 0:
        return _ByteRows(entry.start + piece.start * pitch, piece.length, pitch, pitch)
    return _ByteRows(entry.start + piece.start * item, shape[0], piece.length * item, pitch)


def _read_rows(file: int, block: Tensor, grid: _ByteRows, row: int) -> None:
    """Fill ``block`` with rows from ``row`` on."""
    bytes_: Any = block.numpy()
    view = memoryview(bytes_)
    start = grid.start + row * grid.pitch
    if grid.width == grid.pitch:
        _read(file, view, start)
        return
    rows = len(view) // grid.width
    # Other ranks of this node read the other parts of these rows, so let the kernel fetch the full range once.
    os.posix_fadvise(file, start, rows * grid.pitch, os.POSIX_FADV_WILLNEED)
    for index in range(rows):
        _read(file, view[index * grid.width : (index + 1) * grid.width], start + index * grid.pitch)


def _read(file: int, into: Any, start: int) -> None:
    while len(into):
        count = os.preadv(file, [into], start)
        if count == 0:
            raise OSError("the file ends before the tensor")
        into, start = into[count:], start + count
