"""Small Qwen3-MoE checkpoints of random weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

TOP_K = 2
"""Experts that a token takes."""
CONSTANT = json.loads("""
{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts_per_tok": 2, "norm_topk_prob": true,
 "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu", "max_position_embeddings": 4096,
 "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attention_bias": false, "tie_word_embeddings": true,
 "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 0}
""")
"""What the ``config.json`` of every checkpoint contains."""


def write_moe(
    directory: Path,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv: int,
    head_dim: int,
    experts: int,
    inter: int,
    vocab: int,
) -> Path:
    """A Qwen3-MoE checkpoint with tied embeddings and seeded random weights."""
    directory.mkdir(parents=True)
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
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "head_dim": head_dim, "num_experts": experts}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv}
    sizes |= {"intermediate_size": inter, "moe_intermediate_size": inter}
    config = CONSTANT | sizes
    (directory / "config.json").write_text(json.dumps(config))
    return directory
