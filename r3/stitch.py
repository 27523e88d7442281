"""Collects the routes of a growing sequence from the rows of each turn.

Every turn requests only the missing rows from the engine (:attr:`RouteStitcher.next_row`), so each token's routes are
sent once, and a sampled token keeps the routes it was sampled with. A worked example, two turns::

    turn 0  prompt 3, sampled 3      sequence  6: rows 0..4 arrive (row 5 needs token 5 as an input)
    turn 1  prompt 8 (2 observed),   sequence 10: rows 5..8 arrive
            sampled 2
    finish  10 tokens                row 9 absent

A turn that was interrupted arrives in parts, one :meth:`RouteStitcher.append` each.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from r3.page_pool import PAGES, PagePool
from r3.routing import Routing, RoutingError, Span, SpanKind, append_span, narrowest_dtype

_RESERVE_BYTES = 1 << 28


class RouteStitcher:
    """Appends each turn's rows to one buffer.

    ``capacity`` rows are reserved at once, up to 256 MiB. Only written pages take memory, so the capacity may be that
    of the longest possible sequence. Beyond the capacity the buffer doubles: appending is linear in the rows overall.
    """

    def __init__(
        self, *, moe_layers: int, top_k: int, num_experts: int, capacity: int = 0, pages: PagePool = PAGES
    ) -> None:
        self._num_experts = num_experts
        self._shape = [moe_layers, top_k, num_experts]
        dtype, row = narrowest_dtype(num_experts), moe_layers * top_k
        capacity = min(capacity, _RESERVE_BYTES // max(1, row * dtype.itemsize))
        reserved = pages.empty(capacity * row * dtype.itemsize) if capacity * row else np.empty(0, np.uint8)
        self._buffer = reserved.view(dtype).reshape(capacity, moe_layers, top_k)
        self._rows = 0
        self._turns = 0
        self._spans: list[Span] = []

    @property
    def next_row(self) -> int:
        """The first missing row: the next turn must request rows from here on."""
        return self._rows

    @property
    def turns(self) -> int:
        """The number of completed turns; a turn in parts counts after its last part."""
        return self._turns

    def append(self, delta: Routing | None, *, sequence: int, start: int | None = None, partial: bool = False) -> None:
        """Append the rows of a turn after which prompt and completion have ``sequence`` tokens together.

        ``delta`` has exactly rows ``[start, sequence - 1)``, all present and of this model's shape. ``start`` None is
        ``next_row``; a smaller start replaces the stored rows from there on. ``partial``: the turn continues with the
        next call. Raises RoutingError, with the turn and the expected and received rows, for anything else, and then
        stores nothing.
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
        """As :meth:`append` for a turn whose rows ``[next_row, sequence - 1)`` are missing: records them as absent.

        ``version`` and ``engine``: the expected source. Raises RoutingError if the sequence is shorter than the stored
        rows.
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
        if received != self._shape:
            shape = tuple(self._shape)
            raise self._error(f"expected (layers, top_k, experts) {shape}, received {tuple(received)}")
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
        """Remove the rows from ``rows`` on, whose tokens were discarded. Raises RoutingError for rows that do not
        exist."""
        if not 0 <= rows <= self._rows:
            raise RoutingError(f"{rows} rows to be kept of {self._rows} held")
        while self._spans and self._spans[-1].stop > rows:
            last = self._spans.pop()
            append_span(self._spans, replace(last, start=min(last.start, rows), stop=rows))
        self._rows = rows

    def finish(self, total_tokens: int, *, unseen: int = 0) -> Routing:
        """Returns the routing of the complete sequence of ``total_tokens``.

        Absent rows: those recorded as missing, the last sampled token's, and those of ``unseen`` tokens after it that
        were never sent to the engine (an observation after the last turn). Raises RoutingError if the numbers do not
        add up. The rows are a view of the stitcher's buffer: do not append afterwards.
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
