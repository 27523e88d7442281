"""Decodes the engine's route payload to an expert tensor.

SGLang (0.5.23, ``sglang/srt/state_capturer/routed_experts.py``) sends base64 of little-endian int32
``[rows, num_hidden_layers, top_k]``; dense layers are zeros, which look like expert 0, and are removed. Servers that
agent-rl launches send the ids as raw bytes instead (``agent_rl/engine/server/raw_routes.py``).

Axes: T rows (tokens), L all layers, M MoE layers, K experts a token.
"""

from __future__ import annotations

import binascii
from dataclasses import dataclass

import numpy as np
import pybase64
from numpy.typing import NDArray

from r3.routing import RoutingError, check_experts, narrowest_dtype

_KEY = b'"routed_experts":"'
_MAGIC = b"\x93routes"
_HEAD = len(_MAGIC) + 9
_BLOCK_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class RouteLayout:
    """The shape of a model's routes in the engine's response.

    ``moe_layer_ids`` are the 0-based ids, ascending, of the layers that have a router, out of ``num_layers``.
    """

    num_layers: int
    moe_layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        ids = self.moe_layer_ids
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= self.num_layers:
            raise RoutingError(f"MoE layer ids must ascend within [0, {self.num_layers}) and not be empty, got {ids}")
        if not 1 <= self.top_k <= self.num_experts:
            raise RoutingError(f"top_k must be in [1, {self.num_experts}], got {self.top_k}")

    @property
    def wire_bytes_per_row(self) -> int:
        """Bytes of one row as int32, before base64."""
        return 4 * self.num_layers * self.top_k


@dataclass(frozen=True, slots=True)
class RawRoutes:
    """``ids`` of ``size`` bytes each, little-endian."""

    ids: memoryview
    size: int


def decode_payload(
    payload: bytes | memoryview | RawRoutes, layout: RouteLayout, rows: int, where: str = "routes"
) -> NDArray[np.unsignedinteger]:
    """Decode ``payload`` (base64 or raw) to experts ``[T=rows, M, K]`` in the narrowest dtype. Raw ids of that dtype
    are not copied if all layers are MoE layers: the result is a read-only view of the response.

    Raises RoutingError, with ``where`` in front of its message, if the payload is not base64, has another number of
    rows, or contains an expert out of range or twice in a row.
    """
    if isinstance(payload, RawRoutes):
        _check_length(len(payload.ids), layout, rows, where, id_bytes=payload.size)
        wire_TLK = np.frombuffer(payload.ids, f"<u{payload.size}").reshape(rows, layout.num_layers, layout.top_k)
        return narrow(_moe_layers(wire_TLK, layout), layout.num_experts, where)
    payload = memoryview(payload)
    if len(payload) % 4:
        raise RoutingError(f"{where}: the payload is not base64: {len(payload)} characters")
    _check_length(len(payload) * 3 // 4 - bytes(payload[-2:]).count(b"="), layout, rows, where)
    shape = (rows, len(layout.moe_layer_ids), layout.top_k)
    experts_TMK = np.empty(shape, dtype=narrowest_dtype(layout.num_experts))
    # Blocks fit a core's cache; base64 can be split only at multiples of three bytes.
    block = 3 * max(1, _BLOCK_BYTES // (3 * layout.wire_bytes_per_row))
    for start in range(0, rows, block):
        stop = min(start + block, rows)
        wire_TLK = _decode_block(payload, layout, start, stop, where)
        experts_TMK[start:stop] = narrow(_moe_layers(wire_TLK, layout), layout.num_experts, where, start)
    return experts_TMK


def _check_length(size: int, layout: RouteLayout, rows: int, where: str, id_bytes: int = 4) -> None:
    per_row = layout.wire_bytes_per_row * id_bytes // 4
    if size != rows * per_row:
        received = f"{size // per_row} rows" if size % per_row == 0 else f"{size / per_row:.2f} rows"
        raise RoutingError(
            f"{where}: expected {rows} rows of {layout.num_layers} layers x top-{layout.top_k} "
            f"({rows * per_row} bytes), received {received} ({size} bytes)"
        )


def _decode_block(payload: memoryview, layout: RouteLayout, start: int, stop: int, where: str) -> NDArray[np.uint32]:
    """Returns rows ``start`` to ``stop`` of the payload; ``start`` rows are a multiple of three bytes."""
    first, last = start * layout.wire_bytes_per_row, stop * layout.wire_bytes_per_row
    try:
        raw = pybase64.b64decode(payload[first // 3 * 4 : (last + 2) // 3 * 4], validate=True)
    except (binascii.Error, ValueError) as error:
        raise RoutingError(f"{where}: the payload is not base64: {error}") from None
    if len(raw) != last - first:
        raise RoutingError(f"{where}: the payload is not base64: padding before its end")
    return np.frombuffer(raw, dtype="<u4").reshape(stop - start, layout.num_layers, layout.top_k)


def _moe_layers(wire_TLK: NDArray[np.unsignedinteger], layout: RouteLayout) -> NDArray[np.unsignedinteger]:
    if len(layout.moe_layer_ids) == layout.num_layers:
        return wire_TLK
    return wire_TLK[:, list(layout.moe_layer_ids)]


def narrow(
    experts_TMK: NDArray[np.integer], num_experts: int, where: str, first_row: int = 0
) -> NDArray[np.unsignedinteger]:
    """Check the ids and return them in the narrowest dtype. Negative ids are out of range.

    Raises RoutingError, rows counted from ``first_row``.
    """
    narrowest = narrowest_dtype(num_experts)
    if experts_TMK.dtype != narrowest:
        _check_range(experts_TMK, num_experts, where, first_row)
    experts = experts_TMK.astype(narrowest, copy=False)
    check_experts(experts, num_experts, where, first_row)
    return experts


def _check_range(experts_TMK: NDArray[np.integer], num_experts: int, where: str, first_row: int) -> None:
    lowest, highest = (int(experts_TMK.min()), int(experts_TMK.max())) if experts_TMK.size else (0, 0)
    if lowest < 0 or highest >= num_experts:
        bad = experts_TMK.astype(np.uint32).astype(np.int32)
        row, layer, slot = np.argwhere((bad < 0) | (bad >= num_experts))[0].tolist()
        expert = int(bad[row, layer, slot])
        raise RoutingError(
            f"{where}: row {first_row + row}, MoE layer {layer}, slot {slot} names expert {expert}, "
            f"expected ids in [0, {num_experts})"
        )


def extract_payload(body: bytes) -> tuple[memoryview, bytes] | None:
    """Extract the base64 payload from a response body without parsing JSON: ``(payload, body without it)``.

    The routes are nearly all of the body, and a JSON parser would scan, copy and validate them. Inside a JSON string
    the key's quotes are escaped, so text cannot contain the key. Returns None unless the key occurs exactly once with a
    string value without escapes; the caller then parses the whole body. The payload is a view, not a copy.
    """
    at = body.find(_KEY)
    if at < 0:
        return None
    start = at + len(_KEY)
    stop = body.find(b'"', start)
    # A server may escape base64's slashes. A second key can only follow the payload, which contains no quote;
    # searching the payload would cost more than decoding it.
    if stop < 0 or body.find(b"\\", start, stop) >= 0 or body.find(_KEY, stop) >= 0:
        return None
    return memoryview(body)[start:stop], body[:start] + body[stop:]


def split_raw(body: bytes) -> tuple[RawRoutes, memoryview] | None:
    """The ids of a response with raw routes, and the JSON after them; None for another response. Raises RoutingError
    for one that is cut."""
    if not body.startswith(_MAGIC):
        return None
    size, length = body[len(_MAGIC)], int.from_bytes(body[len(_MAGIC) + 1 : _HEAD], "little")
    if size not in (1, 2, 4) or length > len(body) - _HEAD:
        raise RoutingError(f"raw routes of {length} bytes with {size} per id, in a response of {len(body)} bytes")
    whole = memoryview(body)
    return RawRoutes(whole[_HEAD : _HEAD + length], size), whole[_HEAD + length :]
