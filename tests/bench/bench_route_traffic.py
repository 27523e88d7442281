"""What routes cost on the wire: a long conversation with the real server, each turn asking only for what is not held.

``python tests/bench/bench_route_traffic.py`` prints a table and one JSON object:

- ``rows_ratio``: rows received over rows needed (goal: exactly 1.0);
- ``wire_over_floor``: bytes of the answers over the int32 bytes of the rows needed (base64 alone is 4/3);
- ``naive_over_ours``: rows that asking for the whole prefix every turn would have moved, over the rows moved;
- ``decode_gb_per_second_*``: int32 bytes decoded a second, by our slicing, by orjson, and by json and base64 unchecked.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson

from agent_rl.config import EngineConfig
from agent_rl.engine.open import open_engine
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.model.init import TinyMoe, initial_weights, save_checkpoint
from agent_rl.types import SamplingParams
from r3.codec import RouteLayout, decode_payload, encode_payload, extract_payload
from r3.routing import validate
from r3.stitch import RouteStitcher


async def converse(engine: SGLangEngine, turns: int, sampled: int, observed: int) -> dict[str, float]:
    rng, layout = np.random.default_rng(0), engine.facts.layout
    tokens = rng.integers(2, engine.facts.vocab_size - 2, 200).tolist()
    stitcher = RouteStitcher(moe_layers=len(layout.moe_layer_ids), top_k=layout.top_k, num_experts=layout.num_experts)
    received = wire = naive = 0
    for turn in range(turns):
        sampling = SamplingParams(max_new_tokens=sampled)
        got = await engine.generate(tokens, sampling, routes_from=stitcher.next_row, session="one")
        assert got.routing is not None
        tokens += got.tokens
        stitcher.append(got.routing, sequence=len(tokens))
        received, wire, naive = received + got.routing.tokens, wire + got.wire_bytes, naive + len(tokens) - 1
        if turn < turns - 1:
            tokens += rng.integers(2, engine.facts.vocab_size - 2, observed).tolist()
    routing = stitcher.finish(len(tokens))
    validate(routing)
    needed = len(tokens) - 1
    return {
        "turns": turns,
        "tokens": len(tokens),
        "rows_received": received,
        "rows_needed": needed,
        "rows_ratio": received / needed,
        "wire_bytes": wire,
        "wire_over_floor": wire / (needed * layout.wire_bytes_per_row),
        "naive_over_ours": naive / received,
        "stored_bytes_per_token": routing.experts.nbytes / len(tokens),
    }


def decode_speed(rows: int = 4096) -> dict[str, float]:
    """int32 bytes a second of processor time out of a 48-layer top-8 answer: the client's way and two plainer ones."""
    layout = RouteLayout(48, tuple(range(48)), 128, 8)
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((rows, 48, 128), dtype=np.float32), axis=2)[:, :, :8].astype(np.uint8)
    payload = encode_payload(experts, layout).decode()
    body = orjson.dumps({"output_ids": [1] * 64, "meta_info": {"id": "x", "routed_experts": payload, "z": 0}})

    def sliced() -> None:
        cut = extract_payload(body)
        assert cut is not None
        orjson.loads(cut[1])
        decode_payload(cut[0], layout, rows)

    def parsed() -> None:
        decode_payload(orjson.loads(body)["meta_info"]["routed_experts"].encode(), layout, rows)

    def plain() -> None:
        raw = base64.b64decode(json.loads(body)["meta_info"]["routed_experts"])
        np.frombuffer(raw, dtype="<i4").astype(np.uint8)

    raw_bytes = rows * layout.wire_bytes_per_row
    return {f"decode_gb_per_second_{call.__name__}": raw_bytes / best(call) / 1e9 for call in (sliced, parsed, plain)}


def best(call: Callable[[], None], repeats: int = 5) -> float:
    """Seconds of processor time of the fastest of ``repeats``: what else the machine does is not counted."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        call()
        times.append(time.process_time() - started)
    return min(times)


async def measure(model: Path, run_dir: Path, turns: int, sampled: int, observed: int) -> dict[str, float]:
    async with open_engine(EngineConfig(max_total_tokens=16384, max_running_requests=4), model, run_dir) as engine:
        return await converse(engine, turns, sampled, observed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint's folder; a tiny random one by default")
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--sampled", type=int, default=40)
    parser.add_argument("--observed", type=int, default=100)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = chosen.model or Path(scratch) / "model"
        if chosen.model is None:
            sizes = TinyMoe()
            save_checkpoint(model, initial_weights(sizes, 0), sizes, eos=0, pad=1)
        values = asyncio.run(measure(model, Path(scratch), chosen.turns, chosen.sampled, chosen.observed))
        values |= decode_speed()
    for name, value in values.items():
        print(f"{name:<34}{value:>14.4g}")
    print(json.dumps(values))


if __name__ == "__main__":
    main()
