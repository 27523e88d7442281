"""What a sequence costs to train on: floating-point operations, from the model's shape and the sequence's length.

Forward pass over n tokens (the backward pass takes twice that, at every length alike; an operation is a multiplication
or an addition). H hidden, Q and KV the widths of all query and of all key or value heads, I an inner width, k experts
of E a token, V vocabulary::

    attention's projections   2 n H (2 Q + 2 KV)            a layer
    attention itself          2 Q n (n + 1)                 a layer: each token attends to itself and those before it
    gated MLP                 6 n H I                       a dense layer, or a shared expert
    experts                   6 n H I k + 2 n H E           a layer of experts, with its router
    log-probs                 2 n H V

So a sequence costs ``linear n + quadratic n (n + 1)``. The same FLOPs per token are Narayanan et al.'s, arXiv
2104.04473, appendix, with causal attention counted once and no vocabulary recomputation. What the hardware makes of a
FLOP differs between these parts; ``benchmarks/bench_packing.py`` compares the model with measured times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent_rl.models.spec import ModelSpec
from r3.routing import Routing

SAMPLED_ROWS = 16
"""One row of routes in so many is counted: 65,536 x 48 x 8 ids take 0.2 s to count, and loads need no more than 1 %."""


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """FLOPs of a forward pass: ``linear`` a token, ``quadratic`` a pair of tokens, ``expert`` of the linear part for
    one token in one expert of one layer."""

    linear: float
    quadratic: float
    expert: float = 0.0

    def of(self, lengths: Sequence[int]) -> list[float]:
        """One number a sequence."""
        return [self.linear * n + self.quadratic * n * (n + 1) for n in lengths]


TOKENS = SequenceCost(linear=1.0, quadratic=0.0)
"""Every token costs the same."""


@dataclass(frozen=True, slots=True)
class PartCosts:
    """FLOPs of a forward pass by part: for a token in one layer's ``projections``, in one ``expert``, in what else a
    layer of experts has (``beside_experts``: its router and shared expert), in a ``dense`` layer's MLP, and in
    ``logprobs``; in one layer's ``attention`` of n tokens, of which half the pairs are masked, over n squared."""

    projections: int
    attention: int
    expert: int
    beside_experts: int
    dense: int
    logprobs: int

    @classmethod
    def of(cls, model: ModelSpec) -> PartCosts:
        hidden = model.hidden
        return cls(
            projections=2 * hidden * (2 * model.q_width + 2 * model.kv_width),
            attention=2 * model.q_width,
            expert=6 * hidden * model.expert_inner,
            beside_experts=6 * hidden * model.shared_inner + 2 * hidden * model.num_experts,
            dense=6 * hidden * model.inner,
            logprobs=2 * hidden * model.vocab_size,
        )


def sequence_cost(model: ModelSpec) -> SequenceCost:
    """The cost on ``model``, its experts evenly loaded."""
    layers, moe, parts = model.num_layers, len(model.moe_layer_ids), PartCosts.of(model)
    linear = layers * parts.projections + (layers - moe) * parts.dense + parts.logprobs
    linear += moe * (model.top_k * parts.expert + parts.beside_experts)
    return SequenceCost(float(linear), float(layers * parts.attention), float(parts.expert))


def expert_loads(routing: Routing, expert_ranks: int) -> NDArray[np.float64]:
    """How many (token, expert) pairs of a sequence fall to each expert-parallel rank, ``[moe_layers, expert_ranks]``.

    Rank r holds experts ``[r E / R, (r + 1) E / R)``. Counted on some rows (:data:`SAMPLED_ROWS`) and scaled up; a
    sequence without any present row is taken to be spread evenly.
    """
    rows = routing.experts[::SAMPLED_ROWS][routing.present[::SAMPLED_ROWS]]
    pairs = routing.tokens * routing.top_k
    if not len(rows):
        return np.full((routing.moe_layers, expert_ranks), pairs / expert_ranks)
    held = rows.astype(np.int64) * expert_ranks // routing.num_experts
    flat = held + np.arange(routing.moe_layers)[:, None] * expert_ranks
    counts = np.bincount(flat.ravel(), minlength=routing.moe_layers * expert_ranks)
    scale = pairs / (len(rows) * routing.top_k)
    return (counts * scale).reshape(routing.moe_layers, expert_ranks).astype(np.float64)
