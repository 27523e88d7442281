"""RMSNorm and rotary position embedding with their own backward passes, in plain torch operations, for any device.

They keep at most their input for the backward pass and take at most half of autograd's time on a CPU. Intermediate
precision and rounding are those of transformers' Qwen3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """``frequencies`` float32 ``[D/2]`` in radians per position; ``scale`` multiplies cosines and sines."""

    frequencies: Tensor
    scale: float = 1.0


def rotary(head_dim: int, theta: float, yarn: Mapping[str, float] | None) -> Rotary:
    """The frequencies for heads of width ``head_dim``. ``yarn``: see :func:`agent_rl.models.families.read_config`.

    YaRN (arXiv 2309.00071): a pair that turns more than ``beta_fast`` times over the original context keeps its
    frequency. A pair that turns less than ``beta_slow`` times has its frequency divided by ``factor``. Pairs between
    are interpolated linearly by index (Eq. 17-18, "NTK by parts"); ``truncate`` rounds the interval's ends to whole
    indices. Cosines and sines are scaled by 0.1 ln(factor) + 1 (Eq. 22); with ``mscale`` and ``mscale_all_dim`` by the
    ratio of :func:`yarn_scale` of both.
    """
    # A division, as in the engines: a negative power rounds differently, by 0.004 rad at position 65,536.
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if yarn is None:
        return Rotary(frequencies)

    def index(turns: float) -> float:
        """The index of the pair that turns ``turns`` times over the original context."""
        length = yarn["original_max_position_embeddings"]
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index(yarn["beta_fast"]), index(yarn["beta_slow"])
    if yarn["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    divided = ramp.clamp(0, 1)
    factor = yarn["factor"]
    mixed = frequencies / factor * divided + frequencies * (1 - divided)
    scale = yarn_scale(factor, yarn.get("mscale", 1.0)) / yarn_scale(factor, yarn.get("mscale_all_dim", 0.0))
    return Rotary(mixed, scale)


def yarn_scale(factor: float, weight: float) -> float:
    """YaRN's factor of attention, ``0.1 weight ln(factor) + 1``. DeepSeek-V3 divides it between cosines and sines, and
    the softmax scale."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis of ``x [..., H]``, in float32 up to the weight.
    ``zero_centered``: with ``1 + weight`` in place of ``weight``, all in float32."""
    normed: Tensor = _RmsNorm.apply(x, weight, eps, zero_centered)
    return normed


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of ``x [T, heads, D]`` in float32, which rotates the two halves of D.

    ``cos`` and ``sin`` ``[T, 1, D]`` from :func:`rotary_tables`.
    """
    rotated: Tensor = _Rotate.apply(x, cos, sin)
    return rotated


def rotate_part(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """As :func:`rotate`, of the first dimensions of each head, as many as the tables have; the others stay.

    ``interleaved``: neighbors form the rotated pairs. The result has first all first and then all second dimensions of
    the pairs; products of queries and keys do not depend on that order.
    """
    width = cos.shape[-1]
    part = x[..., :width]
    if interleaved:
        part = part.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    part = rotate(part, cos, sin)
    return part if width == x.shape[-1] else torch.cat((part, x[..., width:]), dim=-1)


def rotary_tables(positions: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines ``[T, 1, D]`` of the angle of every position (int64 ``[T]``) in every pair of D."""
    angles = torch.outer(positions.float(), rotary.frequencies.to(positions.device))[:, None, :]
    cos, sin = angles.cos() * rotary.scale, angles.sin() * rotary.scale
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        ctx.zero_centered = zero_centered
        if zero_centered:
            return (wide * inverse * (weight.float() + 1)).to(x.dtype)
        return (wide * inverse).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        factor = weight.float() + 1 if ctx.zero_centered else weight.float()
        normed, gradient = x.float() * inverse, gradients[0].float()
        towards = gradient * normed
        of_weight = towards.flatten(0, -2).sum(0).to(weight.dtype)
        share = (towards @ factor)[..., None] / x.shape[-1]
        of_x = (gradient * factor).addcmul_(normed, share, value=-1).mul_(inverse)
        return of_x.to(x.dtype), of_weight, None, None


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
