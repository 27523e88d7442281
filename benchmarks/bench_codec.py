"""What routes cost once they are here: decoding an answer, stitching turns, writing and reading archives.

``python benchmarks/bench_codec.py`` prints a table and one JSON object. Times are processor time, the fastest of some
rounds that take turns, so the ratios are what to look at; speeds are in int32 bytes (48 layers x top-8) a second:

- ``decode_over_json``: our decoding of an answer, checks included, over json and base64 without checks (goal: 4);
- ``decode_over_orjson``: the same over orjson and pybase64 without checks;
- ``raw_ms``, ``raw_mib``: decoding a response with raw routes, checks included, and its size; ``raw_smaller``: int32
  base64 over it; ``raw_faster``: decoding that over decoding raw routes;
- ``archive_smaller``: int32 bytes over the archive's (goal: 5.5); ``_ordered`` with the order within a row kept,
  ``_uniform`` of experts drawn evenly, the worst there is;
- ``archive_write_gb_per_second``, ``archive_read_gb_per_second``: to and from bytes, checks included;
- ``stitch_over_copy``: stitching 50 turns to 65,536 tokens over one copy of the tensor (goal: 1.5), in the memory of a
  sequence that is no longer held; ``_new`` in memory that the kernel has yet to provide; ``_growing`` without a
  capacity;
- ``memory_over_tensor``: what that adds to the process's peak resident memory, over the tensor (goal: 1.2);
  ``held_over_tensor_short`` is what an episode that ends after 5 of the 50 turns holds when it is finished.

The routes are synthetic: in each layer the popularity of the experts follows Zipf's law (exponent 0.8, in an order of
the layer's own), a token takes the 8 experts of the highest log-popularity plus Gumbel noise, and an expert's noise
stays as it was for the token before with a chance of 0.3. Neighbouring tokens then share 37 % of their experts.
"""

from __future__ import annotations

import argparse
import base64
import json
import multiprocessing
from collections.abc import Iterable
from pathlib import Path

import checkout  # noqa: F401
import numpy as np
import orjson
import pybase64
from numpy.typing import NDArray
from resident_memory import resident
from support.routing_rows import encode_payload
from timing import fastest

from r3 import archive
from r3.page_pool import PAGES, PagePool
from r3.payload import RouteLayout, decode_payload, extract_payload, split_raw
from r3.routing import Routing, Span, SpanKind
from r3.stitch import RouteStitcher

LAYERS, TOP_K, EXPERTS = 48, 8, 128
LAYOUT = RouteLayout(LAYERS, tuple(range(LAYERS)), EXPERTS, TOP_K)
TOKENS, TURNS = 65536, 50


def synthetic_routes(tokens: int, *, zipf: float = 0.8, stays: float = 0.3, seed: int = 0) -> NDArray[np.uint8]:
    """Experts ``[tokens, LAYERS, TOP_K]`` as the module says."""
    rng = np.random.default_rng(seed)
    experts = np.empty((tokens, LAYERS, TOP_K), np.uint8)
    rows = np.arange(tokens)[:, None]
    for layer in range(LAYERS):
        popularity = -zipf * np.log(1 + rng.permutation(EXPERTS), dtype=np.float32)
        noise = -np.log(rng.exponential(size=(tokens, EXPERTS)), dtype=np.float32)
        drawn_at = np.maximum.accumulate(np.where(rng.random(noise.shape) < stays, 0, rows), axis=0)
        scores = popularity + np.take_along_axis(noise, drawn_at, axis=0)
        experts[:, layer] = np.argpartition(-scores, TOP_K - 1, axis=1)[:, :TOP_K]
    return experts


def routing_of(experts: NDArray[np.uint8]) -> Routing:
    spans = (Span(0, len(experts), "1", "http://127.0.0.1:30000", SpanKind.SAMPLED),)
    return Routing(experts, np.ones(len(experts), np.bool_), spans, EXPERTS)


def decoding(experts: NDArray[np.uint8]) -> dict[str, float]:
    payload = encode_payload(experts, LAYOUT).decode()
    body = orjson.dumps({"output_ids": [1] * 64, "meta_info": {"id": "x", "routed_experts": payload, "z": 0}})

    def ours() -> None:
        cut = extract_payload(body)
        assert cut is not None
        orjson.loads(cut[1])
        decode_payload(cut[0], LAYOUT, len(experts))

    ids = experts.tobytes()
    raw_body = (
        b"\x93routes\x01" + len(ids).to_bytes(8, "little") + ids + b'{"output_ids": [1], "meta_info": {"id": "x"}}'
    )

    def ours_raw() -> None:
        split = split_raw(raw_body)
        assert split is not None
        orjson.loads(split[1])
        decode_payload(split[0], LAYOUT, len(experts))

    def unchecked(raw: bytes) -> None:
        np.frombuffer(raw, dtype="<i4").astype(np.uint8)

    seconds = fastest(
        {
            "ours": ours,
            "raw": ours_raw,
            "json": lambda: unchecked(base64.b64decode(json.loads(body)["meta_info"]["routed_experts"])),
            "orjson": lambda: unchecked(pybase64.b64decode(orjson.loads(body)["meta_info"]["routed_experts"])),
        }
    )
    return {
        "raw_ms": 1000 * seconds["raw"],
        "raw_mib": len(raw_body) / 2**20,
        "raw_smaller": len(body) / len(raw_body),
        "raw_faster": seconds["ours"] / seconds["raw"],
        "decode_over_json": seconds["json"] / seconds["ours"],
        "decode_over_orjson": seconds["orjson"] / seconds["ours"],
        "decode_gb_per_second": len(experts) * LAYOUT.wire_bytes_per_row / seconds["ours"] / 1e9,
    }


def archiving(experts: NDArray[np.uint8]) -> dict[str, float]:
    routing, int32_bytes = routing_of(experts), len(experts) * LAYOUT.wire_bytes_per_row
    data = archive.encode(routing)
    even = routing_of(synthetic_routes(4096, zipf=0.0, stays=0.0))
    seconds = fastest({"write": lambda: archive.encode(routing), "read": lambda: archive.decode(data)})
    return {
        "archive_smaller": int32_bytes / len(data),
        "archive_smaller_ordered": int32_bytes / len(archive.encode(routing, keep_order=True)),
        "archive_smaller_uniform": 4096 * LAYOUT.wire_bytes_per_row / len(archive.encode(even)),
        "archive_bytes_per_token": len(data) / len(experts),
        "archive_write_gb_per_second": int32_bytes / seconds["write"] / 1e9,
        "archive_read_gb_per_second": int32_bytes / seconds["read"] / 1e9,
    }


def stitched(turns: Iterable[Routing], capacity: int, pages: PagePool = PAGES) -> Routing:
    stitcher = RouteStitcher(moe_layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS, capacity=capacity, pages=pages)
    for turn in turns:
        stitcher.append(turn, sequence=stitcher.next_row + turn.tokens + 1)
    return stitcher.finish(stitcher.next_row + 1)


def stitching(experts: NDArray[np.uint8]) -> dict[str, float]:
    turns = [routing_of(experts[: TOKENS // TURNS])] * TURNS  # in the cache, as rows just decoded are
    whole = stitched(turns, TOKENS).experts
    used = whole.copy()
    seconds = fastest(
        {
            "copy": lambda: np.copyto(used, whole),
            "new": lambda: stitched(turns, TOKENS, PagePool()),
            "stitch": lambda: stitched(turns, TOKENS),
            "growing": lambda: stitched(turns, 0),
        }
    )
    return {
        "stitch_over_copy": seconds["stitch"] / seconds["copy"],
        "stitch_over_copy_new": seconds["new"] / seconds["copy"],
        "stitch_over_copy_growing": seconds["growing"] / seconds["copy"],
        "memory_over_tensor": in_a_fresh_process(TURNS, "VmHWM"),
        "held_over_tensor_short": in_a_fresh_process(TURNS // 10, "VmRSS"),
    }


def in_a_fresh_process(turns: int, field: str) -> float:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(memory, (turns, field))


def memory(turns: int, field: str) -> float:
    """What stitching ``turns`` turns adds to this process's resident memory (VmHWM: at its peak), over the tensor."""
    experts = np.broadcast_to(np.arange(TOP_K, dtype=np.uint8), (TOKENS // TURNS, LAYERS, TOP_K))  # takes no memory
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident("VmRSS")
    tensor = stitched((routing_of(experts.copy()) for _ in range(turns)), TOKENS).experts
    return (resident(field) - before) / tensor.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of an answer and of an archive")
    chosen = parser.parse_args()
    experts = synthetic_routes(chosen.tokens)
    values = decoding(experts) | archiving(experts) | stitching(experts)
    for name, value in values.items():
        print(f"{name:<34}{value:>14.4g}")
    print(json.dumps(values))


if __name__ == "__main__":
    main()
