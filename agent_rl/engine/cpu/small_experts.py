"""All experts of a layer in one product, on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_MOST_WEIGHTS = 1 << 20
_MOST_TOKENS = 128
_MOST_PADDING = 16


def are_multiplied_at_once(tokens: Tensor, up_and_gate: Tensor) -> bool:
    """Whether :func:`mix_experts` is the faster way for experts of these weights ``[E, 2 I, H]`` with so many
    ``tokens`` ``[E]`` each: all weights are small and an expert has few tokens, so that it is calls that cost, and the
    load is even enough.

    With 8 of 128 experts of 128 x 16 and 64 tokens it takes an eighth of the time (``tests/bench/bench_experts.py``);
    with experts of 2,048 x 768 and few tokens it would take many times as long.
    """
    experts, rows = len(tokens), int(tokens.sum())
    few = up_and_gate.numel() <= _MOST_WEIGHTS and rows <= _MOST_TOKENS * experts
    return few and experts * int(tokens.max()) <= _MOST_PADDING * max(rows, experts)


def mix_experts(x: Tensor, gates: Tensor, chosen: Tensor, tokens: Tensor, up_and_gate: Tensor, down: Tensor) -> Tensor:
    """What the experts ``chosen`` ``[T, K]`` make of ``x`` ``[T, H]``, summed up by ``gates`` ``[T, K]``.

    ``tokens`` ``[E]`` counts each expert's; ``up_and_gate`` ``[E, 2 I, H]`` and ``down`` ``[E, H, I]`` are the weights,
    SwiGLU is between them. The tokens of each expert are padded to the most that one has. The bits are those
    of products expert by expert where both kinds add up alike, as in bfloat16 on the processor that it was tried on.
    """
    slots, inner = chosen.reshape(-1), down.shape[2]
    order = slots.argsort()
    expert = slots[order]
    place = torch.arange(len(slots)) - (tokens.cumsum(0) - tokens)[expert]
    padded = x.new_zeros(len(tokens), int(tokens.max()), x.shape[1])
    padded[expert, place] = x[order // chosen.shape[1]]
    made = torch.bmm(padded, up_and_gate.transpose(1, 2))
    made = torch.bmm(F.silu(made[..., :inner]) * made[..., inner:], down.transpose(1, 2))
    rows = x.new_empty(len(slots), x.shape[1])
    rows[order] = made[expert, place]
    return (rows.view(*chosen.shape, -1).to(gates.dtype) * gates.unsqueeze(-1)).sum(1).to(x.dtype)
