"""The wire codec: exact inverse, and nothing wrong gets through."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.routing_rows import encode_payload

from r3.payload import RouteLayout, decode_payload, extract_payload, narrow
from r3.routing import RoutingError, check_experts


@st.composite
def layouts(draw: st.DrawFn) -> RouteLayout:
    num_layers = draw(st.integers(1, 6))
    moe = draw(st.sets(st.integers(0, num_layers - 1), min_size=1))
    num_experts = draw(st.sampled_from([2, 8, 128, 256, 257, 1000]))
    return RouteLayout(num_layers, tuple(sorted(moe)), num_experts, draw(st.integers(1, min(4, num_experts))))


@st.composite
def routed(draw: st.DrawFn) -> tuple[RouteLayout, NDArray[np.unsignedinteger]]:
    layout = draw(layouts())
    rows = draw(st.integers(0, 12))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    shape = (rows, len(layout.moe_layer_ids), layout.num_experts)
    ids = np.argsort(rng.random(shape), axis=2)[:, :, : layout.top_k]
    return layout, narrow(ids, layout.num_experts, "test")


def wire(layout: RouteLayout, rows: int) -> NDArray[np.int32]:
    """Raw wire rows that are valid: every layer names experts 0, 1, ..."""
    return np.broadcast_to(np.arange(layout.top_k, dtype="<i4"), (rows, layout.num_layers, layout.top_k)).copy()


SMALL = RouteLayout(num_layers=4, moe_layer_ids=(1, 3), num_experts=8, top_k=2)


@given(routed())
def test_decode_inverts_encode(case: tuple[RouteLayout, NDArray[np.unsignedinteger]]) -> None:
    layout, experts = case
    decoded = decode_payload(encode_payload(experts, layout), layout, len(experts))
    assert decoded.dtype == (np.uint8 if layout.num_experts <= 256 else np.uint16)
    np.testing.assert_array_equal(decoded, experts)


LONG_ROWS = 20_011
"""Several of the decoder's blocks, and no multiple of three."""


def long_wire() -> NDArray[np.int32]:
    """Rows that can be told apart over long stretches."""
    index = np.arange(LONG_ROWS)[:, None]
    first = (index // 8 ** np.arange(4)[None, :]) % 8
    return np.stack([first, (first + 1) % 8], axis=2).astype("<i4")


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_long_payloads_decode_block_by_block(cut: int) -> None:
    wide = RouteLayout(num_layers=4, moe_layer_ids=(0, 1, 2, 3), num_experts=8, top_k=2)
    raw = long_wire()[cut:]
    decoded = decode_payload(memoryview(base64.b64encode(raw.tobytes())), wide, LONG_ROWS - cut)
    np.testing.assert_array_equal(decoded, raw)


@pytest.mark.parametrize("row", [8189, 8190, 8191, 16380, LONG_ROWS - 1])
def test_errors_in_later_blocks_name_the_row_of_the_whole(row: int) -> None:
    raw = long_wire()
    raw[row, 3, 1] = 9
    with pytest.raises(RoutingError, match=f"row {row}, MoE layer 1, slot 1 names expert 9"):
        decode_payload(base64.b64encode(raw.tobytes()), SMALL, LONG_ROWS)
    raw[row, 3] = 4
    with pytest.raises(RoutingError, match=f"row {row}, MoE layer 1 names expert 4 twice"):
        decode_payload(base64.b64encode(raw.tobytes()), SMALL, LONG_ROWS)


def test_padding_between_blocks_is_refused() -> None:
    payload = bytearray(base64.b64encode(long_wire().tobytes()))
    end = 8190 * SMALL.wire_bytes_per_row // 3 * 4
    payload[end - 2 : end] = b"=="
    with pytest.raises(RoutingError, match="not base64"):
        decode_payload(bytes(payload), SMALL, LONG_ROWS)


def test_dense_layers_are_dropped_and_255_is_an_expert() -> None:
    layout = RouteLayout(num_layers=3, moe_layer_ids=(1, 2), num_experts=256, top_k=2)
    raw = np.array([[[0, 0], [255, 254], [7, 255]]], dtype="<i4")
    decoded = decode_payload(base64.b64encode(raw.tobytes()), layout, 1)
    np.testing.assert_array_equal(decoded, [[[255, 254], [7, 255]]])


@pytest.mark.parametrize("change", [-1, 1, 3])
def test_a_wrong_row_count_names_both_counts(change: int) -> None:
    payload = base64.b64encode(wire(SMALL, 5 + change).tobytes())
    with pytest.raises(RoutingError, match=rf"turn 7: expected 5 rows .* received {5 + change} rows"):
        decode_payload(payload, SMALL, 5, "turn 7")


def test_a_truncated_payload_is_refused() -> None:
    raw = wire(SMALL, 5).tobytes()
    with pytest.raises(RoutingError, match=r"received 4\.97 rows"):
        decode_payload(base64.b64encode(raw[:-1]), SMALL, 5)


@pytest.mark.parametrize("payload", [b"!!!!", b"AAA", b"AA==AAAA", b"\xff\xfe\x00\x01", b"AAAA AAAA"])
def test_what_is_not_base64_is_refused(payload: bytes) -> None:
    with pytest.raises(RoutingError):
        decode_payload(payload, SMALL, 1)


@pytest.mark.parametrize("bad", [8, -1, 2**31 - 1, -(2**31), 256, 0x01000000])
def test_an_id_out_of_range_is_located(bad: int) -> None:
    raw = wire(SMALL, 6)
    raw[4, 3, 1] = bad
    with pytest.raises(RoutingError, match=rf"row 4, MoE layer 1, slot 1 names expert {bad}, expected ids in \[0, 8\)"):
        decode_payload(base64.b64encode(raw.tobytes()), SMALL, 6)


def test_big_endian_ids_are_refused() -> None:
    with pytest.raises(RoutingError, match="names expert 16777216"):
        decode_payload(base64.b64encode(wire(SMALL, 2).astype(">i4").tobytes()), SMALL, 2)


def test_a_repeated_expert_is_located() -> None:
    raw = wire(SMALL, 6)
    raw[2, 1] = (5, 5)
    with pytest.raises(RoutingError, match="row 2, MoE layer 0 names expert 5 twice"):
        decode_payload(base64.b64encode(raw.tobytes()), SMALL, 6)


def test_rows_that_were_never_captured_are_refused() -> None:
    raw = wire(SMALL, 6)
    raw[3:] = 0  # what the engine's buffer holds where nothing was written
    with pytest.raises(RoutingError, match="row 3, MoE layer 0 names expert 0 twice"):
        decode_payload(base64.b64encode(raw.tobytes()), SMALL, 6)


def test_garbage_in_a_dense_layer_is_dropped() -> None:
    raw = wire(SMALL, 2)
    raw[:, 0] = -7
    assert decode_payload(base64.b64encode(raw.tobytes()), SMALL, 2).shape == (2, 2, 2)


@given(st.binary(max_size=200), st.integers(0, 4))
def test_random_bytes_never_crash(junk: bytes, rows: int) -> None:
    for payload in (junk, base64.b64encode(junk)):
        try:
            decoded = decode_payload(payload, SMALL, rows)
        except RoutingError:
            continue
        assert decoded.shape == (rows, 2, 2)
        assert decoded.max(initial=0) < 8


@settings(max_examples=300)
@given(case=routed(), data=st.data())
def test_a_damaged_payload_never_gives_what_is_no_routing(
    case: tuple[RouteLayout, NDArray[np.unsignedinteger]], data: st.DataObject
) -> None:
    """The wire has no checksum, so a flipped bit can name another expert; but never too many rows, an id out of range
    or one twice, and a row that went missing or came twice is found."""
    layout, experts = case
    payload = bytearray(encode_payload(experts, layout))
    at = data.draw(st.integers(0, len(payload)))
    match data.draw(st.sampled_from(["flip", "cut", "insert", "repeat"])):
        case "flip" if at < len(payload):
            payload[at] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del payload[at : at + data.draw(st.integers(1, 40))]
        case "insert":
            payload[at:at] = data.draw(st.binary(min_size=1, max_size=40))
        case "repeat":
            payload[at:at] = payload[: data.draw(st.integers(0, at))]
    try:
        decoded = decode_payload(bytes(payload), layout, len(experts), "here")
    except RoutingError:
        return
    assert decoded.shape == experts.shape
    check_experts(decoded, layout.num_experts, "here")


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_what_is_cut_out_of_any_bytes_fits_back_in(before: bytes, after: bytes) -> None:
    for body in (before, before + b'"routed_experts":"' + after, b'"routed_experts":"' + after + b'"' + before):
        if cut := extract_payload(body):
            payload, rest = cut
            at = body.index(b'"routed_experts":"') + len(b'"routed_experts":"')
            assert rest[:at] + bytes(payload) + rest[at:] == body
            assert not {b'"'[0], b"\\"[0]} & set(payload)


@given(st.text(), st.binary(max_size=60), st.text())
def test_the_payload_is_cut_out_of_any_json(text: str, raw: bytes, other: str) -> None:
    payload = base64.b64encode(raw).decode()
    answer = {"text": text, "meta_info": {"a": other, "routed_experts": payload, "z": 1}}
    body = json.dumps(answer, separators=(",", ":")).encode()
    cut = extract_payload(body)
    assert cut is not None
    assert cut[0] == payload.encode()
    answer["meta_info"]["routed_experts"] = ""
    assert json.loads(cut[1]) == answer


def test_text_that_looks_like_the_key_is_not_taken_for_it() -> None:
    body = json.dumps({"text": '"routed_experts":"AAAA"', "meta_info": {}}, separators=(",", ":")).encode()
    assert extract_payload(body) is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"routed_experts":null}',
        b'{"routed_experts" : "AAAA"}',
        b'{"routed_experts":"AAAA","x":{"routed_experts":"BBBB"}}',
        b'{"routed_experts":"AAAA',
        b'{"routed_experts":"AA\\/A"}',
        b'{"routed_experts":"AA\\"AA"}',
        b"",
    ],
)
def test_other_shapes_are_left_to_the_parser(body: bytes) -> None:
    assert extract_payload(body) is None


@pytest.mark.parametrize(
    "arguments",
    [(4, (), 8, 2), (4, (3, 1), 8, 2), (4, (1, 1), 8, 2), (4, (4,), 8, 2), (4, (-1,), 8, 2), (4, (0,), 8, 9)],
)
def test_an_impossible_layout_is_refused(arguments: tuple[int, tuple[int, ...], int, int]) -> None:
    with pytest.raises(RoutingError):
        RouteLayout(*arguments)
