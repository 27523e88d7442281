"""Training state on disk in pieces: every rank writes what it owns, and any parallel layout reads what it needs.

A parameter's state is three float32 tensors (``master``, ``exp_avg``, ``exp_avg_sq``), and a fourth (``ema``) where the
weights are averaged. A rank has a *shard* of it, along one axis over tensor or expert ranks, and of that shard's
flattened elements a *flat range*, where data ranks share the optimizer state. A rank's file is a safetensors file of
its flat ranges. The metadata of its header says which range of which shard of which parameter each is; parameters have
their Hugging Face names, which no layout changes.

Nothing is gathered for writing. To read its own range, a rank maps and copies it where the layout is the same;
otherwise it assembles the shards that overlap its own.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from agent_rl.errors import TrainerError
from agent_rl.models.cuts import ParamShard

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Elements ``[start, stop)`` of a shard's flattened elements."""

    part: ParamShard
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The data that a rank writes: ``values`` are the pieces (flat range and slot), concatenated, in host memory.
    ``counts`` are the optimizer's."""

    pieces: list[tuple[FlatRange, str]]
    values: Floats
    counts: dict[str, int]


def write_pieces(file: IO[bytes], pieces: Sequence[tuple[FlatRange, str]], values: Floats) -> int:
    """Write ``values``, the concatenated pieces (flat range and slot), as a safetensors file.

    Returns the CRC-32 of the values. Raises TrainerError where sizes do not match, and OSError.
    """
    header: dict[str, Any] = {}
    ranges: dict[str, Any] = {}
    offset, keys = 0, _keys([span for span, _ in pieces])
    for span, slot in pieces:
        end = offset + 4 * span.size
        header[f"{keys[span]}.{slot}"] = {"dtype": "F32", "shape": [span.size], "data_offsets": [offset, end]}
        ranges[keys[span]] = asdict(span)
        offset = end
    if values.nbytes != offset or len(header) != len(pieces):
        raise TrainerError(f"checkpoint: {values.nbytes} bytes for pieces of {offset}, or a piece named twice")
    header["__metadata__"] = {"stretches": json.dumps(ranges)}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    data = values.view(np.uint8).data
    for view in (memoryview(len(encoded).to_bytes(8, "little") + encoded), data):
        while view:
            view = view[file.write(view) :]  # an unbuffered write takes at most 2 GiB
    return zlib.crc32(data)


def _keys(ranges: Sequence[FlatRange]) -> dict[FlatRange, str]:
    """Names within a file: the parameter's name, numbered from the second range of a parameter on."""
    keys, taken = dict[FlatRange, str](), Counter[str]()
    for flat_range in dict.fromkeys(ranges):
        name = flat_range.part.name
        keys[flat_range] = f"{name}#{taken[name]}" if taken[name] else name
        taken[name] += 1
    return keys


class PieceReader:
    """Reads pieces from the files of all ranks. Raises TrainerError where a file is damaged."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._by_name: dict[str, list[tuple[FlatRange, Mapping[str, Floats]]]] = {}
        for path in files:
            for flat_range, slots in _open(path):
                self._by_name.setdefault(flat_range.part.name, []).append((flat_range, slots))

    def read(self, target: FlatRange, slot: str) -> Floats:
        """The values of ``target`` for ``slot``, flat. Raises TrainerError where the files lack some of them."""
        available = self._by_name.get(target.part.name)
        if available is None:
            raise TrainerError(f"the checkpoint has no state of {target.part.name}: it belongs to another model")
        values = np.empty(target.size, np.float32)
        if any(flat_range.part == target.part for flat_range, _ in available):
            same = [(flat_range, slots[slot]) for flat_range, slots in available if flat_range.part == target.part]
            _fill(values, target.start, same, target.part.name)
            return values
        values[:] = self._assembled(target.part, available, slot).reshape(-1)[target.start : target.stop]
        return values

    def _assembled(
        self, target: ParamShard, available: Sequence[tuple[FlatRange, Mapping[str, Floats]]], slot: str
    ) -> Floats:
        """Assemble ``target`` from shards of another sharding."""
        out = np.empty(target.shape, np.float32)
        width = target.shape[target.axis]
        low, filled = target.index * width, 0
        for part in sorted({flat_range.part for flat_range, _ in available}, key=lambda part: part.index):
            _check_fits(part, target)
            part_width = part.shape[part.axis]
            start, stop = max(low, part.index * part_width), min(low + width, (part.index + 1) * part_width)
            if start >= stop:
                continue
            flat = np.empty(math.prod(part.shape), np.float32)
            _fill(flat, 0, [(s, slots[slot]) for s, slots in available if s.part == part], part.name)
            source = _along(part.axis, start - part.index * part_width, stop - part.index * part_width)
            out[_along(target.axis, start - low, stop - low)] = flat.reshape(part.shape)[source]
            filled += stop - start
        if filled != width:
            raise TrainerError(f"the checkpoint has {filled} of {width} rows or columns of {target.name}")
        return out


def _fill(values: Floats, first: int, ranges: Sequence[tuple[FlatRange, Floats]], name: str) -> None:
    """Fill ``values``, the elements of a shard from ``first`` on, from ranges of that shard, which may overlap."""
    reached = first
    for flat_range, data in sorted(ranges, key=lambda pair: pair[0].start):
        start, stop = max(first, flat_range.start), min(first + len(values), flat_range.stop)
        if start < stop:
            if start > reached:
                break
            values[start - first : stop - first] = data[start - flat_range.start : stop - flat_range.start]
            reached = max(reached, stop)
    if reached != first + len(values):
        raise TrainerError(f"the checkpoint lacks elements {reached} to {first + len(values)} of a part of {name}")


def _full_parameter(part: ParamShard) -> ParamShard:
    shape = tuple(n * part.count if axis == part.axis else n for axis, n in enumerate(part.shape))
    return ParamShard(part.name, shape, part.axis)


def _along(axis: int, start: int, stop: int) -> tuple[slice, ...]:
    return (*[slice(None)] * axis, slice(start, stop))


def _check_fits(part: ParamShard, target: ParamShard) -> None:
    if _full_parameter(part) != _full_parameter(target):
        shapes = _full_parameter(part).shape, _full_parameter(target).shape
        raise TrainerError(f"the checkpoint's {part.name} is {shapes[0]}, the model's {shapes[1]}")


def _open(path: Path) -> list[tuple[FlatRange, Mapping[str, Floats]]]:
    """The flat ranges in one file; values are mapped, not read."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        ranges = json.loads(header.pop("__metadata__")["stretches"])
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if path.stat().st_size != 8 + length + end:
            raise ValueError(f"{path.stat().st_size} bytes, expected {8 + length + end}")
        data = np.memmap(path, np.float32, "r", offset=8 + length) if end else np.empty(0, np.float32)
        slots: dict[str, dict[str, Floats]] = {name: {} for name in ranges}
        for key, entry in header.items():
            name, _, slot = key.rpartition(".")
            start, stop = entry["data_offsets"]
            slots[name][slot] = data[start // 4 : stop // 4]
        return [(_flat_range(fields), slots[name]) for name, fields in ranges.items()]
    except (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError) as error:
        raise TrainerError(f"{path}: cannot be read: {error}") from error


def _flat_range(fields: Mapping[str, Any]) -> FlatRange:
    part = fields["part"]
    return FlatRange(ParamShard(**{**part, "shape": tuple(part["shape"])}), fields["start"], fields["stop"])


def checksum(path: Path) -> int:
    """The CRC-32 of a file's values, as :func:`write_pieces` returns it. Raises TrainerError where it cannot be
    read."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            file.seek(8 + length)
            crc = 0
            while chunk := file.read(1 << 24):
                crc = zlib.crc32(chunk, crc)
            return crc
    except OSError as error:
        raise TrainerError(f"{path}: cannot be read: {error.strerror}") from error
