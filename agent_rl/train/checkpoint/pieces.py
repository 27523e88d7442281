"""Training state on disk, in pieces: every rank writes what it alone keeps, and any layout reads what it needs.

A parameter's state is three float32 tensors (``master``, ``exp_avg``, ``exp_avg_sq``). A rank holds a *part* of it, cut
along one axis over tensor or expert ranks, and of that part's flattened elements a *stretch*, where data ranks share
the optimizer out. A rank's file is a safetensors file of its stretches; the header's metadata says for each which
stretch of which part of which parameter it is, parameters by their Hugging Face names, which no layout changes.

Nothing is gathered to write it, so a rank's file is the bytes it holds. To read, a rank names its own stretch: of the
layout that wrote, it maps and copies just that; of another, it puts the parts that overlap its own together and cuts.
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

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Part:
    """Part ``index`` of ``count`` equal ones of parameter ``name``, cut along ``axis``; ``shape`` is the part's own."""

    name: str
    shape: tuple[int, ...]
    axis: int = 0
    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements ``[start, stop)`` of a part's flattened elements."""

    part: Part
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A copy of what a rank writes: ``values`` are the pieces (stretches and slots), one after the other, in host
    memory. ``counts`` are the optimizer's."""

    pieces: list[tuple[Stretch, str]]
    values: Floats
    counts: dict[str, int]


def write_pieces(file: IO[bytes], pieces: Sequence[tuple[Stretch, str]], values: Floats) -> int:
    """Write ``values``, the pieces (a stretch and a slot each) one after the other, as a safetensors file.

    Returns the CRC-32 of the values. Raises TrainerError where they are not as many as the stretches say, and OSError.
    """
    header: dict[str, Any] = {}
    stretches: dict[str, Any] = {}
    offset, keys = 0, _keys([stretch for stretch, _ in pieces])
    for stretch, slot in pieces:
        end = offset + 4 * stretch.size
        header[f"{keys[stretch]}.{slot}"] = {"dtype": "F32", "shape": [stretch.size], "data_offsets": [offset, end]}
        stretches[keys[stretch]] = asdict(stretch)
        offset = end
    if values.nbytes != offset or len(header) != len(pieces):
        raise TrainerError(f"checkpoint: {values.nbytes} bytes for pieces of {offset}, or a piece named twice")
    header["__metadata__"] = {"stretches": json.dumps(stretches)}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    data = values.view(np.uint8).data
    for view in (memoryview(len(encoded).to_bytes(8, "little") + encoded), data):
        while view:
            view = view[file.write(view) :]  # an unbuffered file takes at most 2 GiB at once
    return zlib.crc32(data)


def _keys(stretches: Sequence[Stretch]) -> dict[Stretch, str]:
    """Names within a file: the parameter's; where a rank has several stretches of one, those after it are numbered."""
    keys, taken = dict[Stretch, str](), Counter[str]()
    for stretch in dict.fromkeys(stretches):
        name = stretch.part.name
        keys[stretch] = f"{name}#{taken[name]}" if taken[name] else name
        taken[name] += 1
    return keys


class PieceReader:
    """Reads pieces out of the files of all ranks that wrote. Raises TrainerError where a file is damaged."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._by_name: dict[str, list[tuple[Stretch, Mapping[str, Floats]]]] = {}
        for path in files:
            for stretch, slots in _open(path):
                self._by_name.setdefault(stretch.part.name, []).append((stretch, slots))

    def read(self, wanted: Stretch, slot: str) -> Floats:
        """``wanted`` of ``slot``, flat. Raises TrainerError where the files do not hold all of it."""
        held = self._by_name.get(wanted.part.name)
        if held is None:
            raise TrainerError(f"the checkpoint has no state of {wanted.part.name}: it is another model's")
        values = np.empty(wanted.size, np.float32)
        if any(stretch.part == wanted.part for stretch, _ in held):
            own = [(stretch, slots[slot]) for stretch, slots in held if stretch.part == wanted.part]
            _fill(values, wanted.start, own, wanted.part.name)
            return values
        values[:] = self._assembled(wanted.part, held, slot).reshape(-1)[wanted.start : wanted.stop]
        return values

    def _assembled(self, wanted: Part, held: Sequence[tuple[Stretch, Mapping[str, Floats]]], slot: str) -> Floats:
        """``wanted`` put together from parts that were cut into another number."""
        out = np.empty(wanted.shape, np.float32)
        width = wanted.shape[wanted.axis]
        low, restore = wanted.index * width, 0
        for part in sorted({stretch.part for stretch, _ in held}, key=lambda part: part.index):
            _check_fits(part, wanted)
            own_width = part.shape[part.axis]
            start, stop = max(low, part.index * own_width), min(low + width, (part.index + 1) * own_width)
            if start >= stop:
                continue
            flat = np.empty(math.prod(part.shape), np.float32)
            _fill(flat, 0, [(s, slots[slot]) for s, slots in held if s.part == part], part.name)
            source = _along(part.axis, start - part.index * own_width, stop - part.index * own_width)
            out[_along(wanted.axis, start - low, stop - low)] = flat.reshape(part.shape)[source]
            restore += stop - start
        if restore != width:
            raise TrainerError(f"the checkpoint holds {restore} of {width} rows or columns of {wanted.name}")
        return out


def _fill(values: Floats, first: int, stretches: Sequence[tuple[Stretch, Floats]], name: str) -> None:
    """Fill ``values``, elements from ``first`` on of a part, from stretches of that part. (Copies may overlap.)"""
    reached = first
    for stretch, data in sorted(stretches, key=lambda pair: pair[0].start):
        start, stop = max(first, stretch.start), min(first + len(values), stretch.stop)
        if start < stop:
            if start > reached:
                break
            values[start - first : stop - first] = data[start - stretch.start : stop - stretch.start]
            reached = max(reached, stop)
    if reached != first + len(values):
        raise TrainerError(f"the checkpoint lacks elements {reached} to {first + len(values)} of a part of {name}")


def _uncut(part: Part) -> Part:
    shape = tuple(n * part.count if axis == part.axis else n for axis, n in enumerate(part.shape))
    return Part(part.name, shape, part.axis)


def _along(axis: int, start: int, stop: int) -> tuple[slice, ...]:
    return (*[slice(None)] * axis, slice(start, stop))


def _check_fits(part: Part, wanted: Part) -> None:
    if _uncut(part) != _uncut(wanted):
        shapes = _uncut(part).shape, _uncut(wanted).shape
        raise TrainerError(f"the checkpoint's {part.name} is {shapes[0]}, the model's {shapes[1]}")


def _open(path: Path) -> list[tuple[Stretch, Mapping[str, Floats]]]:
    """The stretches in one file, their values mapped, not read."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        stretches = json.loads(header.pop("__metadata__")["stretches"])
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if path.stat().st_size != 8 + length + end:
            raise ValueError(f"{path.stat().st_size} bytes, expected {8 + length + end}")
        data = np.memmap(path, np.float32, "r", offset=8 + length) if end else np.empty(0, np.float32)
        slots: dict[str, dict[str, Floats]] = {name: {} for name in stretches}
        for key, entry in header.items():
            name, _, slot = key.rpartition(".")
            start, stop = entry["data_offsets"]
            slots[name][slot] = data[start // 4 : stop // 4]
        return [(_stretch(fields), slots[name]) for name, fields in stretches.items()]
    except (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError) as error:
        raise TrainerError(f"{path}: could not be read: {error}") from error


def _stretch(fields: Mapping[str, Any]) -> Stretch:
    part = fields["part"]
    return Stretch(Part(**{**part, "shape": tuple(part["shape"])}), fields["start"], fields["stop"])


def checksum(path: Path) -> int:
    """The CRC-32 of a file's values, as :func:`write_pieces` gave it. Raises TrainerError where it can't be read."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            file.seek(8 + length)
            crc = 0
            while chunk := file.read(1 << 24):
                crc = zlib.crc32(chunk, crc)
            return crc
    except OSError as error:
        raise TrainerError(f"{path}: could not be read: {error.strerror}") from error
