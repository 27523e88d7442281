"""Byte-exact changes between two versions of the weights, packed for a weight update (``engine.weight_sync: delta``).

::

    8 bytes: length of the header | JSON header | parts of every block | 16 bytes: XXH3-128 of all before

A block is at most :data:`BLOCK` consecutive elements of one tensor. Its parts say where elements changed (varint gaps,
or a bitmap where a tenth or more changed) and by how much: the difference of the elements' bits as integers, which is
the number of steps of the last place, as zigzag numbers whose bytes are stored plane by plane. Each part is a zstandard
frame. The header names the state that the delta builds on and the state that it makes (:func:`state_digest`), and the
digest of each changed tensor.

Runs in the engine's environment, which has no other module of this project; the trainer uses it too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

BLOCK = 1 << 22
STAGED = "agent-rl.staged:"
"""Prefix of the group's name in an update that loads a staged delta; the digest of its state follows."""
_LENGTH, _CHECK = 8, 16


class DeltaRefused(ValueError):
    """A delta that cannot be used here; the message is one line. The weights in use are unchanged."""


def words_of(data: NDArray[np.uint8], itemsize: int) -> NDArray[Any]:
    """The bytes of a tensor as unsigned integers of its element size, 2 or 4."""
    words: NDArray[Any] = data.view({2: np.uint16, 4: np.uint32}[itemsize])
    return words


def tensor_digest(data: NDArray[Any]) -> str:
    """XXH3-128 of a tensor's bytes."""
    return xxhash.xxh3_128_hexdigest(data.data)


def state_digest(digests: Mapping[str, str]) -> str:
    """The digest of a whole state, from the digest of each tensor by name."""
    return xxhash.xxh3_128_hexdigest("\n".join(f"{name} {digests[name]}" for name in sorted(digests)).encode())


class DeltaWriter:
    """Collects the changes of tensors."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self._blocks: list[list[Any]] = []
        self._parts: list[bytes] = []

    def add(self, name: str, old: NDArray[Any], new: NDArray[Any]) -> bool:
        """Add the changes of a tensor (``old`` and ``new``: its :func:`words_of`). Returns whether it changed."""
        changed = False
        for start in range(0, len(new), BLOCK):
            before, after = old[start : start + BLOCK], new[start : start + BLOCK]
            differs = before != after
            if count := int(np.count_nonzero(differs)):
                parts = _packed(differs, count, after[differs] - before[differs])
                self._blocks.append([name, start, len(after), count, [len(part) for part in parts]])
                self._parts += parts
                changed = True
        if changed:
            self.digests[name] = tensor_digest(new)
        return changed

    def finish(self, base: str, state: str, load: Sequence[str]) -> bytes:
        """The packed delta from state ``base`` to ``state``. ``load``: the tensors that an engine loads, in order."""
        header = {"base": base, "state": state, "load": list(load), "digests": self.digests, "blocks": self._blocks}
        encoded = json.dumps(header).encode()
        body = b"".join((struct.pack("<Q", len(encoded)), encoded, *self._parts))
        return body + xxhash.xxh3_128_digest(body)


@dataclass(frozen=True, slots=True)
class Block:
    """Changes of ``size`` elements from ``start`` on, of which ``count`` changed; ``parts`` as packed."""

    start: int
    size: int
    count: int
    parts: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta whose checksum is right. ``load``: the tensors to load; ``digests``: of each changed tensor."""

    base: str
    state: str
    load: tuple[str, ...]
    digests: Mapping[str, str]
    blocks: Mapping[str, Sequence[Block]]

    def apply(self, name: str, words: NDArray[Any]) -> None:
        """Change tensor ``name``, in place. Raises DeltaRefused where the result is not what the sender has."""
        try:
            for block in self.blocks[name]:
                places, steps = _unpacked(block, words.dtype)
                words[block.start : block.start + block.size][places] += steps
        except (ValueError, IndexError, zstandard.ZstdError) as error:
            raise DeltaRefused(f"{name} of the delta is malformed: {error}") from error
        if tensor_digest(words) != self.digests[name]:
            raise DeltaRefused(f"{name} would not become what was sent")


def read_delta(data: bytes | bytearray) -> Delta:
    """Read a packed delta. Raises DeltaRefused for a damaged or truncated one."""
    view = memoryview(data)
    if len(view) < _LENGTH + _CHECK or xxhash.xxh3_128_digest(view[:-_CHECK]) != view[-_CHECK:]:
        raise DeltaRefused("the delta was damaged in transfer: its checksum is wrong")
    at = _LENGTH + struct.unpack("<Q", view[:_LENGTH])[0]
    try:
        header = json.loads(bytes(view[_LENGTH:at]))
        blocks: dict[str, list[Block]] = {name: [] for name in header["digests"]}
        for name, start, size, count, lengths in header["blocks"]:
            stops = at + np.cumsum(lengths)
            parts = tuple(view[stop - length : stop] for stop, length in zip(stops, lengths, strict=True))
            blocks[name].append(Block(start, size, count, parts))
            at = int(stops[-1])
        return Delta(header["base"], header["state"], tuple(header["load"]), header["digests"], blocks)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DeltaRefused(f"the delta's header is malformed: {error}") from error


def _packed(differs: NDArray[np.bool_], count: int, steps: NDArray[Any]) -> list[bytes]:
    """The places and, plane by plane, the zigzag bytes of the ``count`` steps of a block."""
    sparse = count * 10 < len(differs)
    places = _varints(np.diff(np.flatnonzero(differs), prepend=-1) - 1) if sparse else np.packbits(differs)
    signed = steps.view(f"<i{steps.itemsize}")
    zigzag = (signed << 1) ^ (signed >> (8 * steps.itemsize - 1))
    planes = zigzag.view(np.uint8).reshape(count, -1).T
    compressor = zstandard.ZstdCompressor(level=1)
    return [compressor.compress(np.ascontiguousarray(part).data) for part in (places, *planes)]


def _unpacked(block: Block, dtype: np.dtype[Any]) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The inverse of :func:`_packed`: places in the block, and steps of ``dtype``."""
    places, *planes = (_decompressed(part, max(4 * block.count, block.size)) for part in block.parts)
    if block.count * 10 < block.size:
        at = np.cumsum(_gaps(places) + 1) - 1
    else:
        at = np.flatnonzero(np.unpackbits(places, count=block.size))
    zigzag = np.stack(planes, axis=1).reshape(-1).view(dtype)
    if len(at) != block.count or len(zigzag) != block.count or at[-1] >= block.size:
        raise ValueError(f"{len(at)} places and {len(zigzag)} steps, not {block.count}")
    return at, (zigzag >> 1) ^ (0 - (zigzag & 1))


def _decompressed(part: memoryview, limit: int) -> NDArray[np.uint8]:
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(part, max_output_size=limit), np.uint8)


def _varints(gaps: NDArray[np.int64]) -> NDArray[np.uint8]:
    """LEB128 of numbers below 2^28."""
    sizes = 1 + np.searchsorted([1 << 7, 1 << 14, 1 << 21], gaps, side="right")
    stops = np.cumsum(sizes)
    data, starts = np.empty(int(stops[-1]), np.uint8), stops - sizes
    for index in range(int(sizes.max())):
        longer = sizes > index
        more = np.where(sizes[longer] > index + 1, 128, 0)
        data[starts[longer] + index] = (gaps[longer] >> (7 * index) & 127) | more
    return data


def _gaps(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The inverse of :func:`_varints`."""
    stops = np.flatnonzero(data < 128)
    starts = np.concatenate(([0], stops[:-1] + 1))
    gaps, sizes = (data[starts] & 127).astype(np.int64), stops - starts
    for index in range(1, int(sizes.max()) + 1):
        longer = sizes >= index
        gaps[longer] |= (data[starts[longer] + index] & 127).astype(np.int64) << (7 * index)
    return gaps
