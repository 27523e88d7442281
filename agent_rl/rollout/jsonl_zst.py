"""Files of rows: one JSON object a line, as zstandard frames of about a mebibyte, so that one row is found without the
others; ``zstdcat`` shows a file as text. A file whose name ends in ``.jsonl`` is plain text, as releases before wrote.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from agent_rl.errors import AgentRlError

SUFFIX = ".jsonl.zst"
_FRAME_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 16
_LEVEL = 6  # 12 saves a twentieth of the bytes and takes five times as long

Place = tuple[int, int]
"""Where a row is: the offset of its frame in the file, and its number within the frame."""


def encode_rows(rows: Iterable[Mapping[str, Any]]) -> tuple[bytes, list[Place]]:
    """``rows`` as the bytes of a file, and the place of each."""
    written, places = bytearray(), list[Place]()
    for frame in _cut(rows):
        places += ((len(written), number) for number in range(len(frame)))
        written += zstandard.ZstdCompressor(level=_LEVEL).compress(b"".join(frame))
    return bytes(written), places


def _cut(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[bytes]]:
    """The lines of each frame."""
    lines, size = list[bytes](), 0
    for row in rows:
        # Not orjson: a model may write integers over 64 bits and lone surrogates, which it refuses.
        lines.append(json.dumps(row).encode() + b"\n")
        size += len(lines[-1])
        if size >= _FRAME_BYTES:
            yield lines
            lines, size = [], 0
    if lines:
        yield lines


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file as they stand. Raises AgentRlError for a line that is no row, and for a damaged file."""
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file, path), 1):
            yield _row(line, f"{path}, line {number}")


def read_row(path: Path, place: Place) -> dict[str, Any]:
    """The row at ``place``. Raises AgentRlError where there is none, or the file is damaged."""
    offset, number = place
    with path.open("rb") as file:
        file.seek(offset)
        line = next(itertools.islice(_lines(file, path), number, None), None)
    where = f"{path}, row {number} of the frame at byte {offset}"
    if line is None:
        raise AgentRlError(f"{where}: the file ends before it")
    return _row(line, where)


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    if path.suffix == ".zst":
        return itertools.chain.from_iterable(frame.splitlines() for frame in _frames(file, path))
    return iter(file)


def _frames(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The frames from where ``file`` stands, decompressed. One that is cut off is an error, which a stream hides."""
    left = b""
    while chunk := left or file.read(_CHUNK_BYTES):
        decoder, parts = zstandard.ZstdDecompressor().decompressobj(), list[bytes]()
        try:
            while chunk:
                parts.append(decoder.decompress(chunk))
                chunk = b"" if decoder.eof else file.read(_CHUNK_BYTES)
        except zstandard.ZstdError as error:
            raise AgentRlError(f"{path}: damaged ({error})") from None
        if not decoder.eof:
            raise AgentRlError(f"{path}: damaged (it is cut off)")
        left = decoder.unused_data
        yield b"".join(parts)


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise AgentRlError(f"{where}: no JSON ({error})") from None
    if not isinstance(row, dict):
        raise AgentRlError(f"{where}: not the row of a trajectory")
    return row
