"""The mismatch between trainer and engine: log-probs of the sampled tokens, and experts.

Log-probs (p: trainer, q: engine, of the sampled token; r = p / q):

- ``k3_kl``                  mean(r - 1 - log r), the k3 estimate of KL(q || p) from samples of q (Schulman,
  "Approximating KL Divergence", 2020), used for this mismatch by the R3 paper (arXiv 2510.11370, section 3); NeMo RL
  calls it ``gen_kl_error``
- ``f_tau``                  share of tokens with max(r, 1/r) > tau (the R3 paper's extreme token distribution)
- ``token_mult_prob_error``  mean exp |log p - log q|, 1 if equal (NeMo RL's name)
- ``js_divergence``          half k3 of p against m plus half k3 of q against m, m = (p + q) / 2 (NeMo RL:
  ``js_divergence_error``)
- ``logprob_abs_diff``       mean |log p - log q|; ``logprob_abs_diff_max`` that of the worst token

Experts, as the R3 paper counts them: a *router* is one (token, layer) pair.

- router level               share of routers whose sets of experts differ, and the number of differing experts
- token level                number of differing layers per token; share of tokens with at least one
- sequence level             a sequence's mean number of differing layers per token

All log-prob figures are means of heavy-tailed values: a few tokens dominate k3. An :class:`Estimate` therefore has an
interval from a bootstrap over sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from r3.routing import Routing, RoutingError

Floats = NDArray[np.floating]
Mask = NDArray[np.bool_]

TAUS = tuple(1 + 10 ** (exponent / 10) for exponent in range(-30, 21))
"""Default values of tau: tau - 1 from 0.001 to 100, ten points per decade; includes tau = 2."""

DRAWS = 1000
"""Resamples of a bootstrap."""


def log_ratios(trainer: Floats, engine: Floats, mask: Mask | None = None) -> NDArray[np.float64]:
    """Returns log p - log q of the tokens selected by ``mask`` (None: all), flattened.

    Raises ValueError for different shapes, if no token is selected, and for log-probs that are not finite.
    """
    if trainer.shape != engine.shape or (mask is not None and mask.shape != trainer.shape):
        raise ValueError(
            f"trainer {trainer.shape}, engine {engine.shape} and mask {None if mask is None else mask.shape} differ"
        )
    difference = trainer.astype(np.float64) - engine.astype(np.float64)
    kept = difference.ravel() if mask is None else difference[mask]
    if kept.size == 0:
        raise ValueError("no token to compare: the mask selects none")
    if not np.isfinite(kept).all():
        raise ValueError(f"{int((~np.isfinite(kept)).sum())} of {kept.size} log-prob differences are not finite")
    return kept


def k3_kl(trainer: Floats, engine: Floats, mask: Mask | None = None) -> float:
    """Returns the mean of r - 1 - log r; 0 if equal, never negative."""
    return float(_k3(log_ratios(trainer, engine, mask)).mean())


def f_tau(trainer: Floats, engine: Floats, tau: float, mask: Mask | None = None) -> float:
    """Returns the share of tokens whose probability differs by more than a factor ``tau`` in either direction."""
    if tau <= 0:
        raise ValueError(f"tau must be positive, got {tau}")
    return float(_exceeds(log_ratios(trainer, engine, mask), tau).mean())


def token_mult_prob_error(trainer: Floats, engine: Floats, mask: Mask | None = None) -> float:
    """Returns the mean factor between the two probabilities of a token; 1 if equal."""
    return float(_factor(log_ratios(trainer, engine, mask)).mean())


def js_divergence(trainer: Floats, engine: Floats, mask: Mask | None = None) -> float:
    """Returns the Jensen-Shannon divergence, estimated on the sampled tokens."""
    return float(_js(log_ratios(trainer, engine, mask)).mean())


def logprob_abs_diff(trainer: Floats, engine: Floats, mask: Mask | None = None) -> float:
    """Returns the mean absolute difference of log-probs."""
    return float(np.abs(log_ratios(trainer, engine, mask)).mean())


def mismatch_metrics(trainer: Floats, engine: Floats) -> dict[str, float]:
    """Returns all figures by the names of the ``mismatch/*`` metrics, without prefix; ``f_tau`` at tau = 2."""
    log_r = log_ratios(trainer, engine)
    means = {name: float(values(log_r).mean()) for name, values in TOKEN_VALUES.items()}
    return means | {"logprob_abs_diff_max": float(np.abs(log_r).max())}


def _k3(log_r: NDArray[np.float64]) -> NDArray[np.float64]:
    # expm1 keeps the digits that r - 1 loses for r close to 1, the case of nearly all tokens.
    return np.expm1(log_r) - log_r


def _exceeds(log_r: NDArray[np.float64], tau: float) -> NDArray[np.bool_]:
    return np.abs(log_r) > np.log(tau)


def _factor(log_r: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp(np.abs(log_r))


def _js(log_r: NDArray[np.float64]) -> NDArray[np.float64]:
    # log(m / q) with m = (p + q) / 2 is log((r + 1) / 2); against p it is the same of 1 / r.
    against_engine = np.logaddexp(log_r, 0.0) - np.log(2.0)
    against_trainer = np.logaddexp(-log_r, 0.0) - np.log(2.0)
    return 0.5 * _k3(-against_trainer) + 0.5 * _k3(-against_engine)


TOKEN_VALUES: Mapping[str, Callable[[NDArray[np.float64]], NDArray]] = {
    "k3_kl": _k3,
    "f_tau_2": partial(_exceeds, tau=2.0),
    "token_mult_prob_error": _factor,
    "js_divergence": _js,
    "logprob_abs_diff": np.abs,
}
"""Every metric that is a mean over tokens, as a function from log r to a value per token."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % interval, which is NaN for fewer than two sequences."""

    value: float
    low: float
    high: float


def resampled_sums(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Column sums of ``table`` ``[sequences, columns]`` under a bootstrap of its rows, ``[DRAWS, columns]``.

    Tokens of a sequence are not independent, so whole sequences are drawn. Tables with equal numbers of rows get the
    same draws, so figures of two passes over the same sequences are paired.
    """
    generator, rows = np.random.default_rng(0), len(table)
    sums = np.empty((DRAWS, table.shape[1]))
    for draw in range(DRAWS):
        sums[draw] = np.bincount(generator.integers(0, rows, rows), minlength=rows) @ table
    return sums


def estimate_ratios(numerators: Mapping[str, NDArray[np.float64]], base: NDArray[np.float64]) -> dict[str, Estimate]:
    """Returns the ratio of sums of columns ``[sequences]``, by name. NaN or infinite if the denominator is 0."""
    table = np.stack([*numerators.values(), base], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = table[:, :-1].sum(axis=0) / base.sum()
        if len(table) < 2:
            intervals = np.full((2, len(numerators)), np.nan)
        else:
            sums = resampled_sums(table)
            intervals = np.percentile(sums[:, :-1] / sums[:, -1:], [2.5, 97.5], axis=0)
    return {
        name: Estimate(float(value), float(low), float(high))
        for name, value, low, high in zip(numerators, values, *intervals, strict=True)
    }


def per_sequence(values: NDArray, sequence: NDArray[np.integer]) -> NDArray[np.float64]:
    """Returns the sums of ``values`` ``[n]`` over each sequence in ``sequence`` ``[n]``, in the order of their
    numbers."""
    _, index = np.unique(sequence, return_inverse=True)
    return np.bincount(index, weights=values).astype(np.float64, copy=False)


@dataclass(frozen=True, slots=True, eq=False)
class LogprobMismatch:
    """The log-prob figures of some sequences.

    ``metrics``: the means, under the names of :data:`TOKEN_VALUES`. ``f_tau[i]``: F at ``taus[i]``.
    """

    tokens: int
    sequences: int
    metrics: Mapping[str, Estimate]
    taus: NDArray[np.float64]
    f_tau: NDArray[np.float64]


def logprob_mismatch(
    log_r: NDArray[np.float64], sequence: NDArray[np.integer], taus: Sequence[float] = TAUS
) -> LogprobMismatch:
    """Returns the figures of tokens with :func:`log_ratios` ``log_r`` ``[n]`` in sequences ``sequence`` ``[n]``."""
    counts = per_sequence(np.ones(len(log_r)), sequence)
    sums = {name: per_sequence(values(log_r), sequence) for name, values in TOKEN_VALUES.items()}
    return LogprobMismatch(
        tokens=len(log_r),
        sequences=len(counts),
        metrics=estimate_ratios(sums, counts),
        taus=np.asarray(taus, dtype=np.float64),
        f_tau=f_tau_curve(log_r, taus),
    )


def f_tau_curve(log_r: NDArray[np.float64], taus: Sequence[float] = TAUS) -> NDArray[np.float64]:
    """Returns F at each of ``taus``: the share of tokens whose probability differs by more than that factor."""
    if min(taus) <= 0:
        raise ValueError(f"tau must be positive, got {min(taus)}")
    ordered = np.sort(np.abs(log_r))
    return 1 - np.searchsorted(ordered, np.log(taus), side="right") / len(ordered)


@dataclass(frozen=True, slots=True, eq=False)
class RouteMismatch:
    """Two routings of the same tokens, compared as sets of experts over the rows present in both.

    ``router``: share of routers, (token, layer) pairs, that differ; ``by_layer`` ``[L]`` the same in each MoE layer.
    ``token``: share of tokens with a differing layer. ``sequence``: mean over sequences of a sequence's mean number of
    differing layers per token. Distributions:

    - ``experts`` ``[L, top_k + 1]``: number of routers of a layer, by their number of differing experts
    - ``layers`` ``[L + 1]``: number of tokens, by their number of differing layers
    - ``by_sequence`` ``[sequences, L]``: share of a sequence's tokens that differ in a layer (its sum over the layers
      is the sequence's mean number of differing layers per token)
    """

    tokens: int
    sequences: int
    router: float
    token: float
    sequence: float
    by_layer: NDArray[np.float64]
    experts: NDArray[np.int64]
    layers: NDArray[np.int64]
    by_sequence: NDArray[np.float64]


def differing_experts(first: Routing, second: Routing) -> NDArray[np.uint8]:
    """Returns ``[rows, moe_layers]``: how many of ``first``'s experts are not in ``second``, over the rows present in
    both. Rows must be valid by :func:`r3.routing.validate`. Raises RoutingError for different shapes."""
    if first.experts.shape != second.experts.shape or first.num_experts != second.num_experts:
        raise RoutingError(
            f"can't compare {list(first.experts.shape)} of {first.num_experts} experts "
            f"with {list(second.experts.shape)} of {second.num_experts}"
        )
    both = first.present & second.present
    one, other = first.experts[both], second.experts[both]
    differ = np.full(one.shape[:2], first.top_k, dtype=np.uint8)
    for slot in range(first.top_k):  # one slot at a time: all pairs at once would take top_k times the memory
        differ -= (other == one[:, :, slot, None]).any(axis=2)
    return differ


def route_mismatch(differ: NDArray[np.uint8], sequence: NDArray[np.integer], top_k: int) -> RouteMismatch:
    """Returns the figures of rows with :func:`differing_experts` ``differ`` ``[rows, L]`` in ``sequence`` ``[rows]``.

    Raises RoutingError without rows.
    """
    if not len(differ):
        raise RoutingError("no token has routes in both")
    layers = differ.shape[1]
    unequal = differ > 0
    layers_per_token = unequal.sum(axis=1)
    rows = per_sequence(np.ones(len(differ)), sequence)
    by_sequence = np.stack([per_sequence(unequal[:, layer], sequence) / rows for layer in range(layers)], axis=1)
    return RouteMismatch(
        tokens=len(differ),
        sequences=len(rows),
        router=float(unequal.mean()),
        token=float((layers_per_token > 0).mean()),
        sequence=float(by_sequence.sum(axis=1).mean()),
        by_layer=unequal.mean(axis=0),
        experts=np.stack([np.bincount(column, minlength=top_k + 1) for column in differ.T]),
        layers=np.bincount(layers_per_token, minlength=layers + 1),
        by_sequence=by_sequence,
    )
