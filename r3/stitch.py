"""Routes of a growing sequence, put together from what each turn adds.

Every turn asks the engine only for the rows not yet held (:attr:`RouteStitcher.next_row`), so each token's routes cross
the wire once and those kept for a sampled token are those it was sampled with. A worked example, two turns::

    turn 0  prompt 3, sampled 3      sequence  6: rows 0..4 arrive (row 5 needs token 5 as an input)
    turn 1  prompt 8 (2 observed),   sequence 10: rows 5..8 arrive
            sampled 2
    finish  10 tokens                row 9 absent
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from r3.routing import Routing, RoutingError, Span, SpanKind, append_span, narrowest_dtype


class RouteStitcher:
    """Appends each turn's rows to one buffer. Grows geometrically: appending is linear in the rows overall."""

    def __init__(self, *, moe_layers: int, top_k: int, num_experts: int, capacity: int = 0) -> None:
        self._num_experts = num_experts
        self._buffer: NDArray[np.unsignedinteger] = np.empty(
            (capacity, moe_layers, top_k), dtype=narrowest_dtype(num_experts)
        )
        self._rows = 0
        self._turns = 0
        self._spans: list[Span] = []

    @property
    def next_row(self) -> int:
        """The first row not yet held: what the next turn must ask for."""
        return self._rows

    @property
    def turns(self) -> int:
        return self._turns

    def append(self, delta: Routing | None, *, sequence: int) -> None:
        """Take the rows of a turn after which prompt and completion together are ``sequence`` tokens long.

        Raises RoutingError, naming the turn, unless ``delta`` holds exactly rows ``[next_row, sequence - 1)``, all
        present and of this model's shape. Nothing is kept of a refused turn.
        """
        expected = sequence - 1 - self._rows
        if delta is None:
            raise RoutingError(f"turn {self._turns}: expected {expected} rows of routes, received none")
        self._check(delta, expected, sequence)
        self._reserve(self._rows + delta.tokens)
        self._buffer[self._rows : self._rows + delta.tokens] = delta.experts
        for span in delta.spans:
            append_span(self._spans, replace(span, start=span.start + self._rows, stop=span.stop + self._rows))
        self._rows += delta.tokens
        self._turns += 1

    def _check(self, delta: Routing, expected: int, sequence: int) -> None:
        turn = f"turn {self._turns}"
        if delta.tokens != expected:
            raise RoutingError(
                f"{turn}: expected {expected} rows [{self._rows}, {sequence - 1}), received {delta.tokens}"
            )
        shape = (*self._buffer.shape[1:], self._num_experts)
        received = (delta.moe_layers, delta.top_k, delta.num_experts)
        if received != shape:
            raise RoutingError(f"{turn}: expected (layers, top_k, experts) {shape}, received {received}")
        if not delta.present.all():
            absent = int(np.flatnonzero(~delta.present)[0]) + self._rows
            raise RoutingError(f"{turn}: row {absent} is absent, expected all {expected} rows to be present")
        covered = sum(span.stop - span.start for span in delta.spans)
        if covered != expected:
            raise RoutingError(f"{turn}: provenance covers {covered} rows, expected {expected}")

    def _reserve(self, rows: int) -> None:
        capacity = len(self._buffer)
        if rows <= capacity:
            return
        grown = np.empty((max(rows, 2 * capacity), *self._buffer.shape[1:]), dtype=self._buffer.dtype)
        grown[: self._rows] = self._buffer[: self._rows]
        self._buffer = grown

    def finish(self, total_tokens: int, *, unseen: int = 0) -> Routing:
        """The routing of the whole sequence of ``total_tokens``.

        Absent are the last sampled token's row and those of ``unseen`` tokens after it that the engine was never shown
        (an observation appended after the last turn). Raises RoutingError if that does not add up. The rows are the
        stitcher's own buffer where it is full, a right-sized copy where not; don't append afterwards.
        """
        if total_tokens - self._rows != 1 + unseen:
            raise RoutingError(
                f"end of sequence: {total_tokens} tokens, {unseen} of them never shown to the engine, need "
                f"{total_tokens - 1 - unseen} rows; {self._rows} were received in {self._turns} turns"
            )
        experts = self._sized(total_tokens)
        experts[self._rows :] = 0
        present = np.zeros(total_tokens, dtype=np.bool_)
        present[: self._rows] = True
        spans = list(self._spans)
        append_span(spans, Span(self._rows, total_tokens, "", "", SpanKind.MISSING))
        return Routing(experts, present, tuple(spans), self._num_experts)

    def _sized(self, rows: int) -> NDArray[np.unsignedinteger]:
        if len(self._buffer) == rows:
            return self._buffer
        sized = np.empty((rows, *self._buffer.shape[1:]), dtype=self._buffer.dtype)
        sized[: self._rows] = self._buffer[: self._rows]
        return sized
