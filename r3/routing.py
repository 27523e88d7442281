"""Routing tensors: the experts of every token and MoE layer, with provenance.

Row *i* is the routing used when token *i* was the *input* of a forward pass. A finished sequence of S tokens has
S - 1 rows computed; its last row stays absent until a later turn computes it (the last sampled token was never
an input). Only MoE layers have routes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from r3.page_pool import PAGES

_BLOCK_BYTES = 1 << 18  # a block and what is computed of it fit a core's cache


class RoutingError(Exception):
    """Inconsistent routes; the message says where, and the expected and received rows."""


class SpanKind(StrEnum):
    """How the rows of a span were computed."""

    SAMPLED = "sampled"  # computed while the token after it was sampled
    PREFILLED = "prefilled"  # computed by a prefill (prompt and observation tokens)
    RECOMPUTED = (
        "recomputed"  # sampled, then perhaps computed again by a prefill: may differ from the routes of sampling
    )
    MISSING = "missing"  # unknown


@dataclass(frozen=True, slots=True)
class Span:
    """Provenance of rows ``start`` to ``stop`` (exclusive): the engine and the weight version."""

    start: int
    stop: int
    weight_version: str
    engine: str
    kind: SpanKind

    def shifted(self, rows: int) -> Span:
        """Returns the span moved by ``rows``."""
        return Span(self.start + rows, self.stop + rows, self.weight_version, self.engine, self.kind)

    def continues(self, other: Span) -> bool:
        """Whether this span starts where ``other`` stops and has the same provenance."""
        return (
            self.start == other.stop
            and self.weight_version == other.weight_version
            and self.engine == other.engine
            and self.kind is other.kind
        )


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Expert ids of a token sequence.

    ``experts``: ``[tokens, moe_layers, top_k]`` in the narrowest unsigned dtype that holds ``num_experts - 1``.
    ``present``: bool ``[tokens]``; absent rows hold meaningless zeros (there is no sentinel value: 255 is a
    valid id at 256 experts).
    ``spans``: run-length provenance, sorted, without gaps, covering all rows.
    """

    experts: NDArray[np.unsignedinteger]
    present: NDArray[np.bool_]
    spans: tuple[Span, ...]
    num_experts: int

    @property
    def tokens(self) -> int:
        return int(self.experts.shape[0])

    @property
    def moe_layers(self) -> int:
        return int(self.experts.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.experts.shape[2])

    def head(self, rows: int) -> Routing:
        """The first ``rows`` rows."""
        spans = tuple(replace(span, stop=min(span.stop, rows)) for span in self.spans if span.start < rows)
        return Routing(self.experts[:rows], self.present[:rows], spans, self.num_experts)


def narrowest_dtype(num_experts: int) -> np.dtype[np.unsignedinteger]:
    """The narrowest unsigned dtype that holds ``num_experts - 1``. Raises RoutingError beyond 16 bits."""
    if not 1 <= num_experts <= 1 << 16:
        raise RoutingError(f"num_experts must be in [1, 65536], got {num_experts}")
    return np.dtype(np.uint8 if num_experts <= 1 << 8 else np.uint16)


def check_experts(experts: NDArray[np.unsignedinteger], num_experts: int, where: str, first_row: int = 0) -> None:
    """Raises RoutingError unless every id of ``[rows, moe_layers, top_k]`` is in range and distinct within its row.

    Rows are counted from ``first_row`` in the message. Ids that are all 0 are of an engine that captured nothing
    (top_k >= 2).
    """
    if experts.size and not _are_valid(experts.reshape(-1, experts.shape[2]), num_experts):
        raise _invalid(experts, num_experts, where, first_row)


def _are_valid(choices_NK: NDArray[np.unsignedinteger], num_experts: int) -> bool:
    """Whether every id is in range and distinct within its row. Both checks of a block read it from the cache."""
    rows, top_k = choices_NK.shape
    size = min(rows, max(1, _BLOCK_BYTES // (top_k * choices_NK.itemsize)))
    slots = SlotPlanes(size, top_k, choices_NK.dtype)
    for start in range(0, rows, size):
        block = choices_NK[start : start + size]
        if len(block) < size:
            slots = SlotPlanes(len(block), top_k, choices_NK.dtype)
        if int(block.max()) >= num_experts or slots.have_repeats(block):
            return False
    return True


Copy = tuple[NDArray[np.unsignedinteger], NDArray[np.unsignedinteger]]
"""A target, and a source of wider words of which it takes the low halves."""


class SlotPlanes:
    """The slots of blocks ``[rows, top_k]`` as ``planes`` ``[top_k, rows]``, in any order. The memory is written again
    for every block.

    Rows of 2, 4 or 8 bytes are split as words, half by half, which takes less time than a transposition: a cast keeps
    the low halves, and words that are read half a word further on have the high halves there.
    """

    def __init__(self, rows: int, top_k: int, dtype: np.dtype[np.unsignedinteger]) -> None:
        ids, size = dtype.itemsize, rows * top_k * dtype.itemsize
        room = PAGES.empty(2 * size)
        one, other = room[:size], room[size:]
        self._half = top_k * ids // 2 if top_k > 1 and top_k * ids in (2, 4, 8) else 0
        self._first, self._further, half = _low_and_high(one, self._half), list[Copy](), self._half
        while half > ids:
            half //= 2
            self._further += zip(_low_and_high(other, half), _words(one, half), strict=True)
            one, other = other, one
        self.planes = one.view(dtype).reshape(top_k, rows)
        flat, self._differences = one.view(dtype), bytearray(size)
        compared = np.frombuffer(self._differences, dtype)
        self._pairs = [(flat[at:], flat[:-at], compared[:-at]) for at in range(rows, len(flat), rows)]

    def have_repeats(self, choices_NK: NDArray[np.unsignedinteger]) -> bool:
        """Whether a row has an id twice."""
        self.split(choices_NK)
        for one, other, compared in self._pairs:
            np.bitwise_xor(one, other, out=compared)
            if compared.itemsize > 1:
                if not compared.all():
                    return True
            elif self._differences.find(0, 0, len(compared)) >= 0:  # faster than NumPy's all()
                return True
        return False

    def split(self, choices_NK: NDArray[np.unsignedinteger]) -> None:
        """Fill ``planes``."""
        if not self._half or not choices_NK.flags.c_contiguous:
            self.planes[:] = choices_NK.T
            return
        words = _words(choices_NK.reshape(-1).view(np.uint8), self._half)
        for target, source in (*zip(self._first, words, strict=True), *self._further):
            np.copyto(target, source, casting="unsafe")


def _words(data: NDArray[np.uint8], half: int) -> tuple[NDArray[np.unsignedinteger], ...]:
    """Words with the low halves of all words, with the high halves of all but the last, and the last high half."""
    wide = f"<u{2 * half}"
    return data.view(wide), data[half:-half].view(wide), data[-half:].view(f"<u{half}")


def _low_and_high(data: NDArray[np.uint8], half: int) -> tuple[NDArray[np.unsignedinteger], ...]:
    """Where the halves go: the low ones, the high ones but the last, the last."""
    if not half:
        return ()
    halves = data.view(f"<u{half}")
    return halves[: len(halves) // 2], halves[len(halves) // 2 : -1], halves[-1:]


def _invalid(experts: NDArray[np.unsignedinteger], num_experts: int, where: str, first_row: int) -> RoutingError:
    """The error that names the first invalid id."""
    highest = int(experts.max())
    if highest >= num_experts:
        row, layer, slot = np.argwhere(experts == highest)[0].tolist()
        return RoutingError(
            f"{where}: row {first_row + row}, MoE layer {layer}, slot {slot} names expert {highest}, "
            f"expected ids in [0, {num_experts})"
        )
    if not experts.any():
        return RoutingError(f"{where}: every id is 0: this server captures no routes")
    ordered = np.sort(experts, axis=2)
    row, layer, slot = np.argwhere(ordered[..., 1:] == ordered[..., :-1])[0].tolist()
    if not experts[:, layer].any():
        return RoutingError(f"{where}: every id of MoE layer {layer} is 0: this server captures no routes of it")
    return RoutingError(
        f"{where}: row {first_row + row}, MoE layer {layer} names expert {ordered[row, layer, slot]} twice"
    )


def validate(routing: Routing, where: str = "routing") -> None:
    """Raises RoutingError unless shapes, dtype, ids, presence and spans of ``routing`` are consistent."""
    check_form(routing, where)
    if routing.present.all():
        check_experts(routing.experts, routing.num_experts, where)
    else:
        check_experts(routing.experts[routing.present], routing.num_experts, f"{where} (present rows)")


def check_form(routing: Routing, where: str) -> None:
    """:func:`validate` without a look at the ids."""
    experts, present = routing.experts, routing.present
    if experts.ndim != 3:
        raise RoutingError(f"{where}: experts must be [tokens, moe_layers, top_k], got shape {experts.shape}")
    if experts.dtype != narrowest_dtype(routing.num_experts):
        expected = narrowest_dtype(routing.num_experts)
        raise RoutingError(
            f"{where}: experts must be {expected} for {routing.num_experts} experts, got {experts.dtype}"
        )
    if present.dtype != np.bool_ or present.shape != (len(experts),):
        raise RoutingError(f"{where}: present must be bool [{len(experts)}], got {present.dtype} {list(present.shape)}")
    _check_spans(routing, where)


def _check_spans(routing: Routing, where: str) -> None:
    row = 0
    for span in routing.spans:
        if span.start != row or span.stop <= span.start:
            raise RoutingError(f"{where}: spans must follow each other without gaps, expected one at {row}, got {span}")
        row = span.stop
        rows = routing.present[span.start : span.stop]
        if bool(rows.any() if span.kind is SpanKind.MISSING else not rows.all()):
            raise RoutingError(f"{where}: {span} disagrees with the present-row mask")
    if row != routing.tokens:
        raise RoutingError(f"{where}: spans cover {row} rows, expected {routing.tokens}")


def append_span(spans: list[Span], span: Span) -> None:
    """Append ``span``, or merge it into the last one if their provenance is equal. Empty spans are dropped."""
    if span.start == span.stop:
        return
    if spans and span.continues(spans[-1]):
        spans[-1] = Span(spans[-1].start, span.stop, span.weight_version, span.engine, span.kind)
    else:
        spans.append(span)
