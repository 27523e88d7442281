"""Megatron's configuration for a model spec."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.activations import squared_relu
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.transformer_config import TransformerConfig

from agent_rl.config import ParallelConfig, Recompute
from agent_rl.models.spec import ModelSpec
from agent_rl.train.parallel_checks import expert_problems, model_problems, recompute_problems, refuse
from r3.shard import stage_layers


def transformer_config(
    model: ModelSpec, parallel: ParallelConfig, dtype: torch.dtype, recompute: Recompute, modules: Sequence[str]
) -> TransformerConfig:
    """Megatron's configuration, without options that need Transformer Engine or Apex.

    Raises ConfigError where the layout does not fit the model (:mod:`agent_rl.train.parallel_checks`).
    """
    full = recompute == "full"
    modules = tuple(modules) if recompute == "selective" else ()
    refuse(
        model_problems(parallel, model)
        + recompute_problems(modules, model)
        + expert_problems(str(dtype).removeprefix("torch."), model)
    )
    virtual = parallel.virtual_pipeline > 1
    if "layernorm" in modules:
        # Megatron 0.16.1 reads the default fp8=False as a request for fp8, which needs Transformer Engine.
        tensor_parallel.CheckpointWithoutOutput = partial(CheckpointWithoutOutput, fp8=None)
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.inner,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        gated_linear_unit=model.expert_form != "squared",
        activation_func=squared_relu if model.expert_form == "squared" else F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=model.init_std,
        # Without initialization Megatron does not mark parameters as sharded over tensor ranks, and the gradient norm
        # misses those of other ranks.
        perform_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if virtual else None,
        pipeline_model_parallel_layout=_stages(model, parallel),
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        sequence_parallel=parallel.tensor > 1,
        variable_seq_lengths=parallel.pipeline > 1,
        batch_p2p_comm=False,
        # Otherwise the interleaved schedule exchanges activations and gradients in one call. With two stages the next
        # stage is also the previous one, and each would receive the other's lengths.
        overlap_p2p_comm=virtual,
        # The loss function normalizes by global counts, so gradients are summed and never averaged.
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        cuda_graph_scope=[],
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        moe_token_dispatcher_type=parallel.dispatcher,
        recompute_granularity=None if recompute == "none" else recompute,
        recompute_modules=list(modules) if recompute == "selective" else None,
        recompute_method="uniform" if full else None,
        recompute_num_layers=1 if full else None,
        **_moe_options(model),
    )


def _stages(model_spec: ModelSpec, parallel: ParallelConfig) -> list[list[str]] | None:
    """The parts of each model chunk, in the order of the layers (Megatron's ``PipelineParallelLayerLayout``); None for
    chunks of equal length."""
    stages = stage_layers(model_spec.num_layers, parallel.pipeline, parallel.virtual_pipeline)
    chunks = [["decoder"] * len(stage[part]) for part in range(parallel.virtual_pipeline) for stage in stages]
    if len(chunks[0]) == len(chunks[-1]):
        return None
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return chunks


def _moe_options(model_spec: ModelSpec) -> dict[str, Any]:
    if not any(model_spec.moe):
        return {}
    shared, corrected = model_spec.shared_inner or None, bool(model_spec.family.correction)
    return {
        "num_moe_experts": model_spec.num_experts,
        "moe_ffn_hidden_size": model_spec.expert_inner,
        "moe_router_topk": model_spec.top_k,
        "moe_layer_freq": [int(moe) for moe in model_spec.moe],
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": shared is not None and model_spec.family.shared_gate,
        # The gate computes scores itself; Megatron accepts a bias only with sigmoid scores. Its default rate would move
        # the bias in every pass, without the optimizer.
        "moe_router_pre_softmax": not model_spec.norm_topk_prob and not corrected,  # Megatron requires it for top-1
        "moe_router_score_function": "sigmoid" if corrected else "softmax",
        "moe_router_enable_expert_bias": corrected,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "moe_router_fusion": False,
        "moe_enable_routing_replay": True,
    }
