"""The layers of a model chunk: norms, mixer, and MLP or experts."""

from __future__ import annotations

from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from agent_rl.config import LoraConfig
from agent_rl.models.spec import ModelSpec
from agent_rl.train.expert_balancing.borrowed_experts import BalancedExperts
from agent_rl.train.expert_balancing.moe_layer import BalancedMoELayer
from agent_rl.train.megatron.gate import Gate
from agent_rl.train.megatron.kernel_choice import Kernels
from agent_rl.train.megatron.lora import LoraExperts
from agent_rl.train.megatron.mixers import MIXERS
from agent_rl.train.megatron.moe import EXPERTS, PaddedMoELayer, ReleasingMoELayer
from agent_rl.train.megatron.norms import norm_class


def block_spec(
    config: TransformerConfig,
    model_spec: ModelSpec,
    virtual_stage: int | None,
    *,
    kernels: Kernels,
    balanced: bool = False,
    lora: LoraConfig | None = None,
) -> TransformerBlockSubmodules:
    """The layers of a model chunk of this pipeline stage (``virtual_stage`` None where a stage is one chunk).

    ``balanced``: ranks can borrow experts. ``lora``: attention and experts have adapters.
    """
    offset, count = get_transformer_layer_offset(config, virtual_stage), get_num_layers_to_build(config, virtual_stage)
    layers = [_layer_spec(config, model_spec, i, kernels, balanced, lora) for i in range(offset, offset + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm_class(model_spec))


def _layer_spec(
    config: TransformerConfig,
    model_spec: ModelSpec,
    layer: int,
    kernels: Kernels,
    balanced: bool,
    lora: LoraConfig | None,
) -> ModuleSpec:
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    shared = ModuleSpec(module=SharedExpertMLP, submodules=linears)
    adapted = {} if lora is None else {"lora": lora}
    kind = BalancedExperts if balanced else EXPERTS[model_spec.expert_form] if lora is None else LoraExperts
    own = ModuleSpec(module=kind, params={"product": kernels.product, **adapted})
    gate = partial(Gate, model_spec=model_spec)
    submodules = MoESubmodules(router=gate, experts=own, shared_experts=shared)
    experts = ModuleSpec(module=_moe_layer(config, balanced), submodules=submodules)
    mixing = {"model_spec": model_spec, "kernels": kernels, **adapted}
    parts = TransformerLayerSubmodules()  # of identities
    if (mixer := model_spec.mixer(layer)) != "none":
        parts.input_layernorm = norm_class(model_spec)
        parts.self_attention = ModuleSpec(module=MIXERS[mixer], params=mixing)
        parts.self_attn_bda = get_bias_dropout_add
    if model_spec.has_mlp(layer):
        parts.pre_mlp_layernorm = norm_class(model_spec)
        parts.mlp = experts if model_spec.moe[layer] else ModuleSpec(module=MLP, submodules=linears)
        parts.mlp_bda = get_bias_dropout_add
    return ModuleSpec(module=TransformerLayer, submodules=parts)


def _moe_layer(config: TransformerConfig, balanced: bool) -> type[ReleasingMoELayer]:
    if balanced:
        return BalancedMoELayer
    return PaddedMoELayer if config.moe_token_dispatcher_type == "allgather" else ReleasingMoELayer
