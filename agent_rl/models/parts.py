"""The parts of an architecture that only some families have."""

from __future__ import annotations

from typing import Literal

Mixer = Literal["grouped", "latent", "delta", "mamba", "none"]
"""What mixes the tokens of a layer: grouped-query attention, multi-head latent attention, the gated delta rule,
Mamba-2, or nothing (a layer that only has an MLP or experts)."""
