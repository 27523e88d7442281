"""GRPO's policy loss with clip-higher and token-mean aggregation, and the numbers reported beside it.

Pure functions of torch tensors. Axes: ``T`` the tokens of one packed micro-batch. A token that was not sampled has
``mask_T`` 0 and takes part in nothing. Sums are returned, never means: a global batch is spread over micro-batches and
data-parallel ranks, so the division by its number of sampled tokens happens once, with the global count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """``loss``: this micro-batch's part of the global batch's loss (a scalar with a gradient).

    The others are detached sums over the micro-batch's sampled tokens; divided by the global count they become
    ``train/clip_fraction``, ``train/entropy`` and ``train/approx_kl``.
    """

    loss: Tensor
    clipped: Tensor
    entropy: Tensor
    approx_kl: Tensor


def clipped_objective(ratio_T: Tensor, advantages_T: Tensor, *, eps_low: float, eps_high: float) -> Tensor:
    """Per-token loss ``-min(ratio * A, clip(ratio, 1 - eps_low, 1 + eps_high) * A)``, ``[T]``.

    The clipped surrogate of PPO (arXiv 1707.06347, eq. 7) with DAPO's separate upper bound, clip-higher
    (arXiv 2503.14476, eq. 8).
    """
    clipped_T = ratio_T.clamp(1.0 - eps_low, 1.0 + eps_high)
    return -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)


def is_clipped(ratio_T: Tensor, advantages_T: Tensor, *, eps_low: float, eps_high: float) -> Tensor:
    """Whether the clip cuts a token's gradient: above the range with A > 0, or below it with A < 0. bool ``[T]``."""
    above_T = (ratio_T > 1.0 + eps_high) & (advantages_T > 0)
    below_T = (ratio_T < 1.0 - eps_low) & (advantages_T < 0)
    return above_T | below_T


def k3(log_ratio_T: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(old || new) a token, ``r - 1 - log r`` with ``log r`` given; never negative."""
    return torch.expm1(log_ratio_T) - log_ratio_T


def policy_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    entropy_T: Tensor,
    weights_T: Tensor,
    eps_low: float,
    eps_high: float,
    batch_tokens: float,
) -> PolicyLoss:
    """This micro-batch's share of the token-mean GRPO loss (arXiv 2402.03300; token mean: DAPO, arXiv 2503.14476)::

        L = 1 / N * sum_t mask_t * w_t * -min(rho_t A_t, clip(rho_t, 1 - eps_low, 1 + eps_high) A_t)
        rho_t = exp(logprob_t - old_logprob_t)

    ``batch_tokens`` is N, the sampled tokens of the *global* batch, over all micro-batches and ranks. ``weights_T``
    are the samples' weights, 1 by default; they scale a token's term and not N.
    """
    mask_T = mask_T.to(logprobs_T.dtype)
    # Where the mask is 0 the old log-prob means nothing; an infinite ratio there would turn 0 * inf into NaN.
    log_ratio_T = torch.where(mask_T > 0, logprobs_T - old_logprobs_T, torch.zeros_like(logprobs_T))
    ratio_T = log_ratio_T.exp()
    terms_T = clipped_objective(ratio_T, advantages_T, eps_low=eps_low, eps_high=eps_high)
    detached_T = ratio_T.detach()
    clipped_T = is_clipped(detached_T, advantages_T, eps_low=eps_low, eps_high=eps_high)
    return PolicyLoss(
        loss=(terms_T * weights_T * mask_T).sum() / batch_tokens,
        clipped=(clipped_T * mask_T).sum(),
        entropy=(entropy_T.detach() * mask_T).sum(),
        approx_kl=(k3(log_ratio_T.detach()) * mask_T).sum(),
    )


def weighted_cross_entropy(logprobs_T: Tensor, weights_T: Tensor, *, batch_weight: float) -> Tensor:
    """Supervised loss ``-1 / W * sum_t w_t * logprob_t``: W is the global batch's sum of weights. Scalar."""
    return -(logprobs_T * weights_T.to(logprobs_T.dtype)).sum() / batch_weight
