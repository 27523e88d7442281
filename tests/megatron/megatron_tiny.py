"""A tiny random Qwen3-MoE (or other) checkpoint made by transformers, and the packed data the tests run on it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB, EXPERTS, TOP_K, LAYERS = 96, 8, 2, 4
LENGTHS = (17, 1, 30, 9)


def make(directory: Path, *, kind: str = "qwen3_moe", tied: bool = True, seed: int = 0, **changes: Any) -> Any:
    """Save a model of ``kind`` (a model_type) in ``directory`` and return it (float32, evaluation mode)."""
    torch.manual_seed(seed)
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
    }
    experts = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    }
    sizes = {k: v for k, v in (common | (experts if "moe" in kind else {}) | changes).items() if v is not None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):  # ones and zeros would hide one that is not applied
            parameter.data += 0.2 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer += 0.2 * torch.randn_like(buffer)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return model


def sequences(seed: int = 1, lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]


def random_routes(tokens: int, layers: int = LAYERS, seed: int = 2) -> torch.Tensor:
    """Distinct random experts, ``[tokens, layers, TOP_K]`` uint8: rows can be told apart."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, layers, EXPERTS, generator=generator).argsort(-1)[..., :TOP_K].to(torch.uint8)


def reserved_port() -> socket.socket:
    """A socket bound to a free port of the loopback: the port is nobody else's while it is open."""
    holder = socket.socket()
    holder.bind(("127.0.0.1", 0))
    return holder


def free_port() -> int:
    with reserved_port() as probe:
        return int(probe.getsockname()[1])
