"""Sizes of tiny models, as in a checkpoint's config.json."""

from __future__ import annotations

from typing import Any

DENSE_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
EXPERT_SIZES: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GLM4_MOE_SIZES: dict[str, Any] = EXPERT_SIZES | {
    "num_experts": None,
    "n_routed_experts": EXPERT_SIZES["num_experts"],
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
"""With everything that distinguishes the family; a size of None is left out."""
_OTHER_NAMES = dict.fromkeys((*EXPERT_SIZES, "norm_topk_prob"))
GPT_OSS_SIZES: dict[str, Any] = _OTHER_NAMES | {
    "num_local_experts": EXPERT_SIZES["num_experts"],
    "num_experts_per_tok": EXPERT_SIZES["num_experts_per_tok"],
    "intermediate_size": EXPERT_SIZES["moe_intermediate_size"],
    "sliding_window": 8,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "truncate": False,
    },
}
ERNIE4_5_MOE_SIZES: dict[str, Any] = _OTHER_NAMES | {
    "moe_num_experts": EXPERT_SIZES["num_experts"],
    "moe_k": EXPERT_SIZES["num_experts_per_tok"],
    "moe_intermediate_size": EXPERT_SIZES["moe_intermediate_size"],
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
}
DELTA_SIZES: dict[str, Any] = EXPERT_SIZES | {
    "head_dim": 16,
    "shared_expert_intermediate_size": 40,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}
"""Of a hybrid of the gated delta rule and grouped-query attention."""
DEEPSEEK_V3_SIZES: dict[str, Any] = EXPERT_SIZES | {
    "num_experts": None,
    "n_routed_experts": EXPERT_SIZES["num_experts"],
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "num_key_value_heads": DENSE_SIZES["num_attention_heads"],
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
INDEXER_SIZES: dict[str, Any] = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 12}
"""An indexer that leaves out most tokens of a sequence."""
NEMOTRON_H_SIZES: dict[str, Any] = _OTHER_NAMES | {
    "num_hidden_layers": None,
    "hybrid_override_pattern": "ME*-ME",
    "n_routed_experts": EXPERT_SIZES["num_experts"],
    "num_experts_per_tok": EXPERT_SIZES["num_experts_per_tok"],
    "moe_intermediate_size": EXPERT_SIZES["moe_intermediate_size"],
    "moe_shared_expert_intermediate_size": 40,
    "norm_topk_prob": True,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "mamba_n_groups": 2,
    "ssm_state_size": 8,
    "conv_kernel": 4,
    "time_step_min": 1e-9,
    "rope_theta": None,
}
"""Engines and the trainer have no lower bound of the time step, transformers has ``time_step_min``."""
