"""The parts of an architecture that only some families have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mixer = Literal["grouped", "latent", "delta", "mamba", "none"]
"""What mixes the tokens of a layer: grouped-query attention, multi-head latent attention, the gated delta rule,
Mamba-2, or nothing (a layer that only has an MLP or experts)."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The gated delta rule (Gated DeltaNet, arXiv 2412.06464) with a short causal convolution before it.

    Every key head serves equally many value heads. ``kernel`` is the convolution's width in tokens. ``fused``: the
    checkpoint has one projection of queries, keys, values and output gates, arranged by key head, and one of beta and
    decay; otherwise it has four.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    fused: bool

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim
