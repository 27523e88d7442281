"""A micro-batch's share of the policy loss, with its reported sums. Pure functions of torch tensors.

Axes: ``T`` the tokens of one packed micro-batch. A token that was not sampled has ``mask_T`` 0 and no effect. Functions
return sums, never means: a global batch is distributed over micro-batches and data-parallel ranks, so the division by
tokens or sequences happens once, with the global count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agent_rl.config import TrainConfig
from agent_rl.train.loss.corrections import floored_shift, within_policy
from agent_rl.train.loss.objectives import (
    LOG_LIMIT,
    aggregation_weights,
    kl_estimate,
    kl_penalty,
    objective_terms,
    top_k_divergence,
)


@dataclass(frozen=True, slots=True)
class LossCounts:
    """The divisors of one optimizer update over *all* micro-batches and ranks: sampled tokens, sequences with one, the
    tokens' sum of sample weights, and observed tokens."""

    tokens: int
    sequences: int
    weight: float
    observed: int = 0


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """``loss``: this micro-batch's part of the global batch's loss (a scalar with a gradient).

    The others are detached sums over the micro-batch's sampled tokens. Divided by the global count they are
    ``train/clip_fraction``, ``train/entropy``, ``train/approx_kl``, ``train/correction_weight``,
    ``train/correction_dropped``, ``train/kl_reference`` (0 without a reference) and ``distill/loss_kl`` (0 without a
    teacher's top_k). ``observation`` is the sum of ``train/observation_loss``, over observed tokens. ``clipped_T`` and
    ``dropped_T`` bool: the clipped tokens, and those with a correction factor of 0.
    """

    loss: Tensor
    clipped: Tensor
    entropy: Tensor
    approx_kl: Tensor
    correction: Tensor
    dropped: Tensor
    kl_reference: Tensor
    distill: Tensor
    observation: Tensor
    router_shift: Tensor
    clipped_T: Tensor
    dropped_T: Tensor


def policy_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    factors_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    *,
    entropy_T: Tensor,
    weights_T: Tensor,
    train: TrainConfig,
    length: int,
    counts: LossCounts,
    reference_T: Tensor | None = None,
    selected_T: Tensor | None = None,
    top_Tk: tuple[Tensor, Tensor] | None = None,
    observed_T: Tensor | None = None,
    shift_T: Tensor | None = None,
) -> PolicyLoss:
    """This micro-batch's share of the loss::

        L = sum_t a_t w_t (c_t l_t + beta k_t - eta H_t + delta d_t) - lambda / O sum_o logprob_o

    ``l``: the objective's terms (:mod:`.objectives`) with ``rho_t = exp(logprob_t - old_logprob_t)``. ``a``: the
    aggregation's weights, which divide by ``counts``. ``c``: the correction factors ``factors_T``
    (:mod:`.corrections`). ``w``: the samples' weights ``weights_T``, 1 by default, which scale a term but not the
    divisor. ``k``: the estimated KL to the reference with log-probs ``reference_T`` (GRPO, arXiv 2402.03300, eq. 3;
    only with ``train.kl.apply_to: loss``). ``H``: the entropy ``entropy_T``, which needs a gradient if eta,
    ``train.entropy_coefficient``, is not 0. Corrections do not apply to KL and entropy, which do not depend on the
    sampling policy. ``mask_T`` bool, ``sequence_T`` int64: the token's sequence in the micro-batch. ``length``: the
    divisor of the aggregation ``constant``. ``selected_T`` bool: the tokens that the objective selects. ``d``: the
    reverse KL to a teacher over k ids; ``top_Tk``: the current policy's and the teacher's log-probs of them; delta is
    ``train.distill.coefficient``. The last sum is the cross entropy of the O tokens ``observed_T`` (bool; ECHO, arXiv
    2605.24517), whatever their advantage; lambda is ``train.echo.coefficient``. ``shift_T``: the logs of the
    router-shift ratios, which multiply ``rho`` (RSPO, arXiv 2510.23027).
    Values at tokens that were not sampled have no effect, even infinity and NaN.
    """

    def sampled(values_T: Tensor) -> Tensor:
        return torch.where(mask_T, values_T, torch.zeros_like(values_T))

    observation = torch.zeros((), dtype=logprobs_T.dtype, device=logprobs_T.device)
    if observed_T is not None:
        observation = -torch.where(observed_T, logprobs_T, torch.zeros_like(logprobs_T)).sum()
    # Before any computation: 0 times an infinite value, or its gradient, is NaN.
    logprobs_T, old_logprobs_T, factors_T = sampled(logprobs_T), sampled(old_logprobs_T), sampled(factors_T)
    advantages_T, entropy_T, weights_T = sampled(advantages_T), sampled(entropy_T), sampled(weights_T)
    near_T = within_policy(train.correction, logprobs_T, old_logprobs_T, advantages_T, mask_T, sequence_T)
    factors_T = factors_T * near_T
    shifted_T, router_shift = old_logprobs_T, torch.zeros_like(observation)
    if shift_T is not None:
        shift_T = floored_shift(train.correction, shift_T)
        shifted_T, router_shift = old_logprobs_T - sampled(shift_T), sampled(shift_T.exp()).sum()
    terms = objective_terms(
        train.objective, logprobs_T, shifted_T, advantages_T, mask_T, sequence_T, train.clip, selected_T
    )
    shares_T = aggregation_weights(
        train.loss_aggregation,
        mask_T,
        sequence_T,
        tokens=max(1, counts.tokens),
        sequences=max(1, counts.sequences),
        length=length,
        weight=counts.weight or 1.0,
        dtype=logprobs_T.dtype,
    )
    penalty_T = torch.zeros_like(logprobs_T)
    if train.kl.coefficient and reference_T is not None:
        ratio_T = (logprobs_T - old_logprobs_T).clamp(-LOG_LIMIT, LOG_LIMIT).exp() if train.kl.unbiased else None
        penalty_T = kl_penalty(train.kl, logprobs_T, sampled(reference_T), ratio_T)
    clipped_T, dropped_T = terms.clipped_T & mask_T, (factors_T == 0) & mask_T
    terms_T = _terms(terms.loss_T, factors_T, penalty_T, entropy_T, train)
    distill_T = torch.zeros_like(logprobs_T)
    if top_Tk is not None and train.distill is not None:
        distill_T = top_k_divergence(*(torch.where(mask_T[:, None], each, -LOG_LIMIT) for each in top_Tk))
        terms_T = terms_T + train.distill.coefficient * distill_T
    return PolicyLoss(
        loss=(terms_T * weights_T * shares_T).sum() + _echo(observation, train, counts),
        clipped=clipped_T.sum().to(logprobs_T.dtype),
        entropy=entropy_T.detach().sum(),
        approx_kl=kl_estimate("k3", old_logprobs_T, logprobs_T.detach()).sum(),
        correction=factors_T.sum(),
        dropped=dropped_T.sum().to(logprobs_T.dtype),
        kl_reference=penalty_T.detach().sum(),
        distill=distill_T.detach().sum(),
        observation=observation.detach(),
        router_shift=router_shift,
        clipped_T=clipped_T,
        dropped_T=dropped_T,
    )


def _echo(observation: Tensor, train: TrainConfig, counts: LossCounts) -> Tensor:
    return observation * (0.0 if train.echo is None else train.echo.coefficient / max(1, counts.observed))


def _terms(loss_T: Tensor, factors_T: Tensor, penalty_T: Tensor, entropy_T: Tensor, train: TrainConfig) -> Tensor:
    """``c l + beta k - eta H``, ``[T]``; 0 instead of ``c l`` for a dropped token, whatever its ``l``."""
    terms_T = torch.where(factors_T == 0, torch.zeros_like(factors_T), loss_T * factors_T)
    if train.kl.coefficient and train.kl.apply_to == "loss":
        terms_T = terms_T + train.kl.coefficient * penalty_T
    if train.entropy_coefficient:
        terms_T = terms_T - train.entropy_coefficient * entropy_T
    return terms_T


def weighted_cross_entropy(logprobs_T: Tensor, weights_T: Tensor, *, batch_weight: float) -> Tensor:
    """Supervised loss ``-1 / W * sum_t w_t * logprob_t`` with W the global batch's sum of weights. A scalar."""
    return -(logprobs_T * weights_T.to(logprobs_T.dtype)).sum() / batch_weight
