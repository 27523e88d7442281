"""Readers of families with multi-head latent attention: DeepSeek-V3, DeepSeek-V3.2, Kimi-K2, GLM-5."""

from __future__ import annotations

from typing import Any

from agent_rl.models.config_keys import ConfigKeys
from agent_rl.models.parts import Indexer, Latent

UNUSED = frozenset(
    {"aux_loss_alpha", "auto_map", "ep_size", "head_dim", "num_mtp_layers", "num_nextn_predict_layers", "qk_head_dim"}
    | {"seq_aux"}
)
"""Keys that do not change the logits: losses of pretraining, layers for multi-token prediction, and sums of others."""
_GIVEN = ("first_k_dense_replace", "n_group", "n_shared_experts", "q_lora_rank", "routed_scaling_factor", "topk_group")
"""transformers and SGLang have defaults of DeepSeek-V3's sizes for missing keys; null says that there is none."""
YARN_KEYS = frozenset({"mscale", "mscale_all_dim"})


def read_latent(keys: ConfigKeys) -> dict[str, Any]:
    """DeepSeek-V3's own keys, by the names of :func:`agent_rl.models.families.read_config`."""
    keys.expect("scoring_func", "sigmoid")
    keys.expect("topk_method", "noaux_tc")
    keys.expect("moe_layer_freq", 1)
    keys.given(*_GIVEN)
    heads, layers = keys.count("num_attention_heads", 0), keys.count("num_hidden_layers", 0)
    latent = Latent(
        q_rank=keys.count("q_lora_rank", 0),
        kv_rank=keys.positive("kv_lora_rank"),
        plain_dim=keys.positive("qk_nope_head_dim"),
        rotary_dim=keys.positive("qk_rope_head_dim"),
        value_dim=keys.positive("v_head_dim"),
        interleaved=keys.flag("rope_interleave", True),
    )
    return {
        "mixers": ("latent",) * layers,
        "latent": latent,
        "num_key_value_heads": heads,
        "head_dim": latent.plain_dim + latent.rotary_dim,
        "rotary_dim": latent.rotary_dim,
        "mlp_only_layers": tuple(range(keys.dense_layers(layers))),
        **keys.sigmoid_router(),
    }


def read_deepseek_v32(keys: ConfigKeys) -> dict[str, Any]:
    """As DeepSeek-V3, with an indexer that rotates halves."""
    keys.expect("indexer_rope_interleave", False)
    return _read_sparse(keys, interleaved=False)


def read_glm_moe_dsa(keys: ConfigKeys) -> dict[str, Any]:
    """As DeepSeek-V3, with an indexer that rotates neighbors. Engines rotate halves without the key, transformers never
    does."""
    keys.require("indexer_rope_interleave")
    keys.expect("indexer_rope_interleave", True)
    keys.expect("index_topk_freq", 1)
    keys.expect("index_topk_pattern", None)
    keys.get("index_skip_topk_offset", None)
    keys.each("indexer_types", "full")
    return _read_sparse(keys, interleaved=True)


def _read_sparse(keys: ConfigKeys, *, interleaved: bool) -> dict[str, Any]:
    keys.each("layer_types", "indexed_attention")
    keys.positive("q_lora_rank")
    keys.expect("rope_interleave", True)
    heads, head_dim, top_k = (keys.positive(name) for name in ("index_n_heads", "index_head_dim", "index_topk"))
    return read_latent(keys) | {"indexer": Indexer(heads, head_dim, top_k, interleaved)}
