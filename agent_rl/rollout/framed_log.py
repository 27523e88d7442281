"""Append-only files of frames. A frame is a length (4 bytes, little-endian), the payload's CRC-32 (4 bytes) and the
payload. Each frame is one write, so a kill damages at most the last frame; reading stops there."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import IO

_HEAD = struct.Struct("<II")
_MAX_BYTES = 2 << 30


def encode_frame(payload: bytes) -> bytes:
    """The frame that holds ``payload``."""
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def read_frames(file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """``(payload, offset of the frame's end)`` for every complete frame, up to the first damaged one."""
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        length, checksum = _HEAD.unpack(head)
        if length > _MAX_BYTES:
            return
        payload = file.read(length)
        if len(payload) < length or zlib.crc32(payload) != checksum:
            return
        yield payload, file.tell()
