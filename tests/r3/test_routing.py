"""Validation of a routing: an inconsistency is located."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from r3.routing import Routing, RoutingError, Span, SpanKind, append_span, narrowest_dtype, validate


def example() -> Routing:
    experts = np.array([[[0, 1]], [[2, 3]], [[3, 0]], [[0, 0]]], dtype=np.uint8)
    spans = (Span(0, 1, "1", "e", SpanKind.PREFILLED), Span(1, 3, "1", "e", SpanKind.SAMPLED))
    missing = Span(3, 4, "", "", SpanKind.MISSING)
    return Routing(experts, np.array([True, True, True, False]), (*spans, missing), num_experts=4)


@pytest.mark.parametrize(("experts", "dtype"), [(1, np.uint8), (256, np.uint8), (257, np.uint16), (65536, np.uint16)])
def test_the_narrowest_dtype_holds_the_last_expert(experts: int, dtype: type[np.unsignedinteger]) -> None:
    assert narrowest_dtype(experts) == dtype
    assert np.iinfo(dtype).max >= experts - 1


@pytest.mark.parametrize("experts", [0, -1, 65537])
def test_an_impossible_number_of_experts_is_refused(experts: int) -> None:
    with pytest.raises(RoutingError):
        narrowest_dtype(experts)


EXPERTS, SPANS = example().experts, example().spans
TWICE = np.array([[[0, 1]], [[2, 2]], [[3, 0]], [[0, 0]]], np.uint8)


def with_spans(*spans: Span) -> Routing:
    return replace(example(), spans=spans)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (replace(example(), experts=TWICE), "row 1, MoE layer 0 names expert 2 twice"),
        (replace(example(), experts=EXPERTS.astype(np.int32)), "must be uint8"),
        (replace(example(), num_experts=3), "names expert 3"),
        (replace(example(), experts=EXPERTS[:, 0]), "must be"),
        (replace(example(), present=np.ones(3, bool)), "present must be bool"),
        (with_spans(SPANS[0], replace(SPANS[1], start=2), SPANS[2]), "expected one at 1"),
        (with_spans(SPANS[0], replace(SPANS[1], start=0), SPANS[2]), "expected one at 1"),
        (with_spans(*SPANS[:2]), "cover 3 rows, expected 4"),
        (with_spans(*SPANS[:2], replace(SPANS[2], kind=SpanKind.SAMPLED)), "disagrees with the present-row mask"),
        (with_spans(replace(SPANS[0], kind=SpanKind.MISSING), *SPANS[1:]), "disagrees with the present-row mask"),
    ],
    ids=["twice", "dtype", "range", "shape", "present", "gap", "overlap", "short", "claims present", "claims missing"],
)
def test_an_inconsistent_routing_is_refused(broken: Routing, message: str) -> None:
    validate(example())
    with pytest.raises(RoutingError, match=f"here.*{message}"):
        validate(broken, "here")


def test_equal_neighbours_merge_and_empty_spans_vanish() -> None:
    spans: list[Span] = []
    for start, stop, version in [(0, 2, "a"), (2, 2, "b"), (2, 5, "a"), (5, 6, "b")]:
        append_span(spans, Span(start, stop, version, "e", SpanKind.SAMPLED))
    assert spans == [Span(0, 5, "a", "e", SpanKind.SAMPLED), Span(5, 6, "b", "e", SpanKind.SAMPLED)]
