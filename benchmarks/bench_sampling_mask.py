"""What the kept tokens of truncated sampling change: the trainer's mismatch, and the engine's time per token.

Run: ``python benchmarks/bench_sampling_mask.py [--tokens 20000] [--top-p 0.9] [--temperature 1.5]``

One real engine with the quickstart's model samples after random prompts with top-p. The trainer takes the log-probs of
the same tokens, with the engine's routes, over the kept tokens and over the whole vocabulary. Both are compared with
the distribution that was sampled. The time per token is that of sequences that run one after another.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from one_rank import free_port

from agent_rl.config import EngineConfig, ParallelConfig
from agent_rl.config.loader import install_model
from agent_rl.engine.launch import EngineServer
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.models.spec import read_model_spec
from agent_rl.train.batching.packing import pack
from agent_rl.train.megatron.packed_batch import PackedRoutes
from agent_rl.train.megatron.parallel import destroy_parallel, init_parallel
from agent_rl.train.step import packed
from agent_rl.types import Completion, Sample, SamplingParams
from r3.mismatch.report import k3_kl, logprob_abs_diff

PROMPT, SAMPLED = 32, 500


async def sample(model: Path, chosen: argparse.Namespace) -> list[tuple[list[int], Completion]]:
    """Prompts with what the engine sampled after each."""
    config = EngineConfig(threads=1, dtype=chosen.dtype, max_total_tokens=32768, start_timeout=600)
    async with EngineServer(config, model, model.parent / "engine.log") as server:
        engine = SGLangEngine(server.url, read_model_spec(model), config)
        draw = np.random.default_rng(0)
        sampling = SamplingParams(
            temperature=chosen.temperature, top_p=chosen.top_p, max_new_tokens=SAMPLED, keep_mask=True
        )

        async def one(given: SamplingParams) -> tuple[list[int], Completion]:
            prompt = draw.integers(3, engine.model_spec.vocab_size - 2, PROMPT).tolist()
            return prompt, await engine.generate(prompt, given, routes_from=0, session=str(prompt))

        kinds = {
            "whole vocabulary": replace(sampling, top_p=1.0, keep_mask=False),
            "top-p without a mask": replace(sampling, keep_mask=False),
            "top-p with a mask": sampling,
        }
        seconds, tokens = dict.fromkeys(kinds, 0.0), dict.fromkeys(kinds, 0)
        for _, (name, given) in itertools.product(range(chosen.rounds), kinds.items()):
            started = time.perf_counter()
            tokens[name] += len((await one(given))[1].tokens)
            seconds[name] += time.perf_counter() - started
        for name in kinds:
            print(f"{name}: {1e3 * seconds[name] / tokens[name]:.2f} ms per token", flush=True)
        drawn: list[tuple[list[int], Completion]] = []
        while sum(len(got.tokens) for _, got in drawn) < chosen.tokens:
            drawn += await asyncio.gather(*(one(sampling) for _ in range(8)))
        await engine.close()
    return drawn


def compare(model: Path, drawn: list[tuple[list[int], Completion]], temperature: float) -> None:
    """Print the mismatch over the kept tokens and over the whole vocabulary."""
    from agent_rl.train.megatron.model import PolicyModel

    trainer = PolicyModel.build(model, ParallelConfig(), device=torch.device("cpu"))
    found: dict[str, list[np.ndarray]] = {"kept tokens": [], "whole vocabulary": [], "engine": []}
    for prompt, got in drawn:
        assert got.routing is not None
        tokens = np.array([*prompt, *got.tokens], np.int32)
        mask, logprobs = np.arange(len(tokens)) >= PROMPT, np.array([0.0] * PROMPT + [*got.logprobs], np.float32)
        item = packed(pack([Sample(tokens, mask, logprobs, 0.0, None, kept=got.kept)], (0,)))
        experts = torch.from_numpy(np.concatenate([got.routing.experts, got.routing.experts[-1:]]))
        routes = PackedRoutes(experts, torch.arange(len(tokens)) < len(tokens) - 1)
        for name, batch in {"kept tokens": item, "whole vocabulary": replace(item, kept=None)}.items():
            output = trainer.forward_logprobs([batch], [routes], temperature=temperature)[0]
            found[name].append(output.logprobs[mask].double().numpy())
        found["engine"].append(np.array(got.logprobs))
    engine = np.concatenate(found.pop("engine"))
    counts = np.concatenate([got.kept.counts for _, got in drawn if got.kept is not None])
    print(f"{len(engine)} tokens, {counts.mean():.1f} kept ids per token (median {np.median(counts):.0f})")
    for name, parts in found.items():
        pair = np.concatenate(parts), engine
        print(f"{name}: k3 {k3_kl(*pair):.3g}, mean difference {logprob_abs_diff(*pair):.3g} nats")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--rounds", type=int, default=6, help="sequences of 500 tokens that are timed, of each kind")
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--temperature", type=float, default=1.5)
    parser.add_argument("--dtype", default="float32", help="of the engine; the trainer computes in float32")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        install_model(model := Path(scratch) / "model")
        drawn = asyncio.run(sample(model, chosen))
        init_parallel(ParallelConfig(), 0, master_addr="127.0.0.1", master_port=free_port(), device=torch.device("cpu"))
        compare(model, drawn, chosen.temperature)
        destroy_parallel()


if __name__ == "__main__":
    main()
