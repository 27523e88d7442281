"""Gated DeltaNet (arXiv 2412.06464) as in Qwen3-Next and Qwen3.5: a short causal convolution, the gated delta rule, and
a norm with a gate.

Axes: S this tensor rank's tokens, T those of all tensor ranks, W those of all context ranks too. A rank has some of the
key heads and their value heads. Under context parallelism every rank runs whole sequences and keeps its own tokens,
because the state of a token depends on all tokens before it.
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
from agent_rl.train.megatron.mixers.common import column_linear, core, cut_weight, replicated_weight, row_linear
from agent_rl.train.megatron.token_sharding import Layout

_UNIT_EPS = 1e-6  # of the lengths of queries and keys, in transformers and SGLang


class GatedDeltaNet(torch.nn.Module):
    """The gated delta rule within each sequence."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, model_spec: ModelSpec, kernels: Kernels, **_unused: Any
    ) -> None:
        super().__init__()
        assert model_spec.delta is not None
        delta, hidden, ranks = model_spec.delta, model_spec.hidden, config.tensor_model_parallel_size
        self.config, self._delta, self._eps = config, delta, model_spec.norm_eps
        self._delta_rule = kernels.delta_rule
        self._key_heads, self._value_heads = delta.key_heads // ranks, delta.value_heads // ranks
        self._widths = delta.key_width // ranks, delta.key_width // ranks, delta.value_width // ranks
        if delta.fused:
            self.in_proj_qkvz = column_linear(config, hidden, 2 * delta.key_width + 2 * delta.value_width)
            self.in_proj_ba = column_linear(config, hidden, 2 * delta.value_heads)
        else:
            self.in_proj_qkv = column_linear(config, hidden, 2 * delta.key_width + delta.value_width)
            self.in_proj_z = column_linear(config, hidden, delta.value_width)
            self.in_proj_b = column_linear(config, hidden, delta.value_heads)
            self.in_proj_a = column_linear(config, hidden, delta.value_heads)
        self.conv1d = cut_weight(config, sum(self._widths), 1, delta.kernel)
        self.dt_bias = cut_weight(config, self._value_heads)
        self.decay_log = cut_weight(config, self._value_heads, dtype=torch.float32)
        self.norm = replicated_weight(config, delta.value_dim)
        self.out_proj = row_linear(config, delta.value_width, hidden)

    def forward(
        self, hidden: Tensor, *, packed_seq_params: PackedAttention, **_unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output ``[S, 1, hidden]`` and no bias."""
        mixed, gate, beta, step = self._fused(hidden) if self._delta.fused else self._separate(hidden)
        out = core(self.config, partial(self._core, packed_seq_params.layout), mixed, gate, beta, step)
        output, bias = self.out_proj(out.flatten(1)[:, None])
        return output, bias

    def _separate(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values side by side ``[T, width]``, output gates ``[T, value heads, value_dim]``, and by
        value head the logits of beta and of the decay."""
        linears = (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        mixed, gate, beta, step = (linear(hidden)[0][:, 0] for linear in linears)
        return mixed, gate.unflatten(-1, (self._value_heads, -1)), beta, step

    def _fused(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As :meth:`_separate`."""
        delta, each = self._delta, self._value_heads // self._key_heads
        widths = (delta.key_dim, delta.key_dim, each * delta.value_dim, each * delta.value_dim)
        by_head = self.in_proj_qkvz(hidden)[0][:, 0].unflatten(-1, (self._key_heads, -1))
        *parts, gate = by_head.split(widths, dim=-1)
        beta, step = self.in_proj_ba(hidden)[0][:, 0].unflatten(-1, (self._key_heads, 2, each)).unbind(-2)
        mixed = torch.cat([part.flatten(1) for part in parts], dim=-1)
        return mixed, gate.reshape(len(mixed), self._value_heads, -1), beta.flatten(1), step.flatten(1)

    def _core(self, layout: Layout, mixed: Tensor, gate: Tensor, beta: Tensor, step: Tensor) -> Tensor:
        """The normalized and gated values ``[T, value heads, value_dim]``."""
        lengths, own = layout.lengths, None
        if layout.context_size > 1:
            sizes = (mixed.shape[1], beta.shape[1], step.shape[1])
            mixed, beta, step = layout.gather_context(torch.cat((mixed, beta, step), dim=-1)).split(sizes, dim=-1)
            lengths, own = [length * layout.context_size for length in lengths], _own_rows(layout).to(mixed.device)
        mixed = F.silu(causal_convolution(mixed, self.conv1d[:, 0], lengths))
        heads = (self._key_heads, self._key_heads, self._value_heads)
        query, key, value = (
            part.unflatten(-1, (count, -1)).float()
            for part, count in zip(mixed.split(self._widths, dim=-1), heads, strict=True)
        )
        each = self._value_heads // self._key_heads
        query, key = (_unit(part).repeat_interleave(each, dim=1) for part in (query, key))
        decay = -self.decay_log.exp() * F.softplus(step.float() + self.dt_bias.float())
        out = self._delta_rule(query * self._delta.key_dim**-0.5, key, value, decay, beta.sigmoid().float(), lengths)
        return self._gated_norm((out if own is None else out[own]).to(gate.dtype), gate)

    def _gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        """Rounds where transformers' layer does."""
        wide = x.float()
        normed = wide * (wide.square().mean(-1, keepdim=True) + self._eps).rsqrt()
        return (self.norm * normed.to(x.dtype) * F.silu(gate.float())).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _UNIT_EPS).rsqrt()


def _own_rows(layout: Layout) -> Tensor:
    """This context rank's tokens among those of all context ranks."""
    own = torch.tensor(layout.lengths)
    whole = own * layout.context_size
    return layout.positions + (whole.cumsum(0) - whole).repeat_interleave(own)
