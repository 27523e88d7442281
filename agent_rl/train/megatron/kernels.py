"""Norm and rotary embedding with backward passes of their own, in plain torch operations, for any device.

Autograd would keep every intermediate result and walk over memory once for each: these keep at most their input, and
take half the time or less on a CPU. Intermediate precision and rounding are those of transformers' Qwen3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agent_rl.train.megatron.rotary import Rotary


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis of ``x [..., H]``, in float32 up to the weight."""
    normed: Tensor = _RmsNorm.apply(x, weight, eps)
    return normed


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of ``x [T, heads, D]`` in float32, the two halves of D rotated against each other.

    ``cos`` and ``sin`` ``[T, 1, D]`` from :func:`rotary_tables`.
    """
    rotated: Tensor = _Rotate.apply(x, cos, sin)
    return rotated


def rotary_tables(positions: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines ``[T, 1, D]`` of the angle of every position (int64 ``[T]``) in every pair of D."""
    angles = torch.outer(positions.float(), rotary.frequencies.to(positions.device))[:, None, :]
    cos, sin = angles.cos() * rotary.scale, angles.sin() * rotary.scale
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        normed, gradient = x.float() * inverse, gradients[0].float()
        towards = gradient * normed
        of_weight = towards.flatten(0, -2).sum(0).to(weight.dtype)
        share = (towards @ weight.float())[..., None] / x.shape[-1]
        of_x = (gradient * weight).addcmul_(normed, share, value=-1).mul_(inverse)
        return of_x.to(x.dtype), of_weight, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(gradients[0], cos, sin, -1.0), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    wide = x.float()
    swapped = wide.roll(x.shape[-1] // 2, dims=-1).mul_(sin)  # half of D to the right swaps the halves
    if direction < 0:
        swapped.neg_()
    return swapped.addcmul_(wide, cos).to(x.dtype)
