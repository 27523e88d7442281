"""The layers Megatron leaves to Transformer Engine, and the layer specification built from them."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from agent_rl.config import LoraConfig
from agent_rl.train.expert_balancing.borrowed_experts import BalancedExperts
from agent_rl.train.expert_balancing.moe_layer import BalancedMoELayer, EvenBalancedMoELayer
from agent_rl.train.megatron.attention import CoreAttention
from agent_rl.train.megatron.kernel_choice import Kernels
from agent_rl.train.megatron.kernels import rms_norm
from agent_rl.train.megatron.lora import AdaptedColumn, AdaptedExperts, AdaptedRow
from agent_rl.train.megatron.moe import EvenMoELayer, Experts, ReleasingMoELayer


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last axis, in float32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_unused: Any) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Tensor ranks see different tokens, so Megatron must add up this weight's gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def block_spec(
    config: TransformerConfig,
    moe: list[bool],
    virtual_stage: int | None,
    *,
    kernels: Kernels,
    balanced: bool = False,
    lora: LoraConfig | None = None,
) -> TransformerBlockSubmodules:
    """The layers of a model chunk of this pipeline stage (``virtual_stage`` None where a stage is one chunk).

    ``moe[i]`` says whether layer i of the whole model is a mixture of experts. ``balanced``: experts may be
    borrowed. ``lora``: attention and experts have adapters.
    """
    chunks = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    offset, count = get_transformer_layer_offset(config, virtual_stage), config.num_layers // chunks
    layers = [_layer_spec(config, moe[index], kernels, balanced, lora) for index in range(offset, offset + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _layer_spec(
    config: TransformerConfig, moe: bool, kernels: Kernels, balanced: bool, lora: LoraConfig | None
) -> ModuleSpec:
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    shared = ModuleSpec(module=SharedExpertMLP, submodules=linears)
    adapted = {} if lora is None else {"lora": lora}
    kind = BalancedExperts if balanced else Experts if lora is None else AdaptedExperts
    own = ModuleSpec(module=kind, params={"product": kernels.product, **adapted})
    submodules = MoESubmodules(experts=own, shared_experts=shared)
    experts = ModuleSpec(module=_moe_layer(config, balanced), submodules=submodules)
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ModuleSpec(module=AdaptedColumn if lora else ColumnParallelLinear, params=adapted),
            core_attention=ModuleSpec(module=CoreAttention, params={"attend": kernels.attend}),
            linear_proj=ModuleSpec(module=AdaptedRow if lora else RowParallelLinear, params=adapted),
            q_layernorm=RMSNorm if config.qk_layernorm else None,
            k_layernorm=RMSNorm if config.qk_layernorm else None,
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=experts if moe else ModuleSpec(module=MLP, submodules=linears),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _moe_layer(config: TransformerConfig, balanced: bool) -> type[ReleasingMoELayer]:
    if config.moe_token_dispatcher_type == "allgather":
        return EvenBalancedMoELayer if balanced else EvenMoELayer
    return BalancedMoELayer if balanced else ReleasingMoELayer
