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

from agent_rl.train.megatron.attention import CoreAttention
from agent_rl.train.megatron.kernels import rms_norm


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


class SharedExpert(SharedExpertMLP):
    """An expert that every token uses, its output times a sigmoid gate of the token's own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.gate_weight is not None:  # Megatron leaves it on the CPU
            self.gate_weight.data = self.gate_weight.data.to(torch.cuda.current_device())


class EvenMoELayer(MoELayer):
    """For the allgather dispatcher, whose ranks must bring equally many tokens: fills up to the largest number.

    Filled rows are routed to no expert and cut off again; the router never sees them.
    """

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
        self._tokens = len(hidden_states)
        most = torch.tensor(self._tokens, device=hidden_states.device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, self.token_dispatcher.tp_ep_group)
        missing = int(most) - self._tokens
        filled = (torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) for x in (hidden_states, probs, routing_map))
        return super().preprocess(*filled)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        whole: Tensor = super().postprocess(output, None)[: self._tokens]
        return whole if shared_expert_output is None else whole + shared_expert_output


def block_spec(config: TransformerConfig, moe: list[bool], virtual_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of a model chunk of this pipeline stage (``virtual_stage`` None where a stage is one chunk).

    ``moe[i]`` says whether layer i of the whole model is a mixture of experts.
    """
    chunks = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    offset, count = get_transformer_layer_offset(config, virtual_stage), config.num_layers // chunks
    layers = [_layer_spec(config, moe[index]) for index in range(offset, offset + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _layer_spec(config: TransformerConfig, moe: bool) -> ModuleSpec:
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    layer = EvenMoELayer if config.moe_token_dispatcher_type == "allgather" else MoELayer
    shared = ModuleSpec(module=SharedExpert, submodules=linears)
    submodules = MoESubmodules(experts=ModuleSpec(module=Experts), shared_experts=shared)
    experts = ModuleSpec(module=layer, submodules=submodules)
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
