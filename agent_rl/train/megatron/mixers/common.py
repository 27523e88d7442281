"""What mixers share: projections and weights that are cut or replicated over tensor ranks, and recomputation.

A projection takes and returns ``[S, 1, width]``. Under sequence parallelism :func:`column_linear` gathers the tokens of
all tensor ranks and :func:`row_linear` returns to this rank's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from agent_rl.config import LoraConfig
from agent_rl.train.megatron.lora import LoraColumnParallelLinear, LoraRowParallelLinear, adapter_of


def column_linear(
    config: TransformerConfig, inner: int, outer: int, *, bias: bool = False, lora: LoraConfig | None = None
) -> ColumnParallelLinear:
    """A projection from ``inner`` to ``outer``, whose outputs are cut over tensor ranks."""
    options: dict[str, Any] = {"config": config, "bias": bias, "init_method": config.init_method}
    options |= {"gather_output": False, **_linear_options()}
    if lora:
        return LoraColumnParallelLinear(inner, outer, lora=lora, **options)
    return ColumnParallelLinear(inner, outer, **options)


def row_linear(
    config: TransformerConfig, inner: int, outer: int, *, bias: bool = False, lora: LoraConfig | None = None
) -> RowParallelLinear:
    """A projection from ``inner`` to ``outer``, whose inputs are cut over tensor ranks. A bias is added once, after the
    sum over ranks."""
    options: dict[str, Any] = {"config": config, "bias": bias, "init_method": config.output_layer_init_method}
    options |= {"input_is_parallel": True, **_linear_options()}
    if lora:
        return LoraRowParallelLinear(inner, outer, lora=lora, **options)
    return RowParallelLinear(inner, outer, **options)


def _linear_options() -> dict[str, Any]:
    group = parallel_state.get_tensor_model_parallel_group()
    return {"skip_bias_add": False, "is_expert": False, "tp_group": group}


class ReplicatedLinear(torch.nn.Module):
    """A projection that every tensor rank has, of this rank's tokens."""

    def __init__(self, config: TransformerConfig, inner: int, outer: int, *, lora: LoraConfig | None = None) -> None:
        super().__init__()
        self.weight = replicated_weight(config, outer, inner)
        self.lora = adapter_of(self.weight, lora) if lora else None

    def forward(self, x: Tensor) -> Tensor:
        """``[S, 1, outer]`` from ``[S, 1, inner]``."""
        # torch multiplies tensors of three axes in another order where the weight is frozen.
        output = F.linear(x[:, 0], self.weight)[:, None]
        return output if self.lora is None else output + self.lora["weight"](x)


def replicated_weight(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """A weight that every tensor rank has. Ranks apply it to different tokens or heads, so Megatron must sum its
    gradients."""
    weight = _empty(config, *shape)
    config.init_method(weight)
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


def cut_weight(config: TransformerConfig, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
    """A tensor rank's rows, of ``shape``, of a weight; ``dtype`` None: that of the model."""
    weight = _empty(config, *shape, dtype=dtype)
    config.init_method(weight)
    set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)
    return weight


def _empty(config: TransformerConfig, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
    device = torch.cuda.current_device()
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype or config.params_dtype, device=device))


def recomputes_core(config: TransformerConfig) -> bool:
    """Whether the core of a mixer, between its projections, is computed again in the backward pass."""
    return config.recompute_granularity == "selective" and "core_attn" in (config.recompute_modules or ())


def core(config: TransformerConfig, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``function(*inputs)``, which keeps nothing but the inputs where the core is recomputed."""
    if recomputes_core(config) and torch.is_grad_enabled():
        recomputed: Tensor = tensor_parallel.checkpoint(function, False, *inputs)
        return recomputed
    return function(*inputs)
