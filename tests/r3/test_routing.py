"""Routing's own checks: whatever disagrees within a routing is found and located."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from r3.routing import (
    Routing,
    RoutingError,
    Span,
    SpanKind,
    append_span,
    narrowest_dtype,
    validate,
)


def example() -> Routing:
    experts = np.array([[[0, 1]], [[2, 3]], [[3, 0]], [[0, 0]]], dtype=np.uint8)
    spans = (Span(0, 1, "1", "e", SpanKind.PREFILLED), Span(1, 3, "1", "e", SpanKind.SAMPLED))
    missing = Span(3, 4, "", "", SpanKind.MISSING)
    return Routing(experts, np.array([True, True, True, False]), (*spans, missing), num_experts=4)


def test_a_good_routing_passes() -> None:
    validate(example())


@pytest.mark.parametrize(("experts", "dtype"), [(1, np.uint8), (256, np.uint8), (257, np.uint16), (65536, np.uint16)])
def test_the_narrowest_dtype_holds_the_last_expert(experts: int, dtype: type[np.unsignedinteger]) -> None:
    assert narrowest_dtype(experts) == dtype
    assert np.iinfo(dtype).max >= experts - 1


@pytest.mark.parametrize("experts", [0, -1, 65537])
def test_an_impossible_number_of_experts_is_refused(experts: int) -> None:
    with pytest.raises(RoutingError):
        narrowest_dtype(experts)


def broken(name: str) -> Routing:
    good = example()
    experts, spans = good.experts, good.spans
    match name:
        case "twice":
            return replace(good, experts=np.where(np.arange(4)[:, None, None] == 1, 2, experts).astype(np.uint8))
        case "range":
            return replace(good, num_experts=3)
        case "dtype":
            return replace(good, experts=experts.astype(np.int32))
        case "shape":
            return replace(good, experts=experts[:, 0])
        case "present":
            return replace(good, present=good.present[:3])
        case "gap":
            return replace(good, spans=(spans[0], replace(spans[1], start=2), spans[2]))
        case "overlap":
            return replace(good, spans=(spans[0], replace(spans[1], start=0), spans[2]))
        case "short":
            return replace(good, spans=spans[:2])
        case "claims present":
            return replace(good, spans=(*spans[:2], replace(spans[2], kind=SpanKind.SAMPLED)))
        case "claims missing":
            return replace(good, spans=(replace(spans[0], kind=SpanKind.MISSING), *spans[1:]))
    raise AssertionError(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("twice", "row 1, MoE layer 0 names expert 2 twice"),
        ("range", "names expert 3"),
        ("dtype", "must be uint8"),
        ("shape", "must be"),
        ("present", "present must be bool"),
        ("gap", "expected one at 1"),
        ("overlap", "expected one at 1"),
        ("short", "cover 3 rows, expected 4"),
        ("claims present", "disagrees with the present-row mask"),
        ("claims missing", "disagrees with the present-row mask"),
    ],
)
def test_what_disagrees_is_named(name: str, message: str) -> None:
    with pytest.raises(RoutingError, match=f"here.*{message}"):
        validate(broken(name), "here")


def test_equal_neighbours_merge_and_empty_spans_vanish() -> None:
    spans: list[Span] = []
    for start, stop, version in [(0, 2, "a"), (2, 2, "b"), (2, 5, "a"), (5, 6, "b")]:
        append_span(spans, Span(start, stop, version, "e", SpanKind.SAMPLED))
    assert spans == [Span(0, 5, "a", "e", SpanKind.SAMPLED), Span(5, 6, "b", "e", SpanKind.SAMPLED)]
