"""How far the trainer is from the engine: in log-probs of the sampled tokens, and in experts chosen.

Definitions (p: trainer, q: engine, of the sampled token; r = p / q):

- ``k3_kl``                  mean(r - 1 - log r), the k3 estimate of KL(q || p) from samples of q (Schulman,
  "Approximating KL Divergence", 2020), used for this mismatch by the R3 paper (arXiv 2510.11370)
- ``f_tau``                  share of tokens with max(r, 1/r) > tau (the R3 paper's extreme-token distribution)
- ``token_mult_prob_error``  mean exp |log p - log q|, 1 where they agree (NeMo RL's name)
- ``js_divergence``          half k3 of p against m plus half k3 of q against m, m = (p + q) / 2 (NeMo RL)
- ``logprob_abs_diff``       mean |log p - log q|
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from r3.routing import Routing, RoutingError

Floats = NDArray[np.floating]


def log_ratios(trainer: Floats, engine: Floats, mask: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
    """log p - log q of the tokens that ``mask`` keeps (all without one), flattened.

    Raises ValueError for unequal shapes, for no token at all, and for log-probs that are not finite.
    """
    if trainer.shape != engine.shape or (mask is not None and mask.shape != trainer.shape):
        raise ValueError(
            f"trainer {trainer.shape}, engine {engine.shape} and mask {None if mask is None else mask.shape} differ"
        )
    difference = trainer.astype(np.float64) - engine.astype(np.float64)
    kept = difference.ravel() if mask is None else difference[mask]
    if kept.size == 0:
        raise ValueError("no token to compare: the mask keeps none")
    if not np.isfinite(kept).all():
        raise ValueError(f"{int((~np.isfinite(kept)).sum())} of {kept.size} log-prob differences are not finite")
    return kept


def k3_kl(trainer: Floats, engine: Floats, mask: NDArray[np.bool_] | None = None) -> float:
    """Mean of r - 1 - log r; 0 where the two agree, never negative."""
    return float(_k3(log_ratios(trainer, engine, mask)).mean())


def f_tau(trainer: Floats, engine: Floats, tau: float, mask: NDArray[np.bool_] | None = None) -> float:
    """Share of tokens whose probability differs by more than a factor ``tau`` either way."""
    if tau <= 0:
        raise ValueError(f"tau must be positive, got {tau}")
    return float((np.abs(log_ratios(trainer, engine, mask)) > np.log(tau)).mean())


def token_mult_prob_error(trainer: Floats, engine: Floats, mask: NDArray[np.bool_] | None = None) -> float:
    """Mean factor by which a token's probability differs; 1 where the two agree."""
    return float(np.exp(np.abs(log_ratios(trainer, engine, mask))).mean())


def js_divergence(trainer: Floats, engine: Floats, mask: NDArray[np.bool_] | None = None) -> float:
    """Jensen-Shannon divergence estimated on the sampled tokens alone."""
    log_r = log_ratios(trainer, engine, mask)
    # log(m / q) with m = (p + q) / 2 is log((r + 1) / 2); against p it is the same of 1 / r.
    against_engine = np.logaddexp(log_r, 0.0) - np.log(2.0)
    against_trainer = np.logaddexp(-log_r, 0.0) - np.log(2.0)
    return float(0.5 * _k3(-against_trainer).mean() + 0.5 * _k3(-against_engine).mean())


def logprob_abs_diff(trainer: Floats, engine: Floats, mask: NDArray[np.bool_] | None = None) -> float:
    """Mean absolute difference of log-probs."""
    return float(np.abs(log_ratios(trainer, engine, mask)).mean())


def _k3(log_r: NDArray[np.float64]) -> NDArray[np.float64]:
    # expm1 keeps the digits that r - 1 loses where r is close to 1, as it is for nearly all tokens.
    return np.expm1(log_r) - log_r


def mismatch_metrics(trainer: Floats, engine: Floats, mask: NDArray[np.bool_] | None = None) -> dict[str, float]:
    """All of them under the names of the ``mismatch/*`` metrics, without the prefix; ``f_tau`` at tau = 2."""
    return {
        "k3_kl": k3_kl(trainer, engine, mask),
        "f_tau_2": f_tau(trainer, engine, 2.0, mask),
        "token_mult_prob_error": token_mult_prob_error(trainer, engine, mask),
        "js_divergence": js_divergence(trainer, engine, mask),
        "logprob_abs_diff": logprob_abs_diff(trainer, engine, mask),
    }


@dataclass(frozen=True, slots=True)
class RouteMismatch:
    """Two routings of the same tokens compared as sets of experts, over the tokens that both have.

    ``router``: share of (token, layer) pairs that differ. ``token``: share of tokens with a differing layer.
    ``layers_a_token``: mean number of differing layers a token. ``histogram[n]``: tokens with n differing layers.
    ``by_layer``: share of tokens that differ in each MoE layer. ``tokens``: how many were compared.
    """

    router: float
    token: float
    layers_a_token: float
    histogram: NDArray[np.int64]
    by_layer: NDArray[np.float64]
    tokens: int


def differing_routers(first: Routing, second: Routing) -> NDArray[np.bool_]:
    """``[tokens, moe_layers]``: whether the sets of experts differ, over the rows present in both."""
    if first.experts.shape != second.experts.shape or first.num_experts != second.num_experts:
        raise RoutingError(
            f"can't compare {list(first.experts.shape)} of {first.num_experts} experts "
            f"with {list(second.experts.shape)} of {second.num_experts}"
        )
    both = first.present & second.present
    return np.any(np.sort(first.experts[both], axis=2) != np.sort(second.experts[both], axis=2), axis=2)


def route_mismatch(first: Routing, second: Routing) -> RouteMismatch:
    """Compare two routings of one sequence. Raises RoutingError if they are of different shapes or share no row."""
    differs = differing_routers(first, second)
    if not len(differs):
        raise RoutingError("no token has routes in both")
    layers = differs.sum(axis=1)
    return RouteMismatch(
        router=float(differs.mean()),
        token=float((layers > 0).mean()),
        layers_a_token=float(layers.mean()),
        histogram=np.bincount(layers, minlength=differs.shape[1] + 1),
        by_layer=differs.mean(axis=0),
        tokens=len(differs),
    )
