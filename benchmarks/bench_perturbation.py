"""What replay does for a trainer whose weights are a little off the engine's: flipped routers and k3-KL.

Run: ``OMP_NUM_THREADS=2 python benchmarks/bench_perturbation.py [model directory]``

The engine is a model, and samples sequences; the trainer is the same model with Gaussian noise on every weight, its
standard deviation a share of that of the weight's tensor. Each trainer scores the sampled tokens with its own routes
and with the engine's. Everything is float32, so the noise is the only difference. Without a directory: the quickstart's
model (where it is unpacked) and a random one of 8 layers with 32 experts each, top-4.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agent_rl.config import ParallelConfig
from agent_rl.config.loader import MODELS
from agent_rl.train.megatron.packed_batch import PackedBatch, PackedRoutes
from agent_rl.train.megatron.parallel import destroy_parallel, init_parallel
from r3.mismatch.report import k3_kl, logprob_abs_diff

QUICKSTART = MODELS["tiny-moe"]
NOISE = (1e-3, 1e-2, 5e-2)
SEQUENCES, TOKENS, SEEDS = 64, 128, 3


def save_random(directory: Path) -> None:
    """A random model, wider than the quickstart's."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(directory)


def sample(directory: Path) -> PackedBatch:
    """Sequences the model samples at temperature 1, each from a random first token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    first = torch.randint(3, model.config.vocab_size, (SEQUENCES, 1))
    everything = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "eos_token_id": None}
    with torch.no_grad():
        tokens = model.generate(first, max_new_tokens=TOKENS, min_new_tokens=TOKENS, pad_token_id=0, **everything)
    return PackedBatch.from_sequences(list(tokens))


def perturb(model: Any, weights: list[Tensor], noise: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter, weight in zip(model.modules[0].parameters(), weights, strict=True):
        spread = weight.std() if weight.numel() > 1 else weight.abs()
        parameter.data = weight + noise * spread * torch.randn(weight.shape, generator=generator)


def compare(directory: Path) -> None:
    """Print one table."""
    from agent_rl.train.megatron.model import PolicyModel

    batch = sample(directory)
    model = PolicyModel.build(directory, ParallelConfig(), device=torch.device("cpu"))
    weights = [parameter.data.clone() for parameter in model.modules[0].parameters()]
    engine = model.forward_logprobs([batch], None, record=True)[0]
    assert engine.routes is not None
    given = PackedRoutes(engine.routes, torch.ones(len(batch), dtype=torch.bool))
    sampled = torch.ones(len(batch), dtype=torch.bool)
    sampled[batch.cu_seqlens[:-1].long()] = False

    def score(routes: PackedRoutes | None) -> tuple[float, float, float]:
        """Share of routers that differ, k3-KL, mean absolute difference of the log-probs."""
        trainer = model.forward_logprobs([batch], [routes], record=True)[0]
        assert trainer.routes is not None
        flips = (trainer.routes.sort(-1).values != given.experts.sort(-1).values).any(-1)
        pair = [output.logprobs[sampled].double().numpy() for output in (trainer, engine)]
        return float(flips.float().mean()), k3_kl(*pair), logprob_abs_diff(*pair)

    print(
        f"{directory.name}: {int(sampled.sum())} sampled tokens, {model.moe_layers} layers, "
        f"top-{model.model_spec.top_k} of ",
        end="",
    )
    print(f"{model.model_spec.num_experts}; medians of {SEEDS} draws of noise")
    print(
        "| noise | routers flipped, native | replayed | k3-KL native | replayed | ratio | abs diff native | replayed |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for noise in NOISE:
        rows = []
        for seed in range(SEEDS):
            perturb(model, weights, noise, seed)
            rows.append((*score(None), *score(given)))
        own, own_k3, own_diff, flips, k3, diff = np.median(rows, axis=0)
        ratio = np.median([row[1] / row[4] for row in rows])
        print(f"| {noise:g} | {own:.1%} | {flips:.1%} | {own_k3:.2e} | {k3:.2e} | {ratio:.1f} |", end="")
        print(f" {own_diff:.2e} | {diff:.2e} |")


def main(model: Path | None) -> None:
    torch.manual_seed(0)
    if model is not None:
        return compare(model)
    if QUICKSTART.is_dir():
        compare(QUICKSTART)
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent) / "random"
        save_random(directory)
        compare(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="a directory")
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    init_parallel(ParallelConfig(), 0, master_addr="127.0.0.1", master_port=port, device=torch.device("cpu"))
    try:
        main(options.model)
    finally:
        destroy_parallel()
