"""A layer's small experts, on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_MOST_WEIGHTS = 1 << 20
_MOST_ROWS = 64
_MOST_PADDING = 2


def are_small(up_and_gate: Tensor) -> bool:
    """Whether :func:`mix_experts` is the faster way for experts of these weights ``[E, 2 I, H]``: all of them are
    small, so that it is calls that cost.

    With 8 of 128 experts of 128 x 16 and 64 tokens it takes half the time of a call an expert
    (``benchmarks/bench_experts.py``).
    """
    return up_and_gate.numel() <= _MOST_WEIGHTS


def mix_experts(x: Tensor, gates: Tensor, chosen: Tensor, up_and_gate: Tensor, down: Tensor) -> Tensor:
    """What the experts ``chosen`` ``[T, K]`` make of ``x`` ``[T, H]``, summed up by ``gates`` ``[T, K]``.

    ``up_and_gate`` ``[E, 2 I, H]`` and ``down`` ``[E, H, I]`` are the weights, SwiGLU is between them. The tokens of an
    expert are padded, because a product of a shape that was not seen before takes a millisecond more: oneDNN makes its
    kernel then. Where few tokens are, or they are evenly spread, all experts are padded alike and are one product. The
    bits are those of products without padding where both kinds add up alike.
    """
    slots, experts, inner = chosen.reshape(-1), len(down), down.shape[2]
    order = slots.argsort()
    expert = slots[order]
    tokens = torch.bincount(slots, minlength=experts)
    sizes = _sizes(tokens.tolist())
    starts = torch.tensor(sizes).cumsum(0) - torch.tensor(sizes)
    place = torch.arange(len(slots)) + (starts - tokens.cumsum(0) + tokens)[expert]
    padded = x.new_zeros(sum(sizes), x.shape[1])
    padded[place] = x[order // chosen.shape[1]]
    middle = _multiplied(padded, up_and_gate, sizes)
    made = _multiplied(F.silu(middle[:, :inner]) * middle[:, inner:], down, sizes)
    rows = x.new_empty(len(slots), x.shape[1])
    rows[order] = made[place]
    return (rows.view(*chosen.shape, x.shape[1]).to(gates.dtype) * gates.unsqueeze(-1)).sum(1).to(x.dtype)


def _sizes(tokens: list[int]) -> list[int]:
    """How many rows each expert gets for its ``tokens``: all as many, unless that is many and mostly padding."""
    sizes = [_rounded(count) for count in tokens]
    most = max(sizes)
    alike = most <= _MOST_ROWS or len(sizes) * most <= _MOST_PADDING * sum(sizes)
    return [most] * len(sizes) if alike else sizes


def _rounded(count: int) -> int:
    """``count`` or more: nothing, a power of two, or three quarters of one."""
    power = 1 << max(0, count - 1).bit_length()
    return 0 if not count else 3 * power // 4 if count <= 3 * power // 4 else power


def _multiplied(rows: Tensor, weights: Tensor, sizes: list[int]) -> Tensor:
    """Each expert's ``rows`` by its own of the ``weights`` ``[E, out, in]``."""
    if len(set(sizes)) == 1:
        return torch.bmm(rows.view(len(sizes), sizes[0], rows.shape[1]), weights.transpose(1, 2)).flatten(0, 1)
    made = rows.new_empty(len(rows), weights.shape[1])
    for part, weight, out in zip(rows.split(sizes), weights, made.split(sizes), strict=True):
        torch.mm(part, weight.T, out=out)
    return made
