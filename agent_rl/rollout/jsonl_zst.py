"""Files of rows: one JSON object per line, in zstandard frames of about 1 MiB, so that one row is read without the
others. ``zstdcat`` prints a file as text.

Also append-only logs of frames. A frame there is a length (4 bytes, little-endian), the payload's CRC-32 (4 bytes) and
the payload. Frames are appended, so a kill damages at most the last one; reading stops there.
"""

from __future__ import annotations

import itertools
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

import zstandard

from agent_rl.errors import AgentRlError

SUFFIX = ".jsonl.zst"
_FRAME_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 12  # zstandard may return 32,768 bytes for each byte of it
_MAX_FRAME_BYTES = 512 << 20
_MAX_FILE_BYTES = 16 << 30
_MAX_ROW_BYTES = 64 << 20  # as Python objects, JSON may take 20 times its size
_LEVEL = 6  # level 12 saves 5 % of the bytes and takes five times as long

RowPosition = tuple[int, int]
"""Position of a row: the byte offset of its frame in the file, and its number within the frame."""


def encode_rows(rows: Iterable[Mapping[str, Any]]) -> tuple[bytes, list[RowPosition]]:
    """``rows`` as the bytes of a file, and the position of each row."""
    written, positions = bytearray(), list[RowPosition]()
    for frame in _chunks(rows):
        positions += ((len(written), number) for number in range(len(frame)))
        written += zstandard.ZstdCompressor(level=_LEVEL).compress(b"".join(frame))
    return bytes(written), positions


def _chunks(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[bytes]]:
    """The lines of each frame."""
    lines, size = list[bytes](), 0
    for row in rows:
        # Not orjson: it rejects integers over 64 bits and lone surrogates, which a model may write.
        lines.append(json.dumps(row).encode() + b"\n")
        size += len(lines[-1])
        if size >= _FRAME_BYTES:
            yield lines
            lines, size = [], 0
    if lines:
        yield lines


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file. Raises AgentRlError for a line that is not a row, and for a damaged file."""
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file, path), 1):
            yield _row(line, f"{path}, line {number}")


def read_row(path: Path, position: RowPosition) -> dict[str, Any]:
    """The row at ``position``. Raises AgentRlError if there is no such row or the file is damaged."""
    offset, number = position
    with path.open("rb") as file:
        file.seek(offset)
        line = next(itertools.islice(_lines(file, path), number, None), None)
    where = f"{path}, row {number} of the frame at byte {offset}"
    if line is None:
        raise AgentRlError(f"{where}: the file ends before it")
    return _row(line, where)


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    return itertools.chain.from_iterable(frame.splitlines() for frame in _frames(file, path))


def _frames(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The decompressed frames from the current offset of ``file``. Raises AgentRlError for a truncated frame, which
    zstandard's stream reader would not report, and for more bytes than a run writes."""
    remainder, total = b"", 0
    while chunk := remainder or file.read(_CHUNK_BYTES):
        decoder, parts, size = zstandard.ZstdDecompressor().decompressobj(), list[bytes](), 0
        try:
            while chunk:
                parts.append(decoder.decompress(chunk))
                size += len(parts[-1])
                if size > _MAX_FRAME_BYTES or total + size > _MAX_FILE_BYTES:
                    raise AgentRlError(f"{path}: damaged (a frame of more than {size} bytes)")
                chunk = b"" if decoder.eof else file.read(_CHUNK_BYTES)
        except zstandard.ZstdError as error:
            raise AgentRlError(f"{path}: damaged ({error})") from None
        if not decoder.eof:
            raise AgentRlError(f"{path}: damaged (truncated)")
        remainder, total = decoder.unused_data, total + size
        yield b"".join(parts)


def decompress(data: bytes, max_bytes: int) -> bytes:
    """One zstandard frame. Raises ZstdError if it is damaged or has more than ``max_bytes``."""
    if zstandard.frame_content_size(data) > max_bytes:
        raise zstandard.ZstdError(f"a frame of more than {max_bytes} bytes")
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=max_bytes)


def _row(line: bytes, where: str) -> dict[str, Any]:
    if len(line) > _MAX_ROW_BYTES:
        raise AgentRlError(f"{where}: {len(line)} bytes, more than the {_MAX_ROW_BYTES} allowed")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise AgentRlError(f"{where}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise AgentRlError(f"{where}: not a JSON object")
    return row


_HEAD = struct.Struct("<II")
_MAX_BYTES = 2 << 30


def frame_head(*payload: bytes) -> bytes:
    """What a frame has before its ``payload``, given in parts."""
    checksum = 0
    for part in payload:
        checksum = zlib.crc32(part, checksum)
    return _HEAD.pack(sum(map(len, payload)), checksum)


def encode_frame(payload: bytes) -> bytes:
    """The frame that holds ``payload``."""
    return frame_head(payload) + payload


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
