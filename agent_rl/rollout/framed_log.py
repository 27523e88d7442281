"""Files that are only ever appended to, a frame in one write: length (4 bytes, little-endian), CRC-32 of the payload
(4 bytes), payload. A kill tears at most the last frame; reading stops there."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import IO

_HEAD = struct.Struct("<II")


def as_frame(payload: bytes) -> bytes:
    """``payload`` as it is appended."""
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def frames_of(file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """Every whole frame's payload, and where the frame ends; up to the first that is torn or damaged."""
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        length, checksum = _HEAD.unpack(head)
        payload = file.read(length)
        if len(payload) < length or zlib.crc32(payload) != checksum:
            return
        yield payload, file.tell()
