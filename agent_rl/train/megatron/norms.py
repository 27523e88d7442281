"""Root-mean-square norms of hidden states and of heads."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from agent_rl.models.spec import ModelSpec
from agent_rl.train.megatron.norm_and_rope import rms_norm


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last axis, in float32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_unused: Any) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Tensor ranks have different tokens or heads, so Megatron must sum this weight's gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class ZeroCenteredNorm(RMSNorm):
    """As :class:`RMSNorm`, which multiplies by 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, zero_centered=True)


class AllHeadsNorm(torch.nn.Module):
    """Root-mean-square norm over all heads of a token, in float32, for ``x [..., heads of this tensor rank, D]``."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, *, heads: int) -> None:
        super().__init__()
        self.eps, self.width, self.ranks = eps, heads * hidden_size, config.tensor_model_parallel_size
        weight = torch.ones(self.width // self.ranks, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = torch.nn.Parameter(weight)
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.flatten(-2).float()
        squares = wide.square().sum(-1, keepdim=True)
        if self.ranks > 1:
            squares = all_reduce(squares, group=parallel_state.get_tensor_model_parallel_group())
        normed = wide * (squares / self.width + self.eps).rsqrt()
        return (normed.to(x.dtype) * self.weight).view(x.shape)


def norm_class(model_spec: ModelSpec) -> type[RMSNorm]:
    """The norm of hidden states and of single heads."""
    return ZeroCenteredNorm if model_spec.zero_centered_norms else RMSNorm


def head_norm(config: TransformerConfig, model_spec: ModelSpec, heads: int) -> RMSNorm | AllHeadsNorm | None:
    """The norm of queries or keys of ``heads`` heads; None: they have none."""
    if model_spec.qk_norm == "all":
        return AllHeadsNorm(config, model_spec.head_dim, model_spec.norm_eps, heads=heads)
    return norm_class(model_spec)(config, model_spec.head_dim, model_spec.norm_eps) if model_spec.qk_norm else None
