"""Small experts and attention of a whole batch in few calls, on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

_MAX_SEQUENCE_PADDING = 4
_MAX_SCORES = 1 << 23
_MAX_WEIGHTS = 1 << 20
_MAX_UNIFORM_ROWS = 64
_MAX_EXPERT_PADDING = 2


def are_small(up_and_gate: Tensor) -> bool:
    """Whether :func:`mix_experts` is faster for experts with weights ``[E, 2 I, H]``: they are so small that calls
    dominate.

    With 8 of 128 experts of 128 x 16 and 64 tokens it takes half the time of one call per expert
    (``benchmarks/bench_experts.py``).
    """
    return up_and_gate.numel() <= _MAX_WEIGHTS


def gate_with_silu(middle: Tensor) -> Tensor:
    """SwiGLU of ``middle`` ``[T, 2 I]``, a gate and, next to it, what it scales."""
    gate, up = middle.chunk(2, dim=-1)
    return F.silu(gate) * up


def square_positive(middle: Tensor) -> Tensor:
    """Squared ReLU."""
    return F.relu(middle).square()


def mix_experts(
    x: Tensor, gates: Tensor, chosen: Tensor, up_and_gate: Tensor, down: Tensor,
    activate: Callable[[Tensor], Tensor] = gate_with_silu,
) -> Tensor:  # fmt: skip
    """The sum over the experts ``chosen`` ``[T, K]`` of their output for ``x`` ``[T, H]``, weighted by ``gates`` ``[T,
    K]``.

    ``up_and_gate`` ``[E, 2 I, H]`` and ``down`` ``[E, H, I]`` are the weights, with ``activate`` between. Each expert's
    tokens are padded, because a product of a new shape takes a millisecond more while oneDNN builds its kernel. With
    few tokens, or evenly spread ones, all experts get the same padding and one product. The bits equal those of
    unpadded products if both sum in the same order.
    """
    slots, experts = chosen.reshape(-1), len(down)
    order = slots.argsort()
    expert = slots[order]
    tokens = torch.bincount(slots, minlength=experts)
    sizes = _sizes(tokens.tolist())
    starts = torch.tensor(sizes).cumsum(0) - torch.tensor(sizes)
    position = torch.arange(len(slots)) + (starts - tokens.cumsum(0) + tokens)[expert]
    padded = x.new_zeros(sum(sizes), x.shape[1])
    padded[position] = x[order // chosen.shape[1]]
    outputs = _multiply(activate(_multiply(padded, up_and_gate, sizes)), down, sizes)
    rows = x.new_empty(len(slots), x.shape[1])
    rows[order] = outputs[position]
    return (rows.view(*chosen.shape, x.shape[1]).to(gates.dtype) * gates.unsqueeze(-1)).sum(1).to(x.dtype)


def _sizes(tokens: list[int]) -> list[int]:
    """Rows per expert after padding: the same for all experts, unless that is mostly padding."""
    sizes = [_round_up(count) for count in tokens]
    largest = max(sizes)
    uniform = largest <= _MAX_UNIFORM_ROWS or len(sizes) * largest <= _MAX_EXPERT_PADDING * sum(sizes)
    return [largest] * len(sizes) if uniform else sizes


def _round_up(count: int) -> int:
    """``count`` rounded up to 0, a power of two, or three quarters of one."""
    power = 1 << max(0, count - 1).bit_length()
    return 0 if not count else 3 * power // 4 if count <= 3 * power // 4 else power


def _multiply(rows: Tensor, weights: Tensor, sizes: list[int]) -> Tensor:
    """Each expert's ``rows`` times its ``weights`` ``[E, out, in]``."""
    if len(set(sizes)) == 1:
        return torch.bmm(rows.view(len(sizes), sizes[0], rows.shape[1]), weights.transpose(1, 2)).flatten(0, 1)
    outputs = rows.new_empty(len(rows), weights.shape[1])
    for part, weight, out in zip(rows.split(sizes), weights, outputs.split(sizes), strict=True):
        torch.mm(part, weight.T, out=out)
    return outputs


def is_batched_attention_faster(lengths: Tensor, new_tokens: Tensor, heads: int) -> bool:
    """Whether :func:`attend` is faster than one call per sequence, for sequences of ``lengths`` ``[B]`` with
    ``new_tokens`` ``[B]``. True for more than one new token, at most 4 times as many padded tokens, and few enough
    scores over all ``heads``.

    With 64 sequences of 150 tokens it takes a third of the time for one new token each, and a quarter for twenty
    (``benchmarks/bench_attention.py``).
    """
    longest, max_new = int(lengths.max()), int(new_tokens.max())
    padded = len(lengths) * longest
    small = padded <= _MAX_SEQUENCE_PADDING * int(lengths.sum()) and padded * max_new * heads <= _MAX_SCORES
    return small and len(lengths) * max_new > 1


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, entries: Tensor, lengths: Tensor, added: Tensor, scale: float | None
) -> Tensor:
    """Causal attention of the last ``added`` ``[B]`` tokens of each sequence, ``[T, H, Dv]``.

    ``queries`` ``[T, H, D]`` are those tokens', sequence after sequence. ``keys`` ``[N, G, D]`` and ``values`` ``[N, G,
    Dv]`` are the cache; ``entries`` ``[B, longest]`` holds the cache entries of a sequence of ``lengths`` ``[B]``
    tokens (entries after its end are ignored). Heads that share keys become queries of one head.
    """
    (batch, longest), max_new = entries.shape, int(added.max())
    heads, groups = queries.shape[1], keys.shape[1]
    row = torch.arange(batch).repeat_interleave(added)
    position = torch.arange(len(queries)) - (added.cumsum(0) - added)[row]
    padded = queries.new_zeros(batch, max_new, heads, queries.shape[2])
    padded[row, position] = queries
    q = padded.view(batch, max_new, groups, heads // groups, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
    column = torch.arange(longest)
    inside = column < lengths[:, None]
    valid_entries = torch.where(inside, entries, entries[:, :1])
    visible = inside[:, None] & (column <= ((lengths - added)[:, None] + torch.arange(max_new))[..., None])
    mask = visible[:, None, None].expand(-1, 1, heads // groups, -1, -1).flatten(2, 3)
    k, v = (_widen(_gather(cache, valid_entries), q.dtype).transpose(1, 2) for cache in (keys, values))
    attention = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return (
        attention.view(batch, groups, heads // groups, max_new, -1).permute(0, 3, 1, 2, 4).flatten(2, 3)[row, position]
    )


def _gather(cache: Tensor, entries: Tensor) -> Tensor:
    """The rows ``entries`` ``[B, L]`` of ``cache`` ``[N, G, D]`` as ``[B, L, G, D]``; indexing with ``[]`` takes 5
    times as long."""
    return cache.index_select(0, entries.flatten()).view(*entries.shape, *cache.shape[1:])


def _widen(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """``stored`` as ``dtype``. torch widens 8-bit values one by one; a table of all 256 is several times as fast."""
    if stored.itemsize > 1:
        return stored.to(dtype)
    table = torch.arange(256, dtype=torch.uint8).view(stored.dtype).to(dtype)
    return table.index_select(0, stored.view(torch.uint8).flatten().int()).view(stored.shape)
