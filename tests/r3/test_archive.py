"""The archive: reading is the exact inverse of writing but for the order, and damaged or hostile files are refused."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from r3 import archive
from r3.routing import Routing, RoutingError, Span, SpanKind, append_span

PREFIX = struct.Struct("<8sHIQI")


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    num_experts = draw(st.sampled_from([2, 8, 128, 256, 257, 1000, 65536]))
    top_k = draw(st.integers(1, min(9, num_experts)))
    kinds = st.tuples(st.integers(1, 6), st.sampled_from(SpanKind), st.sampled_from(["1", "2", 'é"\n']))
    spans: list[Span] = []
    for length, kind, version in draw(st.lists(kinds, max_size=5)):
        start = spans[-1].stop if spans else 0
        append_span(spans, Span(start, start + length, version, "http://e:1", kind))
    tokens = spans[-1].stop if spans else 0
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (tokens, draw(st.integers(1, 4)), min(num_experts, 64))
    shift = rng.integers(0, num_experts - shape[2] + 1)
    experts = (np.argsort(rng.random(shape), axis=2)[:, :, :top_k] % shape[2] + shift)[:, :, :top_k]
    present = np.ones(tokens, np.bool_)
    for span in spans:
        present[span.start : span.stop] = span.kind is not SpanKind.MISSING
    experts[~present] = 0
    top_k = experts.shape[2]
    dtype = np.uint8 if num_experts <= 256 else np.uint16
    return Routing(experts.astype(dtype), present, tuple(spans), num_experts)


def example() -> Routing:
    experts = np.array([[[3, 1], [7, 0]], [[2, 6], [5, 4]], [[0, 1], [1, 0]], [[0, 0], [0, 0]]], np.uint8)
    spans = (Span(0, 2, "1", "e", SpanKind.PREFILLED), Span(2, 3, "2", "e", SpanKind.SAMPLED))
    return Routing(experts, np.arange(4) < 3, (*spans, Span(3, 4, "", "", SpanKind.MISSING)), 8)


def assert_same(ours: Routing, theirs: Routing, *, order: bool) -> None:
    expected = theirs.experts if order else np.sort(theirs.experts, axis=2)
    np.testing.assert_array_equal(ours.experts, expected)
    np.testing.assert_array_equal(ours.present, theirs.present)
    assert (ours.spans, ours.num_experts) == (theirs.spans, theirs.num_experts)
    assert ours.experts.dtype == theirs.experts.dtype


def header_of(data: bytes) -> archive.Header:
    return archive._parse(memoryview(data), archive.MAX_BYTES, "here")[0]


@given(routing=routings(), keep_order=st.booleans())
def test_reading_is_the_inverse_of_writing(routing: Routing, keep_order: bool) -> None:
    data = archive.encode(routing, keep_order=keep_order)
    assert_same(archive.decode(data), routing, order=keep_order)
    header = header_of(data)
    assert (header.tokens, header.sorted, header.layer_ids) == (routing.tokens, not keep_order, None)
    assert archive.encode(archive.decode(data), keep_order=keep_order) == data


def test_layer_ids_are_kept_and_checked() -> None:
    assert header_of(archive.encode(example(), layer_ids=[1, 3])).layer_ids == (1, 3)
    for wrong in ([1], [3, 1], [1, 1], [-1, 0], []):
        with pytest.raises(RoutingError, match="expected 2 ascending layer ids"):
            archive.encode(example(), layer_ids=wrong)


def test_absent_rows_take_no_space_and_hold_nothing() -> None:
    good = example()
    experts = good.experts.copy()
    experts[3] = 9  # means nothing
    data = archive.encode(replace(good, experts=experts))
    assert data == archive.encode(good)


def test_files_appear_whole(tmp_path: Path) -> None:
    path = tmp_path / "routes.r3"
    archive.write(path, example())
    assert_same(archive.read(path), example(), order=False)
    before = path.read_bytes()
    with pytest.raises(RoutingError, match="archive: spans cover 3 rows, expected 4"):
        archive.write(path, replace(example(), spans=example().spans[:2]))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_or_too_large_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "routes.r3"
    with pytest.raises(RoutingError, match=r"routes\.r3: No such file"):
        archive.read(path)
    path.write_bytes(b"")
    with pytest.raises(RoutingError, match=r"routes\.r3: not an archive"):
        archive.read(path)
    with path.open("r+b") as file:
        file.truncate(1 << 33)  # a hole: takes no room
    with pytest.raises(RoutingError, match=r"8589934592 bytes, expected an archive of at most"):
        archive.read(path)


# What follows is damaged or hostile.


@settings(max_examples=300)
@given(routing=routings(), data=st.data())
def test_a_flipped_bit_anywhere_is_refused(routing: Routing, data: st.DataObject) -> None:
    whole = bytearray(archive.encode(routing))
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << bit % 8
    refused(bytes(whole))


@given(routing=routings(), data=st.data())
def test_truncated_and_extended_archives_are_refused(routing: Routing, data: st.DataObject) -> None:
    whole = archive.encode(routing)
    refused(whole[: data.draw(st.integers(0, len(whole) - 1))])
    refused(whole + data.draw(st.binary(min_size=1, max_size=40)))


@given(st.binary(max_size=300))
def test_junk_is_refused(junk: bytes) -> None:
    refused(junk)
    refused(archive.MAGIC + junk)


def refused(data: bytes, message: str | None = None) -> None:
    with pytest.raises(RoutingError, match=message) as caught:
        archive.decode(data, where="here")
    assert str(caught.value).startswith("here")
    assert "\n" not in str(caught.value)


Change = Callable[[dict[str, Any]], object]


def forged(
    change: Change = lambda header: None, *, body: bytes | None = None, said: bytes | None = None, version: int = 1
) -> bytes:
    """The example's archive with another header or body, and a checksum that is right again."""
    whole = archive.encode(example())
    _, _, header_bytes, _, _ = PREFIX.unpack(whole[: PREFIX.size])
    header = json.loads(whole[PREFIX.size : PREFIX.size + header_bytes])
    change(header)
    said = json.dumps(header).encode() if said is None else said
    body = whole[PREFIX.size + header_bytes :] if body is None else body
    lengths = (archive.MAGIC, version, len(said), len(body))
    checksum = zlib.crc32(body, zlib.crc32(said, zlib.crc32(PREFIX.pack(*lengths, 0))))
    return PREFIX.pack(*lengths, checksum) + said + body


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"tokens": 5}, "spans cover 4 rows, expected 5"),
    ({"tokens": 3}, "spans must cover 3 rows"),
    ({"tokens": -4}, "impossible shape"),
    ({"tokens": 10**18}, "claims 4000000000000000000 bytes"),
    ({"tokens": 4.0}, "expected int, got 4.0"),
    ({"tokens": True}, "expected int, got True"),
    ({"moe_layers": 0}, "impossible shape"),
    ({"moe_layers": 3}, r"expected 3 rows \(18 bytes\), the body claims 12"),
    ({"top_k": 1}, r"expected 3 rows \(6 bytes\), the body claims 12"),
    ({"top_k": 9}, "impossible shape"),
    ({"num_experts": 7}, "names expert 7"),
    ({"num_experts": 300}, "stored as <u2, not '|u1'"),
    ({"num_experts": 1 << 17}, "impossible shape"),
    ({"dtype": ">u2"}, "stored as [|]u1, not '>u2'"),
    ({"dtype": "O"}, "not 'O'"),
    ({"sorted": 1}, "expected bool"),
    ({"layer_ids": [1]}, "expected 2 ascending layer ids"),
    ({"layer_ids": [2**70, 2**70]}, "ascending layer ids"),
    ({"layer_ids": 7}, "not the header"),
    ({"spans": []}, "spans cover 0 rows"),
    ({"spans": [[0, 4, "1", "e", "surprise"]]}, "not the header"),
    ({"spans": [[0, 4, "1", "e"]]}, "not the header"),
    ({"spans": [[0, 2, "1", "e", "sampled"], [1, 4, "1", "e", "sampled"]]}, "without gaps"),
    ({"spans": [[0, 0, "1", "e", "sampled"], [0, 4, "1", "e", "sampled"]]}, "without gaps"),
    ({"spans": [[0, 4, "1", "e", "sampled"]]}, r"expected 4 rows \(16 bytes\), the body claims 12"),
    ({"spans": [[0, 4, "1", "e", "missing"]]}, r"expected 0 rows \(0 bytes\), the body claims 12"),
]


@pytest.mark.parametrize(("fields", "message"), HOSTILE, ids=[str(fields)[:40] for fields, _ in HOSTILE])
def test_a_header_that_lies_is_refused(fields: dict[str, Any], message: str) -> None:
    refused(forged(lambda header: header.update(fields)), message)


@pytest.mark.parametrize("said", [b"", b"null", b"[]", b"{}", b'"x"', b"[" * 100_000, b"\xff\xfe", b"1" * 5000])
def test_an_invalid_header_is_refused(said: bytes) -> None:
    assert_same(archive.decode(forged()), example(), order=False)
    refused(forged(said=said), "not the header of an archive")


def test_a_missing_field_or_another_version_is_named() -> None:
    refused(forged(lambda header: header.pop("dtype")), "'dtype'")
    refused(forged(version=2), "archive version 2, this reader knows version 1")
    refused(forged(version=256), "archive version 256")


def test_wrong_lengths_are_refused_before_anything_is_read() -> None:
    whole = archive.encode(example())
    for lengths in ((1 << 31, 0), (100, 1 << 63), (0, 0)):
        refused(PREFIX.pack(archive.MAGIC, 1, *lengths, 0) + whole[PREFIX.size :])


def bomb(size: int) -> bytes:
    return zstandard.ZstdCompressor().compress(bytes(size))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "does not decompress"),
        (b"junk that is no frame", "does not decompress"),
        (bomb(1 << 28), "the body claims 268435456 bytes"),
        (bomb(11), "the body claims 11 bytes"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(12)), "claims -1 bytes"),
        (bomb(12) + b"x", "does not decompress"),
        (bomb(12)[:-1], "does not decompress"),
        (bomb(12), "do not ascend"),
        (zstandard.compress(bytes([7] * 6 + [2] * 6)), "names expert 9"),
        (zstandard.compress(bytes([250] * 6 + [10] * 6)), "do not ascend"),  # wraps to 4: in range, and not sorted
    ],
)
def test_a_body_that_lies_is_refused(body: bytes, message: str) -> None:
    refused(forged(body=body), message)


def test_the_reader_sets_the_bound() -> None:
    data = archive.encode(example())
    assert archive.decode(data, max_bytes=16).tokens == 4
    with pytest.raises(RoutingError, match="claims 16 bytes of expert ids, at most 15 are allowed"):
        archive.decode(data, max_bytes=15)


def test_ids_of_two_bytes_are_little_endian() -> None:
    experts = np.array([[[1, 258]]], np.uint16)
    routing = Routing(experts, np.ones(1, np.bool_), (Span(0, 1, "", "", SpanKind.SAMPLED),), 300)
    data = archive.encode(routing, keep_order=True)
    body = data[PREFIX.size + PREFIX.unpack(data[: PREFIX.size])[2] :]
    assert zstandard.decompress(body) == bytes([1, 2, 0, 1])  # low bytes, then high ones
