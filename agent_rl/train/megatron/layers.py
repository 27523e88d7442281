"""The layers Megatron leaves to Transformer Engine, and the layer specification built from them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from agent_rl.train.megatron.attention import CoreAttention


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
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Experts(torch.nn.Module):
    """This rank's experts with stacked weights: ``weight1 [E, 2 I, H]`` (gate over up) and ``weight2 [E, H, I]``."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, pg_collection: Any = None) -> None:
        super().__init__()
        if pg_collection.expt_tp.size() != 1:
            raise ValueError("experts are not cut over tensor ranks: expert_tensor_parallel_size must be 1")
        inner, hidden = config.moe_ffn_hidden_size, config.hidden_size
        self.weight1 = self._weight(config, num_local_experts, 2 * inner, hidden)
        self.weight2 = self._weight(config, num_local_experts, hidden, inner)

    @staticmethod
    def _weight(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
        device = torch.cuda.current_device()
        weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        config.init_method(weight)
        # Expert gradients are summed over the ranks that hold the same experts. Tensor ranks are among them (they route
        # different tokens), which Megatron's own experts get wrong where expert parallelism is 1.
        weight.allreduce = config.expert_model_parallel_size * config.tensor_model_parallel_size == 1  # type: ignore
        # Otherwise the gradient norm would take other tensor ranks' experts for copies of rank 0's.
        set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)
        return weight

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Tokens ``[N, H]`` sorted by expert, each one's gate weight ``[N]``; returns ``[N, H]`` and no bias."""
        ends = tokens_per_expert.cumsum(0).to(device=tokens.device, dtype=torch.int32)
        gate, up = self._grouped(tokens, self.weight1, ends).chunk(2, dim=-1)
        inner = (F.silu(gate) * up * probs[:, None]).to(tokens.dtype)
        return self._grouped(inner, self.weight2, ends), None

    @staticmethod
    def _grouped(tokens: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(tokens, weight.transpose(1, 2), offs=ends)


def block_spec(config: TransformerConfig, moe: list[bool]) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage; ``moe[i]`` says whether layer i of the whole model is a mixture of experts."""
    offset, count = get_transformer_layer_offset(config), config.num_layers // config.pipeline_model_parallel_size
    layers = [_layer_spec(config, moe[index]) for index in range(offset, offset + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _layer_spec(config: TransformerConfig, moe: bool) -> ModuleSpec:
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    experts = ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=ModuleSpec(module=Experts)))
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=CoreAttention,
            linear_proj=RowParallelLinear,
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
