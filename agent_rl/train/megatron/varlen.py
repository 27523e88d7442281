"""Causal attention over runs of packed tokens, by each of the kernels that a machine may have.

Axes: Q and K packed queries and keys, H heads, G heads of keys and values (H is a multiple), D head width.

Which one is taken, and how it is proved before: :mod:`agent_rl.train.megatron.kernel_choice`. Those for a GPU were
never run: no GPU was at hand. That they are given what their documentation asks for is tested with their doubles.
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
class Runs:
    """Runs of queries, each with the keys it may see: its last query sees its last key, the one before one fewer.

    ``queries`` and ``keys`` are the runs' lengths, ``query_ends`` and ``key_ends`` their sums so far, int32
    ``[runs + 1]`` on the device.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    query_ends: Tensor
    key_ends: Tensor

    @classmethod
    def build(cls, queries: Sequence[int], keys: Sequence[int], device: torch.device) -> Runs:
        """Raises ValueError where a run has fewer keys than queries."""
        if len(queries) != len(keys) or any(k < q for q, k in zip(queries, keys, strict=True)):
            raise ValueError(f"runs of {list(queries)} queries and {list(keys)} keys: each needs as many keys or more")
        return cls(tuple(queries), tuple(keys), _ends(queries, device), _ends(keys, device))


Attend = Callable[[Tensor, Tensor, Tensor, Runs, float], Tensor]
"""``attend(query [Q, H, D], key [K, G, D], value [K, G, D], runs, scale)``, runs end to end: ``[Q, H, D]``."""


def written_out(query: Tensor, key: Tensor, value: Tensor, runs: Runs, scale: float) -> Tensor:
    """The formula, with every weight in memory: what the others are compared with."""
    parts, shared = [], query.shape[1] // key.shape[1]
    for q, k, v in zip(query.split(runs.queries), key.split(runs.keys), value.split(runs.keys), strict=True):
        seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(shared, dim=1)) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(shared, dim=1)))
    return torch.cat(parts)


def one_by_one(query: Tensor, key: Tensor, value: Tensor, runs: Runs, scale: float) -> Tensor:
    """Every run on its own; memory grows with its length and not with the square, where it has no more keys."""
    parts = zip(query.split(runs.queries), key.split(runs.keys), value.split(runs.keys), strict=True)
    return torch.cat([_attend(q, k, v, scale) for q, k, v in parts])


def by_torch_varlen(query: Tensor, key: Tensor, value: Tensor, runs: Runs, scale: float) -> Tensor:
    """:func:`torch.nn.attention.varlen.varlen_attn` (flash attention, which aligns the causal mask at the last key)."""
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        query,
        key,
        value,
        runs.query_ends,
        runs.key_ends,
        max(runs.queries),
        max(runs.keys),
        scale=scale,
        window_size=(-1, 0),  # causal
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)
    return out


def by_transformer_engine(query: Tensor, key: Tensor, value: Tensor, runs: Runs, scale: float) -> Tensor:
    """Transformer Engine's ``DotProductAttention``, which picks a fused kernel for the GPU."""
    kernel = _transformer_engine(query.shape[1], key.shape[1], query.shape[2], scale)
    out: Tensor = kernel(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        cu_seqlens_q=runs.query_ends,
        cu_seqlens_kv=runs.key_ends,
        max_seqlen_q=max(runs.queries),
        max_seqlen_kv=max(runs.keys),
    )
    return out.view(query.shape)


def by_flash_attention_3(query: Tensor, key: Tensor, value: Tensor, runs: Runs, scale: float) -> Tensor:
    """FlashAttention 3, which aligns the causal mask at the last key."""
    from flash_attn_interface import flash_attn_varlen_func

    out = flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=runs.query_ends,
        cu_seqlens_k=runs.key_ends,
        max_seqlen_q=max(runs.queries),
        max_seqlen_k=max(runs.keys),
        softmax_scale=scale,
        causal=True,
    )
    whole: Tensor = out[0] if isinstance(out, tuple) else out  # some releases also give the sums' logarithms
    return whole


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


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
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
