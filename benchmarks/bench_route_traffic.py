"""What routes cost on the wire: a long conversation with the real server, each turn asking only for what is not held.

``python benchmarks/bench_route_traffic.py`` prints a table and one JSON object:

- ``rows_ratio``: rows received over rows needed (goal: exactly 1.0);
- ``wire_over_floor``: bytes of the answers over the int32 bytes of the rows needed (base64 alone is 4/3);
- ``naive_over_received``: rows that asking for the whole prefix every turn would have moved, over the rows moved;
- ``wire_bytes_per_token``, ``memory_bytes_per_token``, ``disk_bytes_per_token``: of the answers (log-probs and JSON
  included), of the routes in memory, and of their archive.

``--shape paper --layers 48`` has Qwen3-30B-A3B's routes: 48 layers of top-8 of 128.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import checkout  # noqa: F401  (puts the checkout's scripts on the path)
import numpy as np

from agent_rl.config import EngineConfig
from agent_rl.engine.factory import open_engine
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.models.spec import read_model_spec
from agent_rl.types import SamplingParams
from r3 import archive
from r3.routing import validate
from r3.stitch import RouteStitcher
from scripts.tiny_moe import SHAPES, initial_weights, save_checkpoint


async def converse(engine: SGLangEngine, turns: int, sampled: int, observed: int) -> dict[str, float]:
    rng, layout = np.random.default_rng(0), engine.model_spec.layout
    tokens = rng.integers(2, engine.model_spec.vocab_size - 2, 200).tolist()
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
            tokens += rng.integers(2, engine.model_spec.vocab_size - 2, observed).tolist()
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
        "naive_over_received": naive / received,
        "wire_bytes_per_token": wire / len(tokens),
        "memory_bytes_per_token": routing.experts.nbytes / len(tokens),
        "disk_bytes_per_token": len(archive.encode(routing)) / len(tokens),
    }


async def measure(model: Path, run_dir: Path, turns: int, sampled: int, observed: int) -> dict[str, float]:
    config = EngineConfig(max_total_tokens=16384, max_running_requests=4)
    async with open_engine(config, model, read_model_spec(model), run_dir) as engine:
        return await converse(engine, turns, sampled, observed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint's directory; a random one by default")
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="sizes of the random one")
    parser.add_argument("--layers", type=int, help="its layers; the shape's own by default")
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--sampled", type=int, default=40)
    parser.add_argument("--observed", type=int, default=100)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = chosen.model or Path(scratch) / "model"
        if chosen.model is None:
            sizes = SHAPES[chosen.shape]
            sizes = replace(sizes, num_hidden_layers=chosen.layers or sizes.num_hidden_layers)
            save_checkpoint(model, initial_weights(sizes, 0), sizes, eos=0, pad=1)
        values = asyncio.run(measure(model, Path(scratch), chosen.turns, chosen.sampled, chosen.observed))
    for name, value in values.items():
        print(f"{name:<34}{value:>14.4g}")
    print(json.dumps(values))


if __name__ == "__main__":
    main()
