"""The training cost of a sequence: floating-point operations, from the model's shape and the sequence length.

Forward pass over n tokens (the backward pass takes twice that; an operation is a multiplication or an addition). H
hidden, Q and KV the widths of all query heads and of all key or value heads, I an inner width, k of E experts per
token, V vocabulary::

    attention projections     2 n H (2 Q + 2 KV)            per layer
    attention                 2 Q n (n + 1)                 per layer: each token attends to itself and earlier ones
    other token mixers        agent_rl/models/mixer_costs.py
    gated MLP                 6 n H I                       per dense layer, or shared expert
    experts                   6 n H I k + 2 n H E           per MoE layer, with its router
    log-probs                 2 n H V

A sequence costs ``linear n + quadratic n (n + 1)``. The FLOPs per token are those of Narayanan et al., arXiv
2104.04473, appendix, with causal attention counted once and no vocabulary recomputation.
``benchmarks/bench_packing.py`` compares the model with measured times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent_rl.models.mixer_costs import mixer_cost
from agent_rl.models.spec import ModelSpec
from r3.routing import Routing

SAMPLED_ROWS = 16
"""Every 16th row of routes is counted: 65,536 x 48 x 8 ids take 0.2 s to count, and loads need 1 % precision."""


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """FLOPs of a forward pass: ``linear`` per token, ``quadratic`` per pair of tokens. ``expert``: the part of
    ``linear`` for one token in one expert of one layer."""

    linear: float
    quadratic: float
    expert: float = 0.0

    def of(self, lengths: Sequence[int]) -> list[float]:
        """FLOPs of sequences of these lengths."""
        return [self.linear * n + self.quadratic * n * (n + 1) for n in lengths]


TOKENS = SequenceCost(linear=1.0, quadratic=0.0)
"""The cost model in which every token costs 1."""


@dataclass(frozen=True, slots=True)
class LayerFlops:
    """FLOPs of a forward pass by part, per token: one ``expert``, router and shared expert of an MoE layer
    (``beside_experts``), the MLP of a ``dense`` layer, ``logprobs``. Those of token mixers are in
    :mod:`agent_rl.models.mixer_costs`."""

    expert: int
    beside_experts: int
    dense: int
    logprobs: int

    @classmethod
    def of(cls, model: ModelSpec) -> LayerFlops:
        hidden = model.hidden
        return cls(
            expert=2 * model.mlp_matrices * hidden * model.expert_inner,
            beside_experts=2 * model.mlp_matrices * hidden * model.shared_inner + 2 * hidden * model.num_experts,
            dense=2 * model.mlp_matrices * hidden * model.inner,
            logprobs=2 * hidden * model.vocab_size,
        )


def sequence_cost(model: ModelSpec) -> SequenceCost:
    """The cost of sequences on ``model``, with balanced experts."""
    layers, moe, parts = model.num_layers, len(model.moe_layer_ids), LayerFlops.of(model)
    mixers = [mixer_cost(model, layer) for layer in range(layers)]
    linear = sum(mixer.projections + mixer.token for mixer in mixers) + (layers - moe) * parts.dense + parts.logprobs
    linear += moe * (model.top_k * parts.expert + parts.beside_experts)
    return SequenceCost(float(linear), float(sum(mixer.pair for mixer in mixers)), float(parts.expert))


def expert_loads(routing: Routing, expert_ranks: int) -> NDArray[np.float64]:
    """The (token, expert) pairs of a sequence per expert rank, ``[moe_layers, expert_ranks]``.

    Rank r has experts ``[r E / R, (r + 1) E / R)``. Counts every :data:`SAMPLED_ROWS`-th row and scales up. A sequence
    without a present row counts as even.
    """
    rows = routing.experts[::SAMPLED_ROWS][routing.present[::SAMPLED_ROWS]]
    pairs = routing.tokens * routing.top_k
    if not len(rows):
        return np.full((routing.moe_layers, expert_ranks), pairs / expert_ranks)
    rank_of = rows.astype(np.int64) * expert_ranks // routing.num_experts
    flat = rank_of + np.arange(routing.moe_layers)[:, None] * expert_ranks
    counts = np.bincount(flat.ravel(), minlength=routing.moe_layers * expert_ranks)
    scale = pairs / (len(rows) * routing.top_k)
    return (counts * scale).reshape(routing.moe_layers, expert_ranks).astype(np.float64)
