"""Routes of a growing sequence, put together from what each turn adds.

Every turn asks the engine only for the rows not yet held (:attr:`RouteStitcher.next_row`), so each token's routes cross
the wire once and those kept for a sampled token are those it was sampled with. A worked example, two turns::

    turn 0  prompt 3, sampled 3      sequence  6: rows 0..4 arrive (row 5 needs token 5 as an input)
    turn 1  prompt 8 (2 observed),   sequence 10: rows 5..8 arrive
            sampled 2
    finish  10 tokens                row 9 absent

A turn that was interrupted arrives in parts, one :meth:`RouteStitcher.append` each.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from r3.routing import Routing, RoutingError, Span, SpanKind, append_span, narrowest_dtype

_RESERVE_BYTES = 1 << 28


class RouteStitcher:
    """Appends each turn's rows to one buffer.

    ``capacity`` rows are set aside at once, within 256 MiB. The system backs only pages that were written to, so the
    capacity may be the longest sequence there can be: a short one does not pay for it, also once it is finished, and a
    long one is written once. Past the capacity the buffer grows geometrically: appending stays linear in the rows
    overall.
    """

    def __init__(self, *, moe_layers: int, top_k: int, num_experts: int, capacity: int = 0) -> None:
        self._num_experts = num_experts
        self._wanted = [moe_layers, top_k, num_experts]
        dtype = narrowest_dtype(num_experts)
        capacity = min(capacity, _RESERVE_BYTES // max(1, moe_layers * top_k * dtype.itemsize))
        self._buffer = _reserved((capacity, moe_layers, top_k), dtype)
        self._rows = 0
        self._turns = 0
        self._spans: list[Span] = []

    @property
    def next_row(self) -> int:
        """The first row not yet held: what the next turn must ask for."""
        return self._rows

    @property
    def turns(self) -> int:
        """Turns taken; a turn counts once its last part is in."""
        return self._turns

    def append(self, delta: Routing | None, *, sequence: int, start: int | None = None, partial: bool = False) -> None:
        """Take the rows of a turn after which prompt and completion together are ``sequence`` tokens long.

        ``delta`` holds exactly rows ``[start, sequence - 1)``, all present and of this model's shape. ``start`` is
        ``next_row`` where it is not given; below it the rows already held from there on are replaced. ``partial`` says
        that the turn goes on with the next call. Raises RoutingError, naming the turn, the expected and the received
        rows, for anything else. Nothing is kept of a refused turn.
        """
        start = self._rows if start is None else start
        expected = self._expected(sequence, start)
        if delta is None:
            raise self._error(f"expected {expected} rows of routes [{start}, {sequence - 1}), received none")
        self._check(delta, expected, start)
        if start < self._rows:
            self.truncate(start)
        self._reserve(sequence - 1)
        self._buffer[start : sequence - 1] = delta.experts
        for span in delta.spans:
            append_span(self._spans, span.shifted(start))
        self._rows = sequence - 1
        self._turns += not partial

    def append_missing(self, *, sequence: int, version: str, engine: str, partial: bool = False) -> None:
        """As :meth:`append` for a turn whose rows ``[next_row, sequence - 1)`` never came: they are recorded as absent.

        ``version`` and ``engine`` say who should have sent them. Raises RoutingError for a sequence shorter than held.
        """
        self._expected(sequence, self._rows)
        self._reserve(sequence - 1)
        self._buffer[self._rows : sequence - 1] = 0
        append_span(self._spans, Span(self._rows, sequence - 1, version, engine, SpanKind.MISSING))
        self._rows = sequence - 1
        self._turns += not partial

    def _expected(self, sequence: int, start: int) -> int:
        if not 0 <= start <= self._rows:
            raise self._error(f"rows come from row {start} on, expected a start in [0, {self._rows}]")
        if sequence - 1 < self._rows:
            raise self._error(
                f"a sequence of {sequence} tokens has {sequence - 1} rows, and {self._rows} are held already"
            )
        return sequence - 1 - start

    def _check(self, delta: Routing, expected: int, start: int) -> None:
        rows, *received = (*delta.experts.shape, delta.num_experts)
        if rows != expected:
            raise self._error(f"expected {expected} rows [{start}, {start + expected}), received {rows}")
        if received != self._wanted:
            wanted = tuple(self._wanted)
            raise self._error(f"expected (layers, top_k, experts) {wanted}, received {tuple(received)}")
        if np.count_nonzero(delta.present) != expected:
            absent = int(np.argmin(delta.present)) + start
            raise self._error(f"row {absent} is absent, expected all {expected} rows to be present")
        if delta.experts.dtype != self._buffer.dtype:
            raise self._error(f"expected ids as {self._buffer.dtype}, received {delta.experts.dtype}")
        covered = sum([span.stop - span.start for span in delta.spans])
        if covered != expected:
            raise self._error(f"provenance covers {covered} rows, expected {expected}")

    def _error(self, reason: str) -> RoutingError:
        return RoutingError(f"turn {self._turns}: {reason}")

    def _reserve(self, rows: int) -> None:
        capacity = len(self._buffer)
        if rows <= capacity:
            return
        grown = np.empty((max(rows, 2 * capacity), *self._buffer.shape[1:]), dtype=self._buffer.dtype)
        grown[: self._rows] = self._buffer[: self._rows]
        self._buffer = grown

    def truncate(self, rows: int) -> None:
        """Forget the rows from ``rows`` on: their tokens were taken back. Raises RoutingError for rows not held."""
        if not 0 <= rows <= self._rows:
            raise RoutingError(f"{rows} rows to be kept of {self._rows} held")
        while self._spans and self._spans[-1].stop > rows:
            last = self._spans.pop()
            append_span(self._spans, replace(last, start=min(last.start, rows), stop=rows))
        self._rows = rows

    def finish(self, total_tokens: int, *, unseen: int = 0) -> Routing:
        """The routing of the whole sequence of ``total_tokens``.

        Absent are rows recorded as missing, the last sampled token's row and those of ``unseen`` tokens after it that
        the engine was never shown (an observation appended after the last turn). Raises RoutingError if that does not
        add up. The rows are a view of the stitcher's own: don't append afterwards.
        """
        if total_tokens - self._rows != 1 + unseen:
            raise RoutingError(
                f"end of sequence: {total_tokens} tokens, {unseen} of them never shown to the engine, need "
                f"{total_tokens - 1 - unseen} rows; {self._rows} were received in {self._turns} turns"
            )
        self._reserve(total_tokens)
        experts = self._buffer[:total_tokens]
        experts[self._rows :] = 0
        spans = list(self._spans)
        append_span(spans, Span(self._rows, total_tokens, "", "", SpanKind.MISSING))
        present = np.ones(total_tokens, dtype=np.bool_)
        for span in spans:
            if span.kind is SpanKind.MISSING:
                present[span.start : span.stop] = False
        return Routing(experts, present, tuple(spans), self._num_experts)


def _reserved(shape: tuple[int, int, int], dtype: np.dtype[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """An array whose pages are backed one by one as they are written. Of one of numpy's own the first row may take a
    huge page, 2 MiB: more than all routes of a sequence of a small model."""
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype).reshape(shape)
