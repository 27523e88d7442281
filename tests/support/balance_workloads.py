"""Skewed counts of a model that is not at hand: steps of micro-batches whose experts differ in weight; captured ones.

An expert's weight is the product of log-normal factors: one of the step (stable; neighbouring experts share a part of
it), one of the micro-batch and one of each source's own sequences (volatile). Counts are Poisson around the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from r3.balance.cost import Floats, by_node, imbalance
from r3.balance.plan import ExpertLayout, Ints, PlanArrays


@dataclass(frozen=True, slots=True)
class Regime:
    """Standard deviations of the logarithms of an expert's weight.

    ``step``: between experts over a whole step, ``shared`` the part of its variance that a quarter of the experts has
    in common; ``drift``: from one step to the next; ``microbatch``: of all ranks together; ``source``: of one rank.
    """

    step: float
    microbatch: float
    source: float
    shared: float = 0.55
    drift: float = 0.05


REGIMES = {
    "mod": Regime(step=0.25, microbatch=0.1, source=0.9),
    "main": Regime(step=0.36, microbatch=0.1, source=1.5),
    "vol": Regime(step=0.36, microbatch=0.5, source=1.8),
}
"""``main`` has the spread that the paper's figures show for Qwen3-30B-A3B; ``mod`` is milder, ``vol`` more volatile."""


@dataclass(frozen=True, slots=True)
class Pass:
    """The size of what is drawn: M micro-batches, L layers, and the tokens times top-k that a rank has of each."""

    microbatches: int = 16
    layers: int = 48
    tokens: int = 14_500
    top_k: int = 8


def skewed_steps(regime: Regime, layout: ExpertLayout, size: Pass, seed: int) -> Iterator[Ints]:
    """Endless counts ``[M, L, R, E]``, one step after another. Sources differ by up to 10 % in their tokens."""
    rng = np.random.default_rng(seed)
    own, common = rng.normal(size=(size.layers, layout.experts)), rng.normal(size=(size.layers, 4))
    group = np.arange(layout.experts) * 4 // layout.experts
    weight = regime.step * (np.sqrt(1 - regime.shared) * own + np.sqrt(regime.shared) * common[:, group])
    shape = (size.microbatches, size.layers, layout.ranks, layout.experts)
    while True:
        weight = weight + regime.drift * rng.normal(size=weight.shape)
        logs = weight[:, None] + regime.microbatch * rng.normal(size=(*shape[:2], 1, layout.experts))
        share = np.exp(logs + regime.source * rng.normal(size=shape))
        tokens = size.tokens * size.top_k * rng.uniform(0.9, 1.1, size=(size.microbatches, 1, layout.ranks, 1))
        yield rng.poisson(share / share.sum(axis=3, keepdims=True) * tokens).astype(np.int32)


def captured(ranks: int) -> Ints:
    """``[M, 4, R, 8]``: four trajectories a rank and micro-batch, of 64 that the quickstart's model sampled.

    The file holds their tokens by trajectory, layer and expert, uint8 ``[64, 4, 8]``, counted from the routes that
    ``agent-rl rollout configs/quickstart.yaml`` archived for 8 tasks in groups of 8.
    """
    found = np.load(Path(__file__).parents[1] / "r3" / "quickstart_counts.npy").astype(np.int32)
    rng, parts = np.random.default_rng(0), []
    for _ in range(20):
        parts.append(found[rng.permutation(64)].reshape(-1, ranks, 4, *found.shape[1:]).sum(axis=2, dtype=np.int32))
    return np.concatenate(parts).swapaxes(1, 2)


def node_floor(layout: ExpertLayout, counts: Ints) -> Floats:
    """Returns ``[M, L]``: the lowest imbalance of plans that compute each token on its expert's owner node."""
    load = by_node(layout, PlanArrays.identity(layout, counts).load).sum(axis=2)
    return imbalance(load)
