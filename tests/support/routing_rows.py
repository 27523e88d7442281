"""Routings cut, joined and put as an engine sends them: what tests check the product's own ways against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pybase64
from numpy.typing import NDArray

from r3.payload import RouteLayout
from r3.routing import Routing, Span, append_span


def slice_rows(routing: Routing, start: int, stop: int) -> Routing:
    """Rows ``start`` to ``stop`` (exclusive) as a routing of their own; a view, not a copy."""
    assert 0 <= start <= stop <= routing.tokens
    spans = tuple(
        replace(span, start=max(span.start, start) - start, stop=min(span.stop, stop) - start)
        for span in routing.spans
        if span.start < stop and span.stop > start
    )
    return replace(routing, experts=routing.experts[start:stop], present=routing.present[start:stop], spans=spans)


def concat(routings: Sequence[Routing]) -> Routing:
    """The routings one after the other; neighbouring spans of the same provenance become one."""
    first = routings[0]
    spans: list[Span] = []
    at = 0
    for routing in routings:
        for span in routing.spans:
            append_span(spans, span.shifted(at))
        at += routing.tokens
    experts = np.concatenate([routing.experts for routing in routings])
    present = np.concatenate([routing.present for routing in routings])
    return Routing(experts, present, tuple(spans), first.num_experts)


def encode_payload(experts_TMK: NDArray[np.unsignedinteger], layout: RouteLayout) -> bytes:
    """The payload the engine would send for ``experts``: the inverse of :func:`decode_payload`."""
    wire_TLK = np.zeros((len(experts_TMK), layout.num_layers, layout.top_k), dtype="<i4")
    wire_TLK[:, list(layout.moe_layer_ids)] = experts_TMK
    return pybase64.b64encode(wire_TLK.tobytes())
