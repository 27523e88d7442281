"""Slices of routings, and routes in the form that an engine sends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pybase64
from numpy.typing import NDArray

from r3.payload import RouteLayout
from r3.routing import Routing


def slice_rows(routing: Routing, start: int, stop: int) -> Routing:
    """Rows ``start`` to ``stop`` (exclusive) as a routing of their own; a view, not a copy."""
    assert 0 <= start <= stop <= routing.tokens
    spans = tuple(
        replace(span, start=max(span.start, start) - start, stop=min(span.stop, stop) - start)
        for span in routing.spans
        if span.start < stop and span.stop > start
    )
    return replace(routing, experts=routing.experts[start:stop], present=routing.present[start:stop], spans=spans)


def encode_payload(experts_TMK: NDArray[np.unsignedinteger], layout: RouteLayout) -> bytes:
    """The payload that the engine sends for ``experts``. Dense layers hold garbage."""
    wire_TLK = np.full((len(experts_TMK), layout.num_layers, layout.top_k), -7, dtype="<i4")
    wire_TLK[:, list(layout.moe_layer_ids)] = experts_TMK
    return pybase64.b64encode(wire_TLK.tobytes())
