"""The parts of an architecture that only some families have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mixer = Literal["grouped", "latent", "delta", "mamba", "none"]
"""What mixes the tokens of a layer: grouped-query attention, multi-head latent attention, the gated delta rule, or
Mamba-2. ``none``: the layer is an MLP or experts only."""

ExpertForm = Literal["gated", "clamped", "squared"]
"""The inner layer of an expert and of an MLP, from gate g and up u. ``gated``: silu(g) u. ``squared``: relu(u)^2,
without a gate (Primer, arXiv 2109.08668). ``clamped``, of experts only, with biases on both projections:
g sigmoid(1.702 g) (u + 1), with g at most 7 and u within -7 and 7 (gpt-oss, arXiv 2508.10925)."""


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Keys and values are projections of a latent of width ``kv_rank``; so are queries of a latent of width ``q_rank``
    (0: of the hidden state). A head's query and key have ``plain_dim`` dimensions without position and ``rotary_dim``
    that are rotated; all heads share the rotated part of the key. ``interleaved``: rotated pairs are neighbors.
    """

    q_rank: int
    kv_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    interleaved: bool = True

    @property
    def cache_width(self) -> int:
        """Numbers of a token that an engine caches in each layer: the latent and the rotated part of the key."""
        return self.kv_rank + self.rotary_dim


@dataclass(frozen=True, slots=True)
class Indexer:
    """The lightning indexer of DeepSeek's sparse attention (DeepSeek-V3.2, arXiv 2512.02556): a query attends to the
    ``top_k`` tokens with the largest index scores, of ``heads`` heads of width ``head_dim``. ``interleaved``: as of
    :class:`Latent`, for the rotated dimensions of the index. Engines cache ``head_dim`` more numbers of a token."""

    heads: int
    head_dim: int
    top_k: int
    interleaved: bool


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


@dataclass(frozen=True, slots=True)
class Mamba:
    """A Mamba-2 state space (arXiv 2405.21060) with a short causal convolution before it.

    Each of ``groups`` has an input and an output vector of ``state`` dimensions, which equally many heads of width
    ``head_dim`` share. ``kernel`` is the convolution's width in tokens.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def convolved(self) -> tuple[int, int, int]:
        """The widths of the convolution's parts: values, input vectors and output vectors."""
        return self.width, self.groups * self.state, self.groups * self.state
