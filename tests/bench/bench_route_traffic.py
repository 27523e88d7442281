"""What routes cost on the wire: a long conversation with the real server, each turn asking only for what is not held.

``python tests/bench/bench_route_traffic.py`` prints a table and one JSON object:

- ``rows_ratio``: rows received over rows needed (goal: exactly 1.0);
- ``wire_over_floor``: bytes of the answers over the int32 bytes of the rows needed (base64 alone is 4/3);
- ``naive_over_ours``: rows that asking for the whole prefix every turn would have moved, over the rows moved.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

import numpy as np

from agent_rl.config import EngineConfig
from agent_rl.engine.open import open_engine
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.model.init import TinyMoe, initial_weights, save_checkpoint
from agent_rl.model_facts import read_facts
from agent_rl.types import SamplingParams
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


async def measure(model: Path, run_dir: Path, turns: int, sampled: int, observed: int) -> dict[str, float]:
    config = EngineConfig(max_total_tokens=16384, max_running_requests=4)
    async with open_engine(config, model, read_facts(model), run_dir) as engine:
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
    for name, value in values.items():
        print(f"{name:<34}{value:>14.4g}")
    print(json.dumps(values))


if __name__ == "__main__":
    main()
