"""The trace's records: what a hash covers, where a digest points, and files that are complete or absent."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from r3.trace import events
from r3.trace.recorders import request_trace

ROWS, LAYERS, TOP_K = 9, 3, 2


def routes(seed: int = 0) -> NDArray[np.uint16]:
    return np.random.default_rng(seed).integers(0, 300, (ROWS, LAYERS, TOP_K)).astype(np.uint16)


def fields(**changes: Any) -> dict[str, Any]:
    tokens, present = np.arange(ROWS, dtype=np.int32), np.ones(ROWS, bool)
    rows = events.sample_rows(
        "key", tokens, (1, 2, 3), tokens, routes(), present, tokens.astype(np.uint32),
        full_shape=(ROWS, LAYERS, TOP_K), previews=2,
    )  # fmt: skip
    return rows | {"stage": "train", "sample_idx": 0, "valid_length": ROWS, "microbatch_idx": 0} | changes


def test_a_hash_is_that_of_the_documented_bytes() -> None:
    experts = np.array([[[1, 2]], [[9, 9]], [[300, 4]]], np.uint16)
    array = events.canonical(experts, np.array([True, False, True]))
    assert events.sha256(array) == hashlib.sha256(np.array([1, 2, -1, -1, 300, 4], "<i4").tobytes()).hexdigest()
    assert events.sorted_sha256(array) == hashlib.sha256(np.array([1, 2, -1, -1, 4, 300], "<i4").tobytes()).hexdigest()
    assert events.sha256(array[::2]) == events.sha256(array[::2].copy()), "a view is hashed as what it shows"


def test_what_absent_rows_hold_is_never_hashed() -> None:
    present = np.arange(ROWS) != 4
    spoiled = routes()
    spoiled[4] = 77
    assert events.sha256(events.canonical(spoiled, present)) == events.sha256(events.canonical(routes(), present))
    spoiled[5, 1, 0] += 1
    assert events.sha256(events.canonical(spoiled, present)) != events.sha256(events.canonical(routes(), present))
    missing = events.canonical(routes(), np.zeros(ROWS, bool))
    assert missing.dtype == np.int32
    assert (missing == -1).all()


@given(
    row=st.integers(0, ROWS - 1), layer=st.integers(0, LAYERS - 1), slot=st.integers(0, 1), seed=st.integers(0, 2**32)
)
def test_digests_point_at_the_row_and_the_layer(row: int, layer: int, slot: int, seed: int) -> None:
    before = events.canonical(routes(seed), np.ones(ROWS, bool))
    after = before.copy()
    after[row, layer, slot] += 1
    one, other = digests_of(before), digests_of(after)
    assert len(one) == ROWS
    assert {index for index in range(ROWS) if one[index] != other[index]} <= {row}
    assert [a != b for a, b in zip(events.layer_sha256(before), events.layer_sha256(after), strict=True)] == [
        index == layer for index in range(LAYERS)
    ]


def test_row_digests_tell_rows_layers_and_slots_apart() -> None:
    rows = events.canonical(np.random.default_rng(1).integers(0, 8, (2000, 4, 2)), np.ones(2000, bool))
    digests = digests_of(rows)
    assert len(set(digests)) > 1900
    for other in (rows[:, [1, 0, 2, 3]], rows[..., ::-1]):
        changed = (other != rows).any(axis=(1, 2))
        assert sum(a == b for a, b, c in zip(digests, digests_of(other), changed, strict=True) if c) < 5


def digests_of(rows: NDArray[np.int32]) -> list[str]:
    text = events.row_digests(rows)
    return [text[start : start + 4] for start in range(0, len(text), 4)]


@given(st.lists(st.integers(0, 50), unique=True))
def test_runs_hold_the_integers_in_their_order(values: list[int]) -> None:
    found = events.runs(np.array(values, np.int64))
    assert [value for start, stop in found for value in range(start, stop)] == values
    assert all(start < stop for start, stop in found)


def test_a_file_appears_complete_with_its_end(tmp_path: Path) -> None:
    with events.TraceWriter(tmp_path / "new", 3, 5, previews=2) as writer:
        writer.add(events.Action, stage="train", microbatch_idx=0, layer_number=2, action="replay_forward")
        assert not (tmp_path / "new").exists()
    (path,) = (tmp_path / "new").iterdir()
    assert path.name == "r3_trace_step-000003_rank-00005.jsonl"
    first, end = map(json.loads, path.read_text().splitlines())
    assert list(first)[:3] == ["event", "rank", "trace_step"]
    assert (first["rank"], end["records"], end["error"]) == (5, 2, None)
    trace = events.read_trace(tmp_path / "new")
    assert [type(event).__name__ for event in trace.steps[3]] == ["Action", "End"]
    assert trace.changed == ()


def test_an_error_ends_the_file_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), events.TraceWriter(tmp_path, 1, None):
        raise RuntimeError("layer 3 came twice")
    end = json.loads((tmp_path / "r3_trace_step-000001_driver.jsonl").read_text())
    assert end["error"] == "RuntimeError: layer 3 came twice"


def test_a_step_done_again_forgets_its_first_trace(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        events.TraceWriter(tmp_path, step, 0).close()
    events.remove_step(tmp_path, 1)
    assert sorted(path.name[14:20] for path in tmp_path.iterdir()) == ["000002", "000010"]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("valid_length", (ROWS - 1, True)),
        ("rows", (((0, ROWS - 1),), ((ROWS, 0),))),
        ("layers", ((1, 2),)),
        ("sample_idx", (-1, 1 << 48)),
        ("identity_sha256", ("abc",)),
    ],
)
def test_inconsistent_records_are_refused(field: str, values: tuple[Any, ...]) -> None:
    events.Fetch(rank=0, trace_step=1, **fields())
    for value in values:
        with pytest.raises(ValidationError):
            events.Fetch(rank=0, trace_step=1, **fields(**{field: value}))


def test_the_first_samples_of_the_first_micro_batches_are_followed(tmp_path: Path) -> None:
    batches = [[[4, 0], [1], [6]], [[2, 3]], []]
    order = request_trace(tmp_path, 1, batches, (1,), samples=2, limit=2, previews=0, verify_forward=True)
    assert order.micro_batches == (((4, 0), (1,)), ((2, 3),), ())
    assert order.samples == {4, 0, 2, 3}
