"""A tiny Qwen3-MoE with structured initial weights, as a Hugging Face checkpoint. numpy only.

From plain random weights so small a model takes very long to find out how to copy text, and an agent that cannot copy
a line cannot edit one. So two attention heads start out as an induction circuit: a head of layer 0 attends to the
previous token, and a head of layer 1 attends to where the current token's successor stood before and copies it.
Everything else is random; training is free to change all of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class TinyMoe:
    """The sizes (Qwen3-MoE's names)."""

    vocab_size: int = 1024
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    rope_theta: float = 1e6

    def config(self, eos: int, pad: int) -> dict[str, Any]:
        """``config.json``."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.moe_intermediate_size * self.num_experts_per_tok,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
            "moe_intermediate_size": self.moe_intermediate_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.001,
            "output_router_logits": False,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": 4096,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "sliding_window": None,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "use_cache": True,
            "torch_dtype": "bfloat16",
            "eos_token_id": eos,
            "pad_token_id": pad,
            "bos_token_id": None,
        }


SHAPES: Mapping[str, TinyMoe] = {
    "tiny": TinyMoe(),
    "paper": TinyMoe(num_hidden_layers=8, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=16),
}
"""The quickstart's sizes, and narrow ones with as many experts as Qwen3-30B-A3B: its eighth and ninth logits of 128 lie
so close that bfloat16 often swaps them."""


def initial_weights(sizes: TinyMoe, seed: int) -> Weights:
    """Random weights by their Hugging Face names, with the induction circuit in layers 0 and 1."""
    rng = np.random.default_rng(seed)

    def normal(std: float, *shape: int) -> NDArray[np.float32]:
        return (std * rng.standard_normal(shape)).astype(np.float32)

    hidden, head = sizes.hidden_size, sizes.head_dim
    weights: Weights = {
        "model.embed_tokens.weight": normal(0.1, sizes.vocab_size, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for layer in range(sizes.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        weights[f"{attention}.q_proj.weight"] = normal(0.05, sizes.num_attention_heads * head, hidden)
        weights[f"{attention}.k_proj.weight"] = normal(0.05, sizes.num_key_value_heads * head, hidden)
        weights[f"{attention}.v_proj.weight"] = normal(0.05, sizes.num_key_value_heads * head, hidden)
        weights[f"{attention}.o_proj.weight"] = normal(0.01, hidden, sizes.num_attention_heads * head)
        for norm, width in (("q_norm", head), ("k_norm", head)):
            weights[f"{attention}.{norm}.weight"] = np.full(width, 1.7, np.float32)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{norm}.weight"] = np.ones(hidden, np.float32)
        weights[f"{prefix}.mlp.gate.weight"] = normal(0.05, sizes.num_experts, hidden)
        for expert in range(sizes.num_experts):
            mlp, inner = f"{prefix}.mlp.experts.{expert}", sizes.moe_intermediate_size
            weights[f"{mlp}.gate_proj.weight"] = normal(0.05, inner, hidden)
            weights[f"{mlp}.up_proj.weight"] = normal(0.05, inner, hidden)
            weights[f"{mlp}.down_proj.weight"] = normal(0.01, hidden, inner)
    _set_induction_circuit(weights, sizes, rng)
    return weights


def _set_induction_circuit(weights: Weights, sizes: TinyMoe, rng: np.random.Generator) -> None:
    """Hand-set head 0 of layer 0 (previous token) and head 0 of layer 1 (induction).

    Embedding dimension 0 is a constant for both to hold on to: the tied output layer turns it into the same logit for
    every token, which changes no probability.
    """
    head, half = sizes.head_dim, sizes.head_dim // 2
    basis = np.linalg.qr(rng.standard_normal((sizes.hidden_size - 1, sizes.hidden_size - 1)))[0].astype(np.float32)
    token, written = (np.zeros((half, sizes.hidden_size), np.float32) for _ in range(2))
    token[:, 1:], written[:, 1:] = basis[:half], basis[half : 2 * half]
    weights["model.embed_tokens.weight"][:, 0] = 0.5

    first, second = "model.layers.0.self_attn", "model.layers.1.self_attn"
    query, key = _previous_token_vectors(sizes)
    for name, vector in (("q_proj", query), ("k_proj", key)):
        weights[f"{first}.{name}.weight"][:head] *= 0.1
        weights[f"{first}.{name}.weight"][:head, 0] = vector
    _copy(weights, first, token, written, 0.25, head)

    # RoPE's slow half turns little over an episode: there a query meets a key by content, wherever it stands.
    slow = np.r_[half // 2 : half, half + half // 2 : head]
    for name, reads in (("q_proj", token), ("k_proj", written)):
        weights[f"{second}.{name}.weight"][:head] *= 0.1
        weights[f"{second}.{name}.weight"][slow] = reads
    full = np.zeros((head, sizes.hidden_size), np.float32)
    full[:, 1:] = np.linalg.qr(rng.standard_normal((sizes.hidden_size - 1, head)))[0].T
    _copy(weights, second, full, full, 0.25, head)


def _copy(
    weights: Weights,
    attention: str,
    reads: NDArray[np.float32],
    writes: NDArray[np.float32],
    gain: float,
    head: int,
) -> None:
    """Make head 0 move what ``reads`` sees at the attended place to where ``writes`` points."""
    rows = len(reads)
    weights[f"{attention}.v_proj.weight"][:rows] = reads
    weights[f"{attention}.v_proj.weight"][rows:head] *= 0.1
    weights[f"{attention}.o_proj.weight"][:, :rows] = gain * writes.T


def _previous_token_vectors(sizes: TinyMoe) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A constant query and key whose product under RoPE is largest at a distance of one token."""
    half = sizes.head_dim // 2
    turns = sizes.rope_theta ** (-np.arange(half) / half)
    size = np.zeros(half)
    size[:6] = np.sqrt([0.3, 0.25, 0.15, 0.1, 0.1, 0.1])
    query = np.concatenate([size * np.cos(turns), -size * np.sin(turns)])
    key = np.concatenate([size, np.zeros(half)])
    return query.astype(np.float32), key.astype(np.float32)


def save_checkpoint(directory: Path, weights: Weights, sizes: TinyMoe, *, eos: int, pad: int) -> None:
    """Write ``model.safetensors``, ``config.json`` and ``generation_config.json`` into ``directory``.

    The tied output projection is written out too: SGLang's Qwen3-MoE never ties.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weights = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].copy()}
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(sizes.config(eos, pad), indent=2) + "\n")
    generation = {"eos_token_id": eos, "pad_token_id": pad, "do_sample": True, "temperature": 1.0}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
