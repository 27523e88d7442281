"""The wire codec: decoding is the exact inverse of encoding, and invalid payloads are refused."""

from __future__ import annotations

import base64
import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.routing_rows import encode_payload

from r3.payload import RouteLayout, decode_payload, extract_payload, narrow, split_raw
from r3.routing import RoutingError, SlotPlanes, check_experts


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


def raw_body(experts: NDArray[np.unsignedinteger], layout: RouteLayout, size: int, rest: bytes = b"{}") -> bytes:
    """What a server sends that agent-rl launched."""
    wire_TLK = np.zeros((len(experts), layout.num_layers, layout.top_k), f"<u{size}")
    wire_TLK[:, list(layout.moe_layer_ids)] = experts
    ids = wire_TLK.tobytes()
    return b"\x93routes" + bytes([size]) + len(ids).to_bytes(8, "little") + ids + rest


@given(routed(), st.sampled_from([1, 2]), st.binary(max_size=20))
def test_raw_routes_are_decoded(case: tuple[RouteLayout, NDArray[np.unsignedinteger]], size: int, rest: bytes) -> None:
    layout, experts = case
    if experts.size and experts.max() > 255:
        size = 2
    routes, after = split_raw(raw_body(experts, layout, size, rest))
    assert bytes(after) == rest
    decoded = decode_payload(routes, layout, len(experts))
    assert decoded.dtype == (np.uint8 if layout.num_experts <= 256 else np.uint16)
    np.testing.assert_array_equal(decoded, experts)
    with pytest.raises(RoutingError, match="expected"):
        decode_payload(routes, layout, len(experts) + 1)


def test_wrong_raw_routes_are_refused() -> None:
    experts = np.array([[[0, 1], [2, 3]]], np.uint8)
    body = raw_body(experts, SMALL, 1, b"")
    for cut in (body[:-1], body.replace(b"routes\x01", b"routes\x03")):
        with pytest.raises(RoutingError, match="raw routes of 8 bytes"):
            split_raw(cut)
    for wrong in ([[[0, 9], [2, 3]]], [[[1, 1], [2, 3]]]):
        routes, _ = split_raw(raw_body(np.array(wrong, np.uint8), SMALL, 1))
        with pytest.raises(RoutingError, match="names expert"):
            decode_payload(routes, SMALL, 1)
    assert split_raw(b'{"output_ids":[]}') is None


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


@pytest.mark.parametrize(("end", "received"), [(128, "4"), (192, "6"), (256, "8"), (159, r"4\.97")])
def test_a_wrong_row_count_names_both_counts(end: int, received: str) -> None:
    payload = base64.b64encode(wire(SMALL, 8).tobytes()[:end])
    with pytest.raises(RoutingError, match=rf"turn 7: expected 5 rows .* received {received} rows"):
        decode_payload(payload, SMALL, 5, "turn 7")


@pytest.mark.parametrize("payload", [b"!!!!", b"AAA", b"AA==AAAA", b"\xff\xfe\x00\x01", b"AAAA AAAA"])
def test_what_is_not_base64_is_refused(payload: bytes) -> None:
    with pytest.raises(RoutingError):
        decode_payload(payload, SMALL, 1)


OUT_OF_RANGE = [8, -1, 2**31 - 1, -(2**31), 256, 0x01000000]  # the last one is 1 in the other byte order
INVALID_IDS: list[tuple[Any, int, str]] = [
    *(
        ((4, 3, 1), bad, rf"row 4, MoE layer 1, slot 1 names expert {bad}, expected ids in \[0, 8\)")
        for bad in OUT_OF_RANGE
    ),
    ((2, 1), 5, "row 2, MoE layer 0 names expert 5 twice"),
    (slice(3, None), 0, "row 3, MoE layer 0 names expert 0 twice"),  # rows that the engine never captured
    (slice(None), 0, "every id is 0: this server captures no routes"),
    ((slice(None), 3), 0, "every id of MoE layer 1 is 0: this server captures no routes of it"),
]


@pytest.mark.parametrize(("place", "value", "message"), INVALID_IDS)
def test_invalid_ids_are_located(place: Any, value: int, message: str) -> None:
    raw = wire(SMALL, 6)
    raw[place] = value
    with pytest.raises(RoutingError, match=message):
        decode_payload(base64.b64encode(raw.tobytes()), SMALL, 6)


def distinct_ids(rows: int, top_k: int, dtype: type) -> NDArray[np.unsignedinteger]:
    """Ids ``[rows, 1, top_k]`` below 16."""
    drawn = np.random.default_rng(top_k).random((rows, 16))
    return np.argsort(drawn, axis=1)[:, None, :top_k].astype(dtype)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 6, 8, 10])
def test_each_repeated_id_is_found(dtype: type, top_k: int) -> None:
    experts = distinct_ids(7, top_k, dtype)
    check_experts(experts, 16, "here")
    for row, pair in itertools.product(range(7), itertools.combinations(range(top_k), 2)):
        wrong = experts.copy()
        expert = wrong[row, 0, pair[1]] = wrong[row, 0, pair[0]]
        with pytest.raises(RoutingError, match=f"row {row}, MoE layer 0 names expert {expert} twice"):
            check_experts(wrong, 16, "here")


@pytest.mark.parametrize(("top_k", "dtype"), [(8, np.uint8), (8, np.uint16)])
def test_each_block_of_rows_is_checked(top_k: int, dtype: type) -> None:
    experts = distinct_ids(80_000, top_k, dtype)
    check_experts(experts, 16, "here")
    for row in (0, 16_383, 16_384, 32_767, 32_768, 79_999):
        right = experts[row, 0, top_k - 1]
        experts[row, 0, top_k - 1] = experts[row, 0, 0]
        with pytest.raises(RoutingError, match=f"row {row}, MoE layer 0 names expert {experts[row, 0, 0]} twice"):
            check_experts(experts, 16, "here")
        experts[row, 0, top_k - 1] = 16
        with pytest.raises(RoutingError, match=f"row {row}, MoE layer 0, slot {top_k - 1} names expert 16"):
            check_experts(experts, 16, "here")
        experts[row, 0, top_k - 1] = right


@given(st.integers(1, 10), st.integers(1, 40), st.sampled_from([np.uint8, np.uint16]))
def test_planes_hold_the_slots(top_k: int, rows: int, dtype: type) -> None:
    choices = np.random.default_rng(rows).integers(0, np.iinfo(dtype).max, (rows, top_k)).astype(dtype)
    slots = SlotPlanes(rows, top_k, np.dtype(dtype))
    slots.split(choices)
    assert slots.planes.shape == (top_k, rows)
    assert slots.planes.dtype == dtype
    assert sorted(slots.planes.tolist()) == sorted(choices.T.tolist())


def test_raw_routes_of_a_model_without_dense_layers_are_not_copied() -> None:
    layout = RouteLayout(2, (0, 1), 128, 8)
    experts = np.broadcast_to(np.arange(8, dtype=np.uint8), (5, 2, 8))
    body = raw_body(experts, layout, 1)
    split = split_raw(body)
    assert split is not None
    decoded = decode_payload(split[0], layout, 5)
    assert np.shares_memory(decoded, np.frombuffer(body, np.uint8))


@settings(max_examples=300)
@given(case=routed(), data=st.data())
def test_a_damaged_payload_never_gives_an_invalid_routing(
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
def test_the_extracted_payload_and_the_rest_make_up_the_body(before: bytes, after: bytes) -> None:
    for body in (before, before + b'"routed_experts":"' + after, b'"routed_experts":"' + after + b'"' + before):
        if cut := extract_payload(body):
            payload, rest = cut
            at = body.index(b'"routed_experts":"') + len(b'"routed_experts":"')
            assert rest[:at] + bytes(payload) + rest[at:] == body
            assert not {b'"'[0], b"\\"[0]} & set(payload)


@given(st.text(), st.binary(max_size=60), st.text())
def test_the_payload_is_extracted_from_any_json(text: str, raw: bytes, other: str) -> None:
    payload = base64.b64encode(raw).decode()
    answer = {"text": text, "meta_info": {"a": other, "routed_experts": payload, "z": 1}}
    body = json.dumps(answer, separators=(",", ":")).encode()
    cut = extract_payload(body)
    assert cut[0] == payload.encode()
    answer["meta_info"]["routed_experts"] = ""
    assert json.loads(cut[1]) == answer


OTHER_SHAPES = [
    b'{"routed_experts":null}',
    b'{"routed_experts" : "AAAA"}',
    b'{"routed_experts":"AAAA","x":{"routed_experts":"BBBB"}}',
    b'{"routed_experts":"AAAA',
    b'{"routed_experts":"AA\\/A"}',
    b'{"routed_experts":"AA\\"AA"}',
    b'{"text":"\\"routed_experts\\":\\"AAAA\\"","meta_info":{}}',
    b"",
]


@pytest.mark.parametrize("body", OTHER_SHAPES)
def test_other_shapes_are_left_to_the_parser(body: bytes) -> None:
    assert extract_payload(body) is None


@pytest.mark.parametrize(
    "arguments",
    [(4, (), 8, 2), (4, (3, 1), 8, 2), (4, (1, 1), 8, 2), (4, (4,), 8, 2), (4, (-1,), 8, 2), (4, (0,), 8, 9)],
)
def test_an_impossible_layout_is_refused(arguments: tuple[int, tuple[int, ...], int, int]) -> None:
    with pytest.raises(RoutingError):
        RouteLayout(*arguments)
