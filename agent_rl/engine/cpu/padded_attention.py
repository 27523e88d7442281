"""The attention of a whole batch in one call, on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_MOST_PADDING = 4
_MOST_SCORES = 1 << 23


def are_attended_at_once(lengths: Tensor, asked: Tensor, heads: int) -> bool:
    """Whether :func:`attend` is the faster way for sequences of ``lengths`` ``[B]`` with ``asked`` ``[B]`` new tokens:
    it is more than one token, padding to the longest sequence does not make many tokens of few, and the scores of all
    ``heads`` are few enough to be padded, too.

    With 64 sequences of 150 tokens it takes a third of the time of a call a sequence for a new token each, and a
    quarter for twenty (``benchmarks/bench_attention.py``).
    """
    longest, most = int(lengths.max()), int(asked.max())
    padded = len(lengths) * longest
    little = padded <= _MOST_PADDING * int(lengths.sum()) and padded * most * heads <= _MOST_SCORES
    return little and len(lengths) * most > 1


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, places: Tensor, lengths: Tensor, asked: Tensor, scale: float | None
) -> Tensor:
    """What the last ``asked`` ``[B]`` tokens of each sequence see, ``[T, H, Dv]``; every token sees those up to itself.

    ``queries`` ``[T, H, D]`` are those tokens', sequence after sequence; ``keys`` ``[N, G, D]`` and ``values``
    ``[N, G, Dv]`` the cache, of which ``places`` ``[B, longest]`` names the entries of a sequence of ``lengths``
    ``[B]`` tokens (what is behind its end is not read). Heads that share keys are queries of one head here.
    """
    (batch, longest), most = places.shape, int(asked.max())
    heads, kinds = queries.shape[1], keys.shape[1]
    row = torch.arange(batch).repeat_interleave(asked)
    place = torch.arange(len(queries)) - (asked.cumsum(0) - asked)[row]
    padded = queries.new_zeros(batch, most, heads, queries.shape[2])
    padded[row, place] = queries
    q = padded.view(batch, most, kinds, heads // kinds, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
    column = torch.arange(longest)
    inside = column < lengths[:, None]
    read = torch.where(inside, places, places[:, :1])
    seen = inside[:, None] & (column <= ((lengths - asked)[:, None] + torch.arange(most))[..., None])
    mask = seen[:, None, None].expand(-1, 1, heads // kinds, -1, -1).flatten(2, 3)
    k, v = (_widened(_taken(cache, read), q.dtype).transpose(1, 2) for cache in (keys, values))
    made = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return made.view(batch, kinds, heads // kinds, most, -1).permute(0, 3, 1, 2, 4).flatten(2, 3)[row, place]


def _taken(cache: Tensor, places: Tensor) -> Tensor:
    """The rows ``places`` ``[B, L]`` of ``cache`` ``[N, G, D]``: ``[B, L, G, D]``; ``[]`` takes five times as long."""
    return cache.index_select(0, places.flatten()).view(*places.shape, *cache.shape[1:])


def _widened(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """``stored`` as ``dtype``. torch widens 8 bits one by one; a table of all 256 is several times as fast."""
    if stored.itemsize > 1:
        return stored.to(dtype)
    table = torch.arange(256, dtype=torch.uint8).view(stored.dtype).to(dtype)
    return table.index_select(0, stored.view(torch.uint8).flatten().int()).view(stored.shape)
