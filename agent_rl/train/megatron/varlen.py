"""Causal attention over segments of packed tokens, with each supported kernel.

Axes: Q and K packed queries and keys, H heads, G heads of keys and values (H is a multiple), D head width.

Which kernel is used, and how it is checked first: :mod:`agent_rl.train.megatron.kernel_choice`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Segments of queries and their keys: the last query sees the last key, the query before sees one key fewer.

    ``queries`` and ``keys``: lengths per segment. ``query_ends`` and ``key_ends``: cumulative lengths, int32
    ``[segments + 1]`` on the device.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    query_ends: Tensor
    key_ends: Tensor

    @classmethod
    def build(cls, queries: Sequence[int], keys: Sequence[int], device: torch.device) -> Segments:
        """Raises ValueError for a segment with fewer keys than queries."""
        if len(queries) != len(keys) or any(k < q for q, k in zip(queries, keys, strict=True)):
            raise ValueError(
                f"segments of {list(queries)} queries and {list(keys)} keys: "
                "a segment needs at least as many keys as queries"
            )
        return cls(tuple(queries), tuple(keys), _ends(queries, device), _ends(keys, device))


AttentionKernel = Callable[[Tensor, Tensor, Tensor, Segments, float], Tensor]
"""``attend(query [Q, H, D], key [K, G, D], value [K, G, D], segments, scale)`` of packed segments returns
``[Q, H, D]``."""


def reference_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """Attention with all weights in memory, the reference for the other kernels."""
    parts, shared = [], query.shape[1] // key.shape[1]
    for q, k, v in zip(
        query.split(segments.queries), key.split(segments.keys), value.split(segments.keys), strict=True
    ):
        seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(shared, dim=1)) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(shared, dim=1)))
    return torch.cat(parts)


def sdpa_per_segment(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """torch's scaled dot product per segment. Memory is linear in its length if it has as many keys as queries."""
    parts = zip(query.split(segments.queries), key.split(segments.keys), value.split(segments.keys), strict=True)
    return torch.cat([_sdpa(q, k, v, scale) for q, k, v in parts])


def torch_varlen_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """:func:`torch.nn.attention.varlen.varlen_attn` (flash attention, which aligns the causal mask at the last key)."""
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        query,
        key,
        value,
        segments.query_ends,
        segments.key_ends,
        max(segments.queries),
        max(segments.keys),
        scale=scale,
        window_size=(-1, 0),  # causal
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)
    return out


def transformer_engine_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """Transformer Engine's ``DotProductAttention``, which picks a fused kernel for the GPU."""
    kernel = _transformer_engine(query.shape[1], key.shape[1], query.shape[2], scale)
    out: Tensor = kernel(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        cu_seqlens_q=segments.query_ends,
        cu_seqlens_kv=segments.key_ends,
        max_seqlen_q=max(segments.queries),
        max_seqlen_kv=max(segments.keys),
    )
    return out.view(query.shape)


def flash_attention_3(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """FlashAttention 3, which aligns the causal mask at the last key."""
    from flash_attn_interface import flash_attn_varlen_func

    return _flash_attention(flash_attn_varlen_func, query, key, value, segments, scale)


def flash_attention_4(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """FlashAttention 4 (package flash-attn-4), which aligns the causal mask at the last key."""
    from flash_attn.cute import flash_attn_varlen_func

    return _flash_attention(flash_attn_varlen_func, query, key, value, segments, scale)


def _flash_attention(
    call: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
) -> Tensor:
    out = call(
        query,
        key,
        value,
        cu_seqlens_q=segments.query_ends,
        cu_seqlens_k=segments.key_ends,
        max_seqlen_q=max(segments.queries),
        max_seqlen_k=max(segments.keys),
        softmax_scale=scale,
        causal=True,
    )
    output: Tensor = out[0] if isinstance(out, tuple) else out  # some releases also return the log-sum-exp
    return output


@functools.cache
def _transformer_engine(heads: int, key_heads: int, width: int, scale: float) -> Any:
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        num_attention_heads=heads,
        kv_channels=width,
        num_gqa_groups=key_heads,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal_bottom_right",
        softmax_scale=scale,
    )


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    count, seen = len(query), len(key)
    mask: dict[str, Any] = {"is_causal": True}
    if seen > count:  # is_causal would align the mask at the first key
        mask = {"attn_mask": torch.ones(count, seen, dtype=torch.bool, device=query.device).tril(seen - count)}
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        **mask,
    )
    return out[0].transpose(0, 1)


def _ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
