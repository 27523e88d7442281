"""Rotary position embedding: the frequencies of a model's config, YaRN's among them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """``frequencies`` float32 ``[D/2]`` in radians a position; cosines and sines are multiplied by ``scale``."""

    frequencies: Tensor
    scale: float = 1.0


def rotary(head_dim: int, theta: float, yarn: Mapping[str, float] | None) -> Rotary:
    """The embedding of heads of width ``head_dim``; ``yarn`` as :func:`agent_rl.models.families.read_config` gives it.

    YaRN (arXiv 2309.00071): a pair that turns more than ``beta_fast`` times over the original context keeps its
    frequency, one that turns less than ``beta_slow`` times has it divided by ``factor``, those between are interpolated
    linearly in their index (Eq. 17-18, "NTK by parts"), and attention is sharpened by 0.1 ln(factor) + 1 (Eq. 22).
    """
    # Divided, not raised to a negative power: as engines do it, so both round alike. An ulp is 0.004 rad at 65,536.
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if yarn is None:
        return Rotary(frequencies)

    def index(turns: float) -> float:
        """The pair that turns so often over the original context."""
        length = yarn["original_max_position_embeddings"]
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(index(yarn["beta_fast"])), 0), min(math.ceil(index(yarn["beta_slow"])), head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    divided = ramp.clamp(0, 1)
    factor = yarn["factor"]
    mixed = frequencies / factor * divided + frequencies * (1 - divided)
    return Rotary(mixed, 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
