"""The parts of an architecture that only some families have."""

from __future__ import annotations

from typing import Literal

Mixer = Literal["grouped", "latent", "delta", "mamba", "none"]
"""What mixes the tokens of a layer: grouped-query attention, multi-head latent attention, the gated delta rule,
Mamba-2, or nothing (a layer that only has an MLP or experts)."""

ExpertForm = Literal["gated", "clamped"]
"""An expert's inner layer from gate g and up u. ``gated``: silu(g) u. ``clamped``, with biases on both projections:
g sigmoid(1.702 g) (u + 1), with g at most 7 and u within -7 and 7 (gpt-oss, arXiv 2508.10925)."""
