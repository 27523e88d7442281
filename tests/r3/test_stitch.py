"""Stitching turns. Every row differs from all others, so that an off-by-one shows."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from r3.page_pool import PagePool
from r3.routing import Routing, RoutingError, Span, SpanKind, validate
from r3.stitch import RouteStitcher

LAYERS, TOP_K, EXPERTS = 3, 2, 256


def rows(start: int, stop: int) -> NDArray[np.uint8]:
    """Row i spells i in base 256 over the layers; its second expert differs from its first."""
    index = np.arange(start, stop)[:, None] >> np.array([0, 8, 16])[None, :]
    first = (index & 255).astype(np.uint8)
    return np.stack([first, first + np.uint8(1)], axis=2)


def delta(start: int, stop: int, version: str = "v", sampled_from: int | None = None) -> Routing:
    cut = min(max((stop if sampled_from is None else sampled_from) - start, 0), stop - start)
    spans = [Span(0, cut, version, "e", SpanKind.PREFILLED), Span(cut, stop - start, version, "e", SpanKind.SAMPLED)]
    kept = tuple(span for span in spans if span.start < span.stop)
    return Routing(rows(start, stop), np.ones(stop - start, dtype=np.bool_), kept, EXPERTS)


def stitcher(capacity: int = 0) -> RouteStitcher:
    return RouteStitcher(moe_layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS, capacity=capacity)


def test_turns_stitch_to_the_rows_of_the_whole_sequence() -> None:
    stitched = stitcher()
    assert stitched.next_row == 0
    stitched.append(delta(0, 5, "a", 2), sequence=6)
    assert stitched.next_row == 5
    stitched.append(delta(5, 9, "b", 7), sequence=10)
    routing = stitched.finish(10)
    np.testing.assert_array_equal(routing.experts[:9], rows(0, 9))
    spans = [Span(0, 2, "a", "e", SpanKind.PREFILLED), Span(2, 5, "a", "e", SpanKind.SAMPLED)]
    spans += [Span(5, 7, "b", "e", SpanKind.PREFILLED), Span(7, 9, "b", "e", SpanKind.SAMPLED)]
    assert routing.spans == (*spans, Span(9, 10, "", "", SpanKind.MISSING))


def test_tokens_the_engine_never_saw_must_be_declared() -> None:
    stitched = stitcher()
    stitched.append(delta(0, 5), sequence=6)
    with pytest.raises(RoutingError, match="9 tokens, 0 of them never shown to the engine, need 8 rows; 5 were"):
        stitched.finish(9)
    routing = stitched.finish(9, unseen=3)
    validate(routing)
    assert routing.present.tolist() == [True] * 5 + [False] * 4
    assert not routing.experts[5:].any()
    assert not stitcher().finish(4, unseen=3).present.any(), "nothing was generated"


def of_another_model(layers: int, top_k: int, experts: int) -> Routing:
    return replace(delta(0, 5), experts=delta(0, 5).experts[:, :layers, :top_k], num_experts=experts)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (None, r"turn 0: expected 5 rows of routes \[0, 5\), received none"),
        (replace(delta(0, 5), present=np.arange(5) != 3), "turn 0: row 3 is absent"),
        (replace(delta(0, 5), spans=delta(0, 4).spans), "provenance covers 4 rows, expected 5"),
        (of_another_model(2, 2, 256), r"turn 0: expected \(layers, top_k, experts\)"),
        (of_another_model(3, 1, 256), r"turn 0: expected \(layers, top_k, experts\)"),
        (of_another_model(3, 2, 255), r"turn 0: expected \(layers, top_k, experts\)"),
        (replace(delta(0, 5), experts=rows(0, 5).astype(np.uint16)), "turn 0: expected ids as uint8, received uint16"),
    ],
    ids=["none", "absent row", "provenance", "layers", "top_k", "experts", "width"],
)
def test_invalid_routes_are_refused(part: Routing | None, message: str) -> None:
    with pytest.raises(RoutingError, match=message):
        stitcher().append(part, sequence=6)


def test_appending_is_linear() -> None:
    """The growing buffer is copied few times."""
    stitched, copied = stitcher(), 0
    for length in range(2, 4000):
        before = stitched._buffer
        stitched.append(delta(length - 2, length - 1), sequence=length)
        copied += 0 if stitched._buffer is before else len(before)
    assert copied < 2 * 4000


def took(row: int, take: int) -> NDArray[np.uint8]:
    """``rows`` of one row, which also says at which step it came."""
    experts = rows(row, row + 1)
    experts[0, 2] = (take, take + 1)
    return experts


def delta_of(start: int, stop: int, take: int) -> Routing:
    experts = np.concatenate([np.empty((0, LAYERS, TOP_K), np.uint8), *(took(row, take) for row in range(start, stop))])
    span = (Span(0, stop - start, f"v{take}", "e", SpanKind.SAMPLED),) if stop > start else ()
    return Routing(experts, np.ones(stop - start, np.bool_), span, EXPERTS)


Held = list[tuple[int, int] | None]
"""A model of a stitcher: of each row, (row, the step it came at), or None where it never came."""


def check_finished(stitched: RouteStitcher, held: Held) -> None:
    assert stitched.next_row == len(held)
    routing = stitched.finish(len(held) + 1)
    validate(routing)
    assert routing.present.tolist() == [row is not None for row in held] + [False]
    versions = [span.weight_version for span in routing.spans for _ in range(span.start, span.stop)]
    for at, row in enumerate(held):
        if row is not None:
            np.testing.assert_array_equal(routing.experts[at], took(*row)[0])
            assert versions[at] == f"v{row[1]}"
        else:
            assert not routing.experts[at].any()
            assert versions[at] == "lost"


steps = st.lists(
    st.tuples(
        st.sampled_from(["append", "partial", "again", "missing", "truncate"]),
        st.integers(0, 9),  # rows that come
        st.integers(0, 60),  # where rows are replaced or cut
    ),
    max_size=14,
)


@given(steps=steps, capacity=st.sampled_from([0, 7, 1000]))
def test_any_history_holds_the_rows_that_were_given_last(steps: list[tuple[str, int, int]], capacity: int) -> None:
    stitched, held = stitcher(capacity), Held()
    for take, (what, count, where) in enumerate(steps):
        at, turns = where % (len(held) + 1), stitched.turns
        if what in ("append", "partial"):
            new = delta_of(len(held), len(held) + count, take)
            stitched.append(new, sequence=len(held) + count + 1, partial=what == "partial")
            held += [(row, take) for row in range(len(held), len(held) + count)]
            assert stitched.turns == turns + (what == "append")
        elif what == "again":
            stop = len(held) + count
            stitched.append(delta_of(at, stop, take), sequence=stop + 1, start=at)
            held[at:] = [(row, take) for row in range(at, stop)]
        elif what == "missing":
            stitched.append_missing(sequence=len(held) + count + 1, version="lost", engine="e")
            held += [None] * count
        else:
            stitched.truncate(at)
            del held[at:]
    check_finished(stitched, held)


@given(held=st.integers(0, 20), shift=st.integers(-20, 20).filter(bool), new=st.integers(0, 20))
def test_rows_that_start_elsewhere_are_named(held: int, shift: int, new: int) -> None:
    """The engine starts from another row than asked, up to the right end: too many or too few rows."""
    stitched = stitcher()
    stitched.append(delta(0, held), sequence=held + 1)
    start, stop = held + shift, held + new
    if not 0 <= start <= stop:
        return
    with pytest.raises(RoutingError, match=rf"turn 1: expected {new} rows \[{held}, {stop}\), received {new - shift}$"):
        stitched.append(delta(start, stop), sequence=stop + 1)
    assert (stitched.next_row, stitched.turns) == (held, 1)
    np.testing.assert_array_equal(stitched.finish(held + 1).experts[:held], rows(0, held))


def test_replaced_rows_start_and_end_within_those_held() -> None:
    stitched = stitcher()
    stitched.append(delta(0, 5), sequence=6)
    with pytest.raises(RoutingError, match=r"turn 1: rows come from row 6 on, expected a start in \[0, 5\]"):
        stitched.append(delta(6, 9), sequence=10, start=6)
    with pytest.raises(RoutingError, match=r"expected a start in \[0, 5\]"):
        stitched.append(delta(0, 9), sequence=10, start=-1)
    for shorter in (lambda: stitched.append(delta(0, 4), sequence=5, start=0), lambda: missing(stitched, 5)):
        with pytest.raises(RoutingError, match="turn 1: a sequence of 5 tokens has 4 rows, and 5 are held already"):
            shorter()
    assert stitched.next_row == 5


def missing(stitched: RouteStitcher, sequence: int) -> None:
    stitched.append_missing(sequence=sequence, version="v", engine="e")


@pytest.mark.parametrize("rows_kept", [-1, 6])
def test_only_rows_that_are_held_can_be_kept(rows_kept: int) -> None:
    stitched = stitcher()
    stitched.append(delta(0, 5), sequence=6)
    with pytest.raises(RoutingError, match=f"{rows_kept} rows to be kept of 5 held"):
        stitched.truncate(rows_kept)
    assert stitched.next_row == 5


def test_reserved_capacity_takes_no_memory() -> None:
    """Few pages are backed of 64 short sequences, each of which has 256 MiB set aside, also once they are finished."""
    stitchers, before = [stitcher(capacity=1 << 40) for _ in range(64)], resident()
    for stitched in stitchers:
        stitched.append(delta(0, 5), sequence=6)
    finished = [stitched.finish(6) for stitched in stitchers]
    assert all(routing.experts.shape[0] == 6 for routing in finished)
    assert resident() - before < 64 * (1 << 16)


def test_memory_is_written_again_only_when_nobody_refers_to_it() -> None:
    pages, shape = PagePool(), {"moe_layers": LAYERS, "top_k": TOP_K, "num_experts": EXPERTS}

    def finished(rows: int) -> Routing:
        stitched = RouteStitcher(**shape, capacity=10, pages=pages)
        stitched.append(delta(0, rows), sequence=rows + 1)
        return stitched.finish(rows + 1)

    first, second = finished(9), finished(3)
    assert not np.shares_memory(first.experts, second.experts)
    kept, place = first.experts[2:4], first.experts.ctypes.data
    del first
    third = finished(5)
    assert not np.shares_memory(kept, third.experts)
    del kept
    fourth = finished(4)
    assert fourth.experts.ctypes.data == place
    for routing, rows in ((second, 3), (third, 5), (fourth, 4)):
        np.testing.assert_array_equal(routing.experts[:rows], delta(0, rows).experts)
        assert not routing.experts[rows:].any()


def test_the_kernel_may_take_memory_that_came_back() -> None:
    pages = PagePool(kept=1 << 24)
    held = [pages.empty(1 << 24), pages.empty(1 << 24)]
    for each in held:
        each[:] = 1
    del each
    before = lazily_freed()
    held.pop()
    assert lazily_freed() - before < 1 << 23, "the last one is written again first"
    held.pop()
    assert lazily_freed() - before >= 1 << 23
    assert len(pages.empty(3)) == 3


def lazily_freed() -> int:
    """Bytes of this process that the kernel may take."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("LazyFree")))


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
