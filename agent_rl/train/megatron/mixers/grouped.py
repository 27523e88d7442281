"""Grouped-query attention (arXiv 2305.13245).

Axes: S this tensor rank's tokens, T those of all tensor ranks, G this rank's key-value groups, H its query heads, D the
width of a head.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from agent_rl.config import LoraConfig
from agent_rl.models.spec import ModelSpec
from agent_rl.train.megatron.attention import PackedAttention
from agent_rl.train.megatron.kernel_choice import Kernels
from agent_rl.train.megatron.mixers.common import column_linear, core, cut_weight, row_linear
from agent_rl.train.megatron.norm_and_rope import rotate_part
from agent_rl.train.megatron.norms import head_norm


class GroupedAttention(torch.nn.Module):
    """Causal attention within each sequence; the query heads of a group share its key and value. With ``sinks`` (of
    this rank's query heads) and a window see :mod:`agent_rl.train.megatron.attention_sinks`."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        model_spec: ModelSpec,
        kernels: Kernels,
        lora: LoraConfig | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__()
        spec = model_spec
        self.config, self._kernels, self.scale = config, kernels, spec.head_dim**-0.5
        self._rotary, self._interleaved = spec.rotary, spec.rotary_interleaved
        self._groups = spec.kv_heads // config.tensor_model_parallel_size
        self._gated, rows = spec.output_gate, spec.q_width * (2 if spec.output_gate else 1)
        self._widths = rows // spec.kv_heads, spec.head_dim, spec.head_dim
        self.linear_qkv = column_linear(config, spec.hidden, rows + 2 * spec.kv_width, bias=spec.qkv_bias, lora=lora)
        self.q_layernorm = head_norm(config, spec, spec.heads)
        self.k_layernorm = head_norm(config, spec, spec.kv_heads)
        self.linear_proj = row_linear(config, spec.q_width, spec.hidden, bias=spec.out_bias, lora=lora)
        self.sinks: torch.nn.Parameter | None = None
        if spec.sinks:
            self.sinks = cut_weight(config, spec.heads // config.tensor_model_parallel_size)
        self._window = spec.windows[layer_number - 1] if spec.windows else 0

    def forward(
        self, hidden: Tensor, *, packed_seq_params: PackedAttention, **_unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The attention's output ``[S, 1, hidden]`` and no bias."""
        query, key, value, gate = self._project(hidden)
        inputs = (query, key, value) if self.sinks is None else (query, key, value, self.sinks)
        attended = core(self.config, partial(self._core, packed_seq_params), *inputs).flatten(1)
        if gate is not None:
            attended = attended * gate.sigmoid()
        output, bias = self.linear_proj(attended[:, None])
        return output, bias

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Normalized queries ``[T, H, D]``, keys and values ``[T, G, D]``, and the output's gate ``[T, H D]``."""
        grouped = self.linear_qkv(hidden)[0][:, 0].unflatten(-1, (self._groups, -1))
        query, key, value = grouped.split(self._widths, dim=-1)
        gate = None
        if self._gated:  # each head's query and its gate
            query, gate = query.unflatten(-1, (-1, 2, key.shape[-1])).unbind(-2)
            gate = gate.flatten(1)
        query = query.reshape(len(query), -1, key.shape[-1])
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, value, gate

    def _core(
        self, packed: PackedAttention, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """The attended values ``[T, H, D]``."""
        if self._rotary:
            query, key = (
                rotate_part(part, packed.cos, packed.sin, interleaved=self._interleaved) for part in (query, key)
            )
        key, value, attend_with_sinks = packed.gather(key), packed.gather(value), self._kernels.attend_with_sinks
        if sinks is None or attend_with_sinks is None:
            return self._kernels.attend(query, key, value, packed.segments, self.scale)
        return attend_with_sinks(query, key, value, sinks, packed.segments, self.scale, self._window)
