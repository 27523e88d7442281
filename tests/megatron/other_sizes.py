"""Sizes of models that no other test has, drawn for each family: layers, heads, experts, shared experts and groups."""

from __future__ import annotations

import random
from typing import Any

Sizes = dict[str, Any]


def other_sizes(kind: str, seed: int) -> tuple[Sizes, tuple[int, ...]]:
    """Changes of the sizes of ``kind`` (a model_type), and the layers that have experts."""
    draw = random.Random(f"{kind} {seed}")
    layers, kv_heads = draw.choice((3, 5)), draw.choice((1, 2, 3))
    sizes: Sizes = {
        "num_hidden_layers": layers,
        "hidden_size": draw.choice((24, 40, 56)),
        "intermediate_size": draw.choice((20, 44)),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw.choice((1, 2, 3)),
        "head_dim": draw.choice((8, 12, 20)),
        "initializer_range": 0.15,  # larger weights amplify rounding in 5 layers beyond the limits
    }
    dense = draw.choice((1, 2))
    own = _OWN[kind](draw, sizes, dense)
    if kind in ("qwen2", "qwen3"):
        return sizes | own, ()
    if kind == "nemotron_h":
        return sizes | own, tuple(i for i, letter in enumerate(own["hybrid_override_pattern"]) if letter == "E")
    first = dense if kind in _DENSE_FIRST else 0
    return sizes | own, tuple(range(first, layers))


_DENSE_FIRST = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "ernie4_5_moe")


def _experts(draw: random.Random, **names: str) -> Sizes:
    """``names``: the family's keys that differ."""
    sizes = {
        "num_experts": draw.choice((12, 16, 20)),
        "num_experts_per_tok": draw.choice((3, 4)),
        "moe_intermediate_size": draw.choice((12, 20, 28)),
    }
    return {names.get(key, key): size for key, size in sizes.items()}


def _without_head_dim(sizes: Sizes) -> Sizes:
    """The family's heads are as wide as the hidden size allows."""
    return {"head_dim": None, "hidden_size": sizes["num_attention_heads"] * 12}


def _dense(draw: random.Random, sizes: Sizes, dense: int) -> Sizes:
    return {}


def _qwen2(draw: random.Random, sizes: Sizes, dense: int) -> Sizes:
    return _without_head_dim(sizes)


def _qwen3_moe(draw: random.Random, sizes: Sizes, dense: int) -> Sizes:
    return _experts(draw)


def _qwen2_moe(draw: random.Random, sizes: Sizes, dense: int) -> Sizes:
    return _experts(draw) | _without_head_dim(sizes) | {"shared_expert_intermediate_size": draw.choice((12, 52))}


def _olmoe(draw: random.Random, sizes: Sizes, dense: int) -> Sizes:
    return _experts(draw, moe_intermediate_size="intermediate_size") | _without_head_dim(sizes)


def _local(draw: random.Random, sizes: Sizes, dense: int) -> Sizes:
    return _experts(draw, num_experts="num_local_experts", moe_intermediate_size="intermediate_size")


def _minimax_m2(draw: random.Random, sizes: Sizes, dense: int) -> Sizes:
    return _local(draw, sizes, dense) | {"rotary_dim": draw.choice((4, 8))}


def _gpt_oss(draw: random.Random, sizes: Sizes, dense: int) -> Sizes:
    return _local(draw, sizes, dense) | {"sliding_window": draw.choice((3, 17))}


def _ernie4_5_moe(draw: random.Random, sizes: Sizes, dense: int) -> Sizes:
    experts = _experts(draw, num_experts="moe_num_experts", num_experts_per_tok="moe_k")
    return experts | {"moe_num_shared_experts": draw.choice((1, 3)), "moe_layer_start_index": dense}


def _grouped(draw: random.Random, dense: int) -> Sizes:
    groups = draw.choice((1, 2, 4))
    return _experts(draw, num_experts="n_routed_experts") | {
        "n_shared_experts": draw.choice((1, 2, 3)),
        "first_k_dense_replace": dense,
        "n_group": groups,
        "topk_group": max(1, groups // 2) if groups < 4 else 3,
    }


def _glm4_moe(draw: random.Random, sizes: Sizes, dense: int) -> Sizes:
    return _grouped(draw, dense)


def _deepseek_v3(draw: random.Random, sizes: Sizes, dense: int) -> Sizes:
    return _grouped(draw, dense) | {
        "head_dim": None,
        "num_key_value_heads": sizes["num_attention_heads"],
        "q_lora_rank": draw.choice((12, 28)),
        "kv_lora_rank": draw.choice((12, 36)),
        "qk_nope_head_dim": draw.choice((8, 20)),
        "qk_rope_head_dim": draw.choice((4, 12)),
        "v_head_dim": draw.choice((8, 20)),
    }


def _sparse(draw: random.Random, sizes: Sizes, dense: int) -> Sizes:
    latent = _deepseek_v3(draw, sizes, dense)
    return latent | {"index_head_dim": latent["qk_rope_head_dim"] + 8, "index_topk": draw.choice((5, 40))}


def _delta(draw: random.Random, sizes: Sizes, dense: int) -> Sizes:
    key_heads = draw.choice((1, 2, 3))
    return _experts(draw) | {
        "shared_expert_intermediate_size": draw.choice((12, 52)),
        "initializer_range": 0.07,
        "decoder_sparse_step": None,
        "full_attention_interval": draw.choice((2, 3)),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw.choice((1, 3)),
        "linear_key_head_dim": draw.choice((8, 12)),  # narrower keys amplify rounding when they are normed
        "linear_value_head_dim": draw.choice((4, 12)),
        "linear_conv_kernel_dim": draw.choice((2, 3)),
    }


def _nemotron_h(draw: random.Random, sizes: Sizes, dense: int) -> Sizes:
    groups = draw.choice((1, 2, 3))
    return _grouped(draw, dense) | {
        "first_k_dense_replace": None,
        "n_shared_experts": 1,
        "num_hidden_layers": None,
        "hybrid_override_pattern": draw.choice(("EM*M", "M*E-ME", "MEM*E")),
        "moe_shared_expert_intermediate_size": draw.choice((12, 52)),
        "n_groups": groups,
        "mamba_n_groups": groups,
        "mamba_num_heads": groups * draw.choice((1, 2)),
        "mamba_head_dim": draw.choice((8, 20)),
        "ssm_state_size": draw.choice((4, 12)),
        "conv_kernel": draw.choice((2, 3)),
    }


_OWN = {
    "nemotron_h": _nemotron_h,
    "qwen2": _qwen2,
    "qwen3": _dense,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "ernie4_5_moe": _ernie4_5_moe,
    "olmoe": _olmoe,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _sparse,
    "glm_moe_dsa": _sparse,
    "minimax_m2": _minimax_m2,
    "qwen3_next": _delta,
    "qwen3_5_moe_text": _delta,
    "mixtral": _local,
}
