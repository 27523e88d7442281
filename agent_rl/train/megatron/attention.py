"""Core attention over packed sequences: rotary embedding and causal attention, one sequence after another.

Axes: T tokens of this rank, H heads, D head width, L length of one sequence.

Torch's own attention kernels are used, so memory grows with T and not with its square, on a CPU as on a GPU. Under
context parallelism every rank holds two chunks of each sequence, one from either end (so that causal work is even);
keys and values are gathered, queries stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from agent_rl.train.megatron.kernels import rotary_tables, rotate
from agent_rl.train.megatron.layout import Layout
from agent_rl.train.megatron.rotary import Rotary


@dataclass
class PackedAttention(PackedSeqParams):
    """What every layer's attention needs to know of a micro-batch; made once for all layers."""

    layout: Layout = field(default=None)  # type: ignore[assignment]
    cos: Tensor = field(default=None)  # type: ignore[assignment]
    sin: Tensor = field(default=None)  # type: ignore[assignment]
    cu_seqlens: Tensor = field(default=None)  # type: ignore[assignment]

    @classmethod
    def build(cls, layout: Layout, rotary: Rotary, device: torch.device) -> PackedAttention:
        """Rotary tables ``[T, 1, D]`` for the positions of this rank's tokens."""
        cos, sin = rotary_tables(layout.positions.to(device), rotary)
        cumulative = torch.tensor([0, *layout.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(qkv_format="thd", layout=layout, cos=cos, sin=sin, cu_seqlens=cumulative.to(device))


class CoreAttention(torch.nn.Module):
    """Causal attention of ``query [T, H, D]`` and ``key``, ``value`` with as many or fewer heads."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_unused: Any) -> None:
        super().__init__()
        self.scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: Any, **_: Any
    ) -> Tensor:
        packed: PackedAttention = packed_seq_params
        query, key = rotate(query, packed.cos, packed.sin), rotate(key, packed.cos, packed.sin)
        if packed.layout.context_size > 1:
            return self._attend_context(query, key, value, packed.layout)
        if query.is_cuda:
            return self._attend_varlen(query, key, value, packed)
        return self._attend_sequences(query, key, value, packed.layout.lengths)

    def _attend_sequences(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        return torch.cat([self._attend(q, k, v, is_causal=True) for q, k, v in parts])

    def _attend_varlen(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedAttention) -> Tensor:
        if query.dtype == torch.float32:  # the variable-length kernel is for 16-bit inputs
            return self._attend_sequences(query, key, value, packed.layout.lengths)
        from torch.nn.attention.varlen import varlen_attn

        longest, cumulative = max(packed.layout.lengths), packed.cu_seqlens
        out = varlen_attn(  # a window of (-1, 0) is causal
            query,
            key,
            value,
            cumulative,
            cumulative,
            longest,
            longest,
            scale=self.scale,
            window_size=(-1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        assert isinstance(out, Tensor)
        return out

    def _attend_context(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
        whole = [length * layout.context_size for length in layout.lengths]
        keys, values = layout.gather_context(key).split(whole), layout.gather_context(value).split(whole)
        out, start = [], 0
        for length, k_all, v_all in zip(layout.lengths, keys, values, strict=True):
            half = length // 2
            for chunk in layout.chunks:  # the two chunks of this sequence on this rank
                q, stop = query[start : start + half], (chunk + 1) * half
                mask = torch.ones(half, stop, dtype=torch.bool, device=q.device).tril(stop - half)
                out.append(self._attend(q, k_all[:stop], v_all[:stop], attn_mask=mask))
                start += half
        return torch.cat(out)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **mask: Any) -> Tensor:
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
            **mask,
        )
        return out[0].transpose(0, 1)
