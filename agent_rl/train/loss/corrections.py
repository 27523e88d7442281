"""Corrections for the mismatch of trainer and engine: a weight and a mask per token, from detached log-ratios.

The rollout sampled with the engine's probabilities q; p are the trainer's old probabilities. With r = p / q of the
sampled tokens, and prod r the product over the tokens of a sequence i:

============== ====================================== ================================================================
weight         of token t of sequence i               source
============== ====================================== ================================================================
token          r_t, clamped to the weight limits      TIS: truncated importance sampling, Yao et al. 2025
sequence       prod r, clamped likewise               Seq-TIS: Liu et al. 2025, "When Speed Kills Stability"
icepop         r_t, 0 beyond the weight limits        IcePop, Ring-1T report, arXiv 2510.18855
============== ====================================== ================================================================

============== ====================================== ================================================================
mask           keeps token t of sequence i if this    source
               is within mask_low and mask_high
============== ====================================== ================================================================
token          r_t                                    as IcePop, with other limits than those of the weights
sequence       prod r                                 Seq-MIS: Liu et al. 2025, together with the weight sequence
geometric      (prod r)^(1 / |i|)                     Geo-RS: the same, alone or with the weight token
============== ====================================== ================================================================

Weights and masks use the same ratio only where the old log-probs are the trainer's. A mask compares trainer and engine:
always p over q. A weight changes the update around the old policy into one around the sampling policy: the old
probability over q, whatever the source of the old log-probs, so that rho times the weight is the importance ratio.
(With the rollout's log-probs as old ones it is 1.)

``veto`` works with each of them: it drops a whole sequence with a token of r_t < veto. Dropped tokens stay in the loss'
denominator; their factor is 0, as with an advantage of 0. ``normalize`` divides weights by their mean over the step,
before anything is dropped, so that a correction does not change the size of the update. ``opsm`` and ``router_shift``
depend on the current policy, so :func:`within_policy` and :func:`floored_shift` are computed in each update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from agent_rl.config import CorrectionConfig, CorrectionMask, CorrectionWeight
from agent_rl.train.loss.objectives import LOG_LIMIT, sequence_mean


def correction_factors(
    correction: CorrectionConfig,
    log_ratio_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    *,
    log_weight_T: Tensor | None = None,
    mean: float = 1.0,
) -> Tensor:
    """``[T]`` factors of the tokens' terms, without a gradient: the weight of a kept token, 0 for a dropped one; 1
    without weight, mask and veto.

    ``log_ratio_T``: the trainer's log-prob before the update minus the rollout's. ``log_weight_T``: the old log-prob
    minus the rollout's; None where the old ones are the trainer's. ``mask_T`` bool, ``sequence_T`` int64. ``mean``: the
    divisor of the weights, their mean over the step with ``normalize``.
    """
    log_T = _zero_unsampled(log_ratio_T, mask_T)
    old_T = log_T if log_weight_T is None else _zero_unsampled(log_weight_T, mask_T)
    weights_T = torch.ones_like(log_T)
    if correction.weight is not None:
        weights_T = _weights(correction, old_T, mask_T, sequence_T) / mean
    return torch.where(_kept(correction, log_T, mask_T, sequence_T), weights_T, 0.0)


def weight_moments(
    correction: CorrectionConfig, log_weight_T: Tensor, mask_T: Tensor, sequence_T: Tensor
) -> Tensor:  # fmt: skip
    """``[2]`` float64: number and sum of the sampled tokens' weights. Results of micro-batches and ranks add up."""
    weights_T = _weights(correction, _zero_unsampled(log_weight_T, mask_T), mask_T, sequence_T)[mask_T].double()
    return torch.stack((torch.ones_like(weights_T).sum(), weights_T.sum()))


def within_policy(
    correction: CorrectionConfig,
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
) -> Tensor:
    """``[T]`` factors of off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, section 3.1), without a
    gradient: 0 for a negative advantage in a sequence with a mean of log old - log current above ``correction.opsm``,
    else 1."""
    if correction.opsm is None:
        return torch.ones_like(logprobs_T)
    distance_T = _zero_unsampled(old_logprobs_T - logprobs_T, mask_T)
    far_T = RATIOS["geometric"](distance_T, mask_T, sequence_T) > correction.opsm
    return 1.0 - (far_T & (advantages_T < 0)).to(logprobs_T.dtype)


def floored_shift(correction: CorrectionConfig, shift_T: Tensor) -> Tensor:
    """``[T]`` logs of the router-shift ratios (:mod:`agent_rl.train.megatron.gate`), without a gradient, at
    least the log of ``correction.router_shift``."""
    if correction.router_shift is None:
        return torch.zeros_like(shift_T)
    return shift_T.detach().clamp(min=math.log(correction.router_shift))


def _zero_unsampled(values_T: Tensor, mask_T: Tensor) -> Tensor:
    return torch.where(mask_T, values_T.detach(), torch.zeros_like(values_T))


def _weights(correction: CorrectionConfig, log_T: Tensor, mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    assert correction.weight is not None
    ratio_T = _exp(RATIOS[correction.weight](log_T, mask_T, sequence_T))
    if correction.weight == "icepop":
        high = torch.inf if correction.weight_high is None else correction.weight_high
        return torch.where((ratio_T >= correction.weight_low) & (ratio_T <= high), ratio_T, 0.0)
    return ratio_T.clamp(min=correction.weight_low, max=correction.weight_high)


def _kept(correction: CorrectionConfig, log_T: Tensor, mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    kept_T = torch.ones_like(mask_T)
    if correction.mask is not None:
        ratio_T = _exp(RATIOS[correction.mask](log_T, mask_T, sequence_T))
        kept_T = (ratio_T >= correction.mask_low) & (ratio_T <= correction.mask_high)
    if correction.veto is None or not len(log_T):
        return kept_T
    low_n = torch.full((int(sequence_T.max()) + 1,), torch.inf, dtype=log_T.dtype, device=log_T.device)
    low_n = low_n.scatter_reduce(0, sequence_T, torch.where(mask_T, log_T, torch.inf), "amin")
    vetoed_n = low_n < torch.log(torch.tensor(correction.veto, dtype=log_T.dtype))
    return kept_T & ~vetoed_n[sequence_T]


def _exp(log_T: Tensor) -> Tensor:
    return log_T.clamp(-LOG_LIMIT, LOG_LIMIT).exp()


def _sequence_sum(log_T: Tensor, mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    count = int(sequence_T.max()) + 1 if len(sequence_T) else 0
    return log_T.new_zeros(count).index_add(0, sequence_T, log_T)[sequence_T]


RATIOS: Mapping[CorrectionWeight | CorrectionMask, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token": lambda log_T, mask_T, sequence_T: log_T,
    "icepop": lambda log_T, mask_T, sequence_T: log_T,
    "sequence": _sequence_sum,
    "geometric": lambda log_T, mask_T, sequence_T: sequence_mean(log_T, mask_T, sequence_T)[sequence_T],
}
"""The log-ratio ``[T]`` that a weight or mask uses, from the log-ratios of the tokens (0 where not sampled), ``mask_T``
and ``sequence_T``."""
