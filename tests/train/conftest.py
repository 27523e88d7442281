"""A tiny Qwen3-MoE checkpoint and samples for the trainer's tests."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from agent_rl.config import RunConfig
from agent_rl.types import Sample
from r3.routing import Routing, Span, SpanKind

sys.path.insert(0, str(Path(__file__).parent))  # tests import the worker processes' modules too

LAYERS, EXPERTS, TOP_K, VOCAB = 2, 4, 2, 64


def write_moe(
    folder: Path, *, layers: int, hidden: int, heads: int, kv: int, head_dim: int, experts: int, inter: int, vocab: int
) -> Path:
    """A Qwen3-MoE checkpoint with tied embeddings and seeded random weights."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)

    def draw(*shape: int, std: float) -> NDArray[np.float32]:
        return (generator.standard_normal(shape) * std).astype(np.float32)

    weights = {"model.embed_tokens.weight": draw(vocab, hidden, std=0.3), "model.norm.weight": np.ones(hidden, "f4")}
    for layer in range(layers):
        p = f"model.layers.{layer}."
        norms = ("input_layernorm", "post_attention_layernorm")
        weights |= {p + f"{name}.weight": np.ones(hidden, "f4") for name in norms}
        weights |= {p + f"self_attn.{name}_norm.weight": np.ones(head_dim, "f4") for name in "qk"}
        weights |= {
            p + f"self_attn.{name}_proj.weight": draw(width * head_dim, hidden, std=0.1)
            for name, width in (("q", heads), ("k", kv), ("v", kv))
        }
        weights[p + "self_attn.o_proj.weight"] = draw(hidden, heads * head_dim, std=0.1)
        weights[p + "mlp.gate.weight"] = draw(experts, hidden, std=0.3)
        for expert in range(experts):
            q = p + f"mlp.experts.{expert}."
            weights |= {q + f"{name}_proj.weight": draw(inter, hidden, std=0.1) for name in ("gate", "up")}
            weights[q + "down_proj.weight"] = draw(hidden, inter, std=0.1)
    # Tied, and still written: SGLang's Qwen3-MoE does not tie its output layer to the embedding.
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "moe_intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "num_experts": experts,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 layers, 4 experts top-2, 64 tokens of vocabulary."""
    return write_moe(
        tmp_path_factory.mktemp("models") / "tiny-moe",
        layers=LAYERS,
        hidden=64,
        heads=4,
        kv=2,
        head_dim=16,
        experts=EXPERTS,
        inter=32,
        vocab=VOCAB,
    )


def routing_of(tokens: int, seed: int, *, missing: tuple[int, ...] = ()) -> Routing:
    """Random distinct experts for all rows but the last (and ``missing``)."""
    generator = np.random.default_rng(seed)
    experts = generator.random((tokens, LAYERS, EXPERTS)).argsort(axis=-1)[..., :TOP_K].astype(np.uint8)
    present = np.ones(tokens, bool)
    present[[*missing, tokens - 1]] = False
    experts[~present] = 0
    kinds = [SpanKind.PREFILLED if row else SpanKind.MISSING for row in present]
    spans = tuple(Span(i, i + 1, "1", "test", kind) for i, kind in enumerate(kinds))
    return Routing(experts, present, spans, EXPERTS)


def sample_of(length: int, seed: int, *, advantage: float = 1.0, routes: bool = True) -> Sample:
    """A random sample: the second half is sampled, with made-up rollout log-probs."""
    generator = np.random.default_rng(seed)
    mask = np.arange(length) >= max(1, length // 2)
    logprobs = np.where(mask, -generator.random(length) * 4, 0).astype(np.float32)
    tokens = generator.integers(0, VOCAB, length).astype(np.int32)
    return Sample(tokens, mask, logprobs, advantage, routing_of(length, seed) if routes else None)


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    return sample_of


@pytest.fixture
def run_config(tiny_moe: Path) -> Callable[..., RunConfig]:
    """A run config on the tiny model; keywords go into its ``train`` section."""

    def build(**train: object) -> RunConfig:
        settings = {"device": "cpu", "microbatch_tokens": 64, "lr": 1e-2, **train}
        return RunConfig.model_validate({"name": "test", "model": tiny_moe, "train": settings})

    return build
