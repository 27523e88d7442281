"""Mamba-2 (arXiv 2405.21060) as in Nemotron-H: a short causal convolution, a state space, and a norm with a gate.

Axes: S this tensor rank's tokens, T those of all tensor ranks. A rank has some of the groups and their heads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from agent_rl.models.spec import ModelSpec
from agent_rl.train.megatron.attention import PackedAttention
from agent_rl.train.megatron.delta_rule import causal_convolution
from agent_rl.train.megatron.kernel_choice import Kernels
from agent_rl.train.megatron.mixers.common import column_linear, core, cut_weight, row_linear
from agent_rl.train.megatron.token_sharding import Layout


class Mamba2(torch.nn.Module):
    """The state space within each sequence."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, model_spec: ModelSpec, kernels: Kernels, **_unused: Any
    ) -> None:
        super().__init__()
        assert model_spec.mamba is not None
        mamba, ranks = model_spec.mamba, config.tensor_model_parallel_size
        self.config, self._eps, self._state_space = config, model_spec.norm_eps, kernels.state_space
        self._groups, self._heads, width = mamba.groups // ranks, mamba.heads // ranks, mamba.width // ranks
        self._convolved = tuple(part // ranks for part in mamba.convolved)
        self._parts = width, sum(self._convolved), self._heads
        self.in_proj = column_linear(config, model_spec.hidden, sum(self._parts) * ranks)
        self.conv1d = cut_weight(config, sum(self._convolved), 1, mamba.kernel)
        self.conv1d_bias = cut_weight(config, sum(self._convolved))
        self.dt_bias = cut_weight(config, self._heads)
        self.decay_log = cut_weight(config, self._heads, dtype=torch.float32)
        self.skip = cut_weight(config, self._heads)
        self.norm = cut_weight(config, width)
        self.out_proj = row_linear(config, mamba.width, model_spec.hidden)

    def forward(
        self, hidden: Tensor, *, packed_seq_params: PackedAttention, **_unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output ``[S, 1, hidden]`` and no bias."""
        gate, mixed, step = self.in_proj(hidden)[0][:, 0].split(self._parts, dim=-1)
        out = core(self.config, partial(self._core, packed_seq_params.layout), gate, mixed, step)
        output, bias = self.out_proj(out[:, None])
        return output, bias

    def _core(self, layout: Layout, gate: Tensor, mixed: Tensor, step: Tensor) -> Tensor:
        """The gated and normalized values ``[T, heads x head_dim]``."""
        mixed = F.silu(causal_convolution(mixed, self.conv1d[:, 0], layout.lengths) + self.conv1d_bias).float()
        counts = (self._heads, self._groups, self._groups)
        value, key, query = (
            part.unflatten(-1, (count, -1))
            for part, count in zip(mixed.split(self._convolved, dim=-1), counts, strict=True)
        )
        step = F.softplus(step.float() + self.dt_bias.float())
        out = self._state_space(query, key, value, step, -self.decay_log.exp(), layout.lengths)
        return self._gated_norm((out + self.skip.float()[:, None] * value).flatten(1), gate)

    def _gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        """The norm over each group's values, after the gate."""
        wide = (x * F.silu(gate.float())).unflatten(-1, (self._groups, -1))
        normed = wide * (wide.square().mean(-1, keepdim=True) + self._eps).rsqrt()
        return self.norm * normed.flatten(-2).to(gate.dtype)
