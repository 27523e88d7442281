"""Corrections for what trainer and engine see differently: weights and masks of tokens, from detached log-ratios.

The rollout sampled with the engine's probabilities q, the update is taken around the trainer's old ones p. With
``log_ratio_T = log p - log q`` of the sampled tokens and r its exponential:

============== ================================================== ====================================================
correction     weight of token t of sequence i                    source
============== ================================================== ====================================================
tis            min(r_t, high)                                     truncated importance sampling, Yao et al. 2025
icepop         r_t where low <= r_t <= high, else 0               IcePop, Ring-1T report 2025
sequence_tis   min(prod r, high), the same for all of i           Liu et al. 2025, "When Speed Kills Stability"
sequence_mask  1 where low <= prod r <= high, else 0              the same, masked importance sampling
geometric_mask 1 where low <= (prod r)^(1 / |i|) <= high, else 0  the same, its geometric form
============== ================================================== ====================================================

Weights and masks ask two questions, which have one answer only where the old log-probs are the trainer's own. A mask
asks whether trainer and engine agree about a token: always p over q. A weight turns the update around the old policy
into one around the sampling policy: it is the old probability over q, whatever the old log-probs are taken from, so
that rho times the weight is the whole importance ratio, once. (With the rollout's own as the old ones it is 1.)

``veto`` joins any of them: a sequence that has a token of r_t < veto is left out whole. What is left out stays in the
loss' denominator: its weight is 0, as if its advantage were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from agent_rl.config import Correction, CorrectionConfig
from agent_rl.train.loss.objectives import sequence_mean

_LOG_LIMIT = 20.0
"""Log-ratios of whole sequences are cut here before exp, as a product over thousands of tokens would overflow."""


def correction_weights(
    correction: CorrectionConfig,
    log_ratio_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    *,
    log_weight_T: Tensor | None = None,
) -> Tensor:
    """``[T]`` factors of the tokens' terms, without a gradient; 1 everywhere for no kind of correction and no veto.

    ``log_ratio_T``: the trainer's log-prob before the update minus the rollout's; ``log_weight_T``: the old log-prob
    minus the rollout's, None where the old ones are the trainer's; ``mask_T`` bool; ``sequence_T`` int64.
    """
    log_T = torch.where(mask_T, log_ratio_T.detach(), torch.zeros_like(log_ratio_T))
    old_T = log_T if log_weight_T is None else torch.where(mask_T, log_weight_T.detach(), torch.zeros_like(log_T))
    weights_T = torch.ones_like(log_T)
    if correction.kind is not None:
        weights_T = CORRECTIONS[correction.kind](Ratios(log_T, old_T, mask_T, sequence_T), correction)
    if correction.veto is None or not len(log_T):
        return weights_T
    low_n = torch.full((int(sequence_T.max()) + 1,), torch.inf, dtype=log_T.dtype, device=log_T.device)
    low_n = low_n.scatter_reduce(0, sequence_T, torch.where(mask_T, log_T, torch.inf), "amin")
    vetoed_n = low_n < torch.log(torch.tensor(correction.veto, dtype=log_T.dtype))
    return torch.where(vetoed_n[sequence_T], 0.0, weights_T)


@dataclass(frozen=True, slots=True)
class Ratios:
    """What a correction is given, ``[T]`` each: ``log_T`` and ``old_T``, the logarithms of the trainer's and of the old
    probability over the rollout's, 0 where nothing was sampled; ``mask_T`` bool; ``sequence_T`` int64."""

    log_T: Tensor
    old_T: Tensor
    mask_T: Tensor
    sequence_T: Tensor


def _tis(ratios: Ratios, bounds: CorrectionConfig) -> Tensor:
    return ratios.old_T.exp().clamp(max=bounds.high)


def _icepop(ratios: Ratios, bounds: CorrectionConfig) -> Tensor:
    return _inside(ratios.log_T.exp(), bounds, value=ratios.old_T.exp())


def _sequence_tis(ratios: Ratios, bounds: CorrectionConfig) -> Tensor:
    return _whole(ratios.old_T, ratios.sequence_T).clamp(max=bounds.high)


def _sequence_mask(ratios: Ratios, bounds: CorrectionConfig) -> Tensor:
    return _inside(_whole(ratios.log_T, ratios.sequence_T), bounds)


def _geometric_mask(ratios: Ratios, bounds: CorrectionConfig) -> Tensor:
    mean_T = sequence_mean(ratios.log_T, ratios.mask_T, ratios.sequence_T)[ratios.sequence_T]
    return _inside(mean_T.exp(), bounds)


CORRECTIONS: Mapping[Correction, Callable[[Ratios, CorrectionConfig], Tensor]] = {
    "tis": _tis,
    "icepop": _icepop,
    "sequence_tis": _sequence_tis,
    "sequence_mask": _sequence_mask,
    "geometric_mask": _geometric_mask,
}


def _inside(ratio_T: Tensor, bounds: CorrectionConfig, value: Tensor | None = None) -> Tensor:
    kept_T = (ratio_T >= bounds.low) & (ratio_T <= bounds.high)
    return torch.where(kept_T, torch.ones_like(ratio_T) if value is None else value, 0.0)


def _whole(log_T: Tensor, sequence_T: Tensor) -> Tensor:
    """``[T]``: the product of all ratios of the token's sequence."""
    return _sequence_sum(log_T, sequence_T).clamp(-_LOG_LIMIT, _LOG_LIMIT).exp()[sequence_T]


def _sequence_sum(log_T: Tensor, sequence_T: Tensor) -> Tensor:
    count = int(sequence_T.max()) + 1 if len(sequence_T) else 0
    return log_T.new_zeros(count).index_add(0, sequence_T, log_T)
