"""The file format of routes: self-describing, a sixth of the size of int32 ids.

::

    magic 8 | version u16 | header bytes u32 | body bytes u64 | CRC-32 of all the rest u32 | header | body

All numbers are little-endian. The header is JSON and readable without this module: ``tokens``,
``moe_layers``, ``top_k``, ``num_experts``, ``dtype`` (of the ids), ``sorted``, ``layer_ids`` (null, or which of the
model's layers the MoE layers are) and ``spans``. Rows of spans of kind ``missing`` are not stored: the spans are the
mask.

The body is one zstandard frame of the P present rows as ``[top_k, P, moe_layers]``. Unless ``sorted`` is false the ids
ascend within a row, and each but the first is the difference to the one before: smaller numbers compress
better. **Sorting loses the order within a row**, which changes a top-k sum only by rounding. Two-byte ids are stored as
all low bytes, then all high bytes. The frame of ids in their order is not compressed: that would save an eighth.

Axes: T tokens, P present rows, M MoE layers, K experts a token, N = P * M.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from r3.atomic_write import write_atomic
from r3.page_pool import PAGES
from r3.routing import Routing, RoutingError, SlotPlanes, Span, SpanKind, check_form, narrowest_dtype, validate

MAGIC = b"\x89R3\r\n\x1a\n\0"
"""First bytes of every archive. As in PNG, a byte over 127 and line ends reveal a transfer as text."""
VERSION = 1
MAX_BYTES = 1 << 30
"""Default limit on the bytes of expert ids in an archive."""

_PREFIX = struct.Struct("<8sHIQI")
_MAX_HEADER_BYTES = 1 << 24
_LEVEL = 1  # higher levels do not compress routes better (measured) and take several times as long
_STORED = -1  # a copy; level 1 takes four times as long
_BLOCK_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class Header:
    """The header of an archive. ``layer_ids``: the 0-based model layers of the rows."""

    tokens: int
    moe_layers: int
    top_k: int
    num_experts: int
    dtype: str
    sorted: bool
    layer_ids: tuple[int, ...] | None
    spans: tuple[Span, ...]

    @property
    def present(self) -> NDArray[np.bool_]:
        """Bool ``[T]``: which rows are stored."""
        mask = np.ones(self.tokens, np.bool_)
        for span in self.spans:
            if span.kind is SpanKind.MISSING:
                mask[span.start : span.stop] = False
        return mask


def encode(routing: Routing, *, layer_ids: Sequence[int] | None = None, keep_order: bool = False) -> bytes:
    """Encode ``routing`` as an archive. ``keep_order`` keeps the experts' order within a row, for half more bytes.

    Raises RoutingError for an inconsistent routing, and for layer ids that do not match its layers. The ids themselves
    are checked by :func:`decode`.
    """
    check_form(routing, "archive")
    header = Header(
        tokens=routing.tokens,
        moe_layers=routing.moe_layers,
        top_k=routing.top_k,
        num_experts=routing.num_experts,
        dtype=_dtype(routing.num_experts).str,
        sorted=not keep_order,
        layer_ids=None if layer_ids is None else tuple(int(layer) for layer in layer_ids),
        spans=routing.spans,
    )
    _check(header, MAX_BYTES, "archive")
    choices_NK = _present_rows(routing).reshape(-1, routing.top_k)
    planes_KN = PAGES.empty(choices_NK.nbytes).view(choices_NK.dtype).reshape(choices_NK.shape[::-1])
    if header.sorted:
        _take_steps(choices_NK, planes_KN)
    else:
        planes_KN[:] = choices_NK.T
    compressor = zstandard.ZstdCompressor(level=_LEVEL if header.sorted else _STORED)
    body = compressor.compress(_split(planes_KN, header.dtype).data)
    head = _header_bytes(header)
    if len(head) > _MAX_HEADER_BYTES:
        raise RoutingError(f"archive: the header takes {len(head)} bytes, at most {_MAX_HEADER_BYTES} are read")
    lengths = (MAGIC, VERSION, len(head), len(body))
    checksum = _checksum(_PREFIX.pack(*lengths, 0), head, body)
    return b"".join((_PREFIX.pack(*lengths, checksum), head, body))


def decode(data: bytes | memoryview, *, max_bytes: int = MAX_BYTES, where: str = "archive") -> Routing:
    """Decode ``data`` and validate the routing.

    Raises RoutingError, with ``where`` in front of its message, for anything but an archive of at most
    ``max_bytes`` of expert ids.
    """
    header, body = _parse(memoryview(data), max_bytes, where)
    present = header.present
    rows = int(present.sum())
    planes_KN = _planes(body, header, rows, where)
    if header.sorted:
        for slot in range(1, header.top_k):
            planes_KN[slot] += planes_KN[slot - 1]
            if not (planes_KN[slot] > planes_KN[slot - 1]).all():
                raise RoutingError(f"{where}: ids that the header calls sorted do not ascend")
    experts_TMK = np.zeros((header.tokens, header.moe_layers, header.top_k), narrowest_dtype(header.num_experts))
    experts_TMK[present] = planes_KN.T.reshape(rows, header.moe_layers, header.top_k)
    routing = Routing(experts_TMK, present, header.spans, header.num_experts)
    validate(routing, where)
    return routing


def header_of(data: bytes | memoryview, *, where: str = "archive") -> Header:
    """Returns the header without unpacking the rows. Raises RoutingError as :func:`decode`."""
    return _parse(memoryview(data), MAX_BYTES, where)[0]


def write(path: Path, routing: Routing, *, layer_ids: Sequence[int] | None = None, keep_order: bool = False) -> None:
    """Write :func:`encode`'s bytes to ``path``, atomically."""
    write_atomic(path, encode(routing, layer_ids=layer_ids, keep_order=keep_order))


def read(path: Path, *, max_bytes: int = MAX_BYTES) -> Routing:
    """Read the routing at ``path``. Raises RoutingError as :func:`decode`, and if the file does not exist."""
    try:
        size = path.stat().st_size
        if size > max_bytes + _MAX_HEADER_BYTES:
            raise RoutingError(f"{path}: {size} bytes, expected an archive of at most {max_bytes} bytes of expert ids")
        data = path.read_bytes()
    except OSError as error:
        raise RoutingError(f"{path}: {error.strerror}") from None
    return decode(data, max_bytes=max_bytes, where=str(path))


def _parse(data: memoryview, max_bytes: int, where: str) -> tuple[Header, memoryview]:
    """Returns the checked header and the compressed body."""
    if len(data) < _PREFIX.size or data[: len(MAGIC)] != MAGIC:
        raise RoutingError(f"{where}: not an archive of routes (expected {MAGIC!r} first)")
    magic, version, header_bytes, body_bytes, checksum = _PREFIX.unpack(data[: _PREFIX.size])
    if version != VERSION:
        raise RoutingError(f"{where}: archive version {version}, this reader knows version {VERSION}")
    if header_bytes > _MAX_HEADER_BYTES:
        raise RoutingError(f"{where}: a header of {header_bytes} bytes, expected at most {_MAX_HEADER_BYTES}")
    expected = _PREFIX.size + header_bytes + body_bytes
    if len(data) != expected:
        raise RoutingError(f"{where}: {len(data)} bytes, expected {expected} by its own lengths")
    head, body = data[_PREFIX.size : _PREFIX.size + header_bytes], data[_PREFIX.size + header_bytes :]
    if _checksum(_PREFIX.pack(magic, version, header_bytes, body_bytes, 0), head, body) != checksum:
        raise RoutingError(f"{where}: its checksum does not match: the file was damaged")
    header = _read_header(bytes(head), where)
    _check(header, max_bytes, where)
    return header, body


def _checksum(*parts: bytes | memoryview) -> int:
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value


def _header_bytes(header: Header) -> bytes:
    spans = [[s.start, s.stop, s.weight_version, s.engine, s.kind.value] for s in header.spans]
    fields = {name: getattr(header, name) for name in Header.__slots__} | {"spans": spans}
    return json.dumps(fields, separators=(",", ":")).encode()


def _read_header(data: bytes, where: str) -> Header:
    try:
        fields: dict[str, Any] = json.loads(data)
        spans = tuple(_span(values) for values in fields["spans"])
        layer_ids = fields["layer_ids"]
        tokens, moe_layers, top_k, num_experts, dtype, is_sorted = _typed(
            [fields[name] for name in ("tokens", "moe_layers", "top_k", "num_experts", "dtype", "sorted")],
            *(int, int, int, int, str, bool),
        )
        layers = None if layer_ids is None else tuple(_typed(layer_ids, *[int] * len(layer_ids)))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise RoutingError(f"{where}: not the header of an archive of routes ({error!r:.200})") from None
    return Header(tokens, moe_layers, top_k, num_experts, dtype, is_sorted, layers, spans)


def _span(values: Sequence[Any]) -> Span:
    start, stop, version, engine, kind = _typed(values, int, int, str, str, str)
    return Span(start, stop, version, engine, SpanKind(kind))


def _typed(values: Sequence[Any], *types: type) -> list[Any]:
    """Returns the values, each of exactly its type (bool is not int). Raises TypeError, or ValueError for their
    count."""
    for value, kind in zip(values, types, strict=True):
        if type(value) is not kind:
            raise TypeError(f"expected {kind.__name__}, got {value!r:.60}")
    return list(values)


def _check(header: Header, max_bytes: int, where: str) -> None:
    """Check sizes before anything is allocated; :func:`validate` checks the contents."""
    if not 1 <= header.top_k <= header.num_experts <= 1 << 16 or header.moe_layers < 1 or header.tokens < 0:
        raise RoutingError(
            f"{where}: impossible shape: {header.tokens} tokens, {header.moe_layers} MoE layers, "
            f"top-{header.top_k} of {header.num_experts} experts"
        )
    if header.dtype != _dtype(header.num_experts).str:
        expected = _dtype(header.num_experts).str
        raise RoutingError(
            f"{where}: ids of {header.num_experts} experts are stored as {expected}, not {header.dtype!r:.20}"
        )
    size = header.tokens * header.moe_layers * header.top_k * _dtype(header.num_experts).itemsize
    if size > max_bytes:
        raise RoutingError(f"{where}: claims {size} bytes of expert ids, at most {max_bytes} are allowed")
    ids = header.layer_ids
    if ids is not None and (len(ids) != header.moe_layers or list(ids) != sorted(set(ids)) or ids[0] < 0):
        raise RoutingError(f"{where}: expected {header.moe_layers} ascending layer ids, got {ids!s:.100}")
    at = 0
    for span in header.spans:
        if span.start != at or not at < span.stop <= header.tokens:
            raise RoutingError(f"{where}: spans must cover {header.tokens} rows without gaps, got {span} at row {at}")
        at = span.stop
    if at != header.tokens:
        raise RoutingError(f"{where}: spans cover {at} rows, expected {header.tokens}")


def _dtype(num_experts: int) -> np.dtype[np.unsignedinteger]:
    """Returns the dtype of the ids on disk, always little-endian."""
    return narrowest_dtype(num_experts).newbyteorder("<")


def _present_rows(routing: Routing) -> NDArray[np.unsignedinteger]:
    """``[P, M, K]``; a view if no absent row is between them."""
    rows = np.flatnonzero(routing.present)
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
        return routing.experts[rows[0] : rows[-1] + 1]
    return routing.experts[rows]


def _take_steps(choices_NK: NDArray[np.unsignedinteger], steps_KN: NDArray[np.unsignedinteger]) -> None:
    """Set ``steps_KN`` to the lowest id of each row and the steps to the next ones. Blocks of rows stay in the
    caches."""
    slots: SlotPlanes | None = None
    for start in range(0, len(choices_NK), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        rows_BK = choices_NK[block]
        if slots is None or slots.planes.shape[1] != len(rows_BK):
            slots = SlotPlanes(len(rows_BK), rows_BK.shape[1], rows_BK.dtype)
        slots.split(rows_BK)
        planes_KB = slots.planes
        _sort(planes_KB)
        steps_KN[0, block] = planes_KB[0]
        np.subtract(planes_KB[1:], planes_KB[:-1], out=steps_KN[1:, block])


def _sort(planes_KN: NDArray[np.unsignedinteger]) -> None:
    """Sort each column in place with an odd-even transposition network, much faster than sorting short rows."""
    top_k = len(planes_KN)
    for first in (start for turn in range(top_k) for start in range(turn % 2, top_k - 1, 2)):
        lower = np.minimum(planes_KN[first], planes_KN[first + 1])
        np.maximum(planes_KN[first], planes_KN[first + 1], out=planes_KN[first + 1])
        planes_KN[first] = lower


def _split(planes_KN: NDArray[np.unsignedinteger], dtype: str) -> NDArray[np.uint8]:
    """Returns the bytes of the ids, all low bytes first."""
    width = np.dtype(dtype).itemsize
    return np.ascontiguousarray(planes_KN.astype(dtype, copy=False).view(np.uint8).reshape(-1, width).T)


def _planes(body: memoryview, header: Header, rows: int, where: str) -> NDArray[np.unsignedinteger]:
    """Undo the compression and :func:`_split`: ``[K, N]``, writable."""
    width = np.dtype(header.dtype).itemsize
    size = rows * header.moe_layers * header.top_k * width
    try:
        claimed = zstandard.frame_content_size(body)
        if claimed != size:  # checked first: the library allocates what the frame claims
            raise RoutingError(f"{where}: expected {rows} rows ({size} bytes), the body claims {claimed} bytes")
        raw = zstandard.ZstdDecompressor().decompress(body, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RoutingError(f"{where}: the body does not decompress: {error}") from None
    if len(raw) != size:
        raise RoutingError(f"{where}: expected {rows} rows ({size} bytes), received {len(raw)} bytes")
    split = np.frombuffer(raw, np.uint8).reshape(width, -1)
    ids = np.ascontiguousarray(split.T).view(header.dtype).reshape(header.top_k, -1)
    return ids.astype(narrowest_dtype(header.num_experts), copy=not ids.flags.writeable)
