"""Policy objectives, per token. Pure functions of torch tensors.

Axes: ``T`` the tokens of one packed micro-batch, ``n`` its sequences; ``sequence_T``: the sequence of each token. A
token that was not sampled has ``mask_T`` 0 and no effect. Each objective returns per-token terms whose weighted sum is
the loss. :func:`aggregation_weights` returns the weights, so that the sum over all micro-batches and data-parallel
ranks is the loss of the global batch.

========== =================================================== =======================================================
objective  term of token t of sequence i                       source
========== =================================================== =======================================================
grpo       -min(r A, clip(r, 1 - low, 1 + high) A)             arXiv 2402.03300; clip-higher: DAPO, arXiv 2503.14476
gspo       the same with r = s_i, the geometric mean of the    GSPO-token, arXiv 2507.18071, section 4.3
           sequence's ratios
cispo      -sg[clip(r, 1 - low, 1 + high)] A log pi            MiniMax-M1, arXiv 2506.13585, eq. 4
reinforce  -r A, unclipped                                     Williams 1992
sapo       -f(r) A, f(r) = 4 / tau sigmoid(tau (r - 1)), tau   SAPO, arXiv 2511.20347, section 3
           by the sign of A
gmpo       -s_i A, s_i the geometric mean of the sequence's    GMPO, arXiv 2507.20673, section 3
           ratios, each clipped within e^-low and e^high
dppo_tv    -r A while the token's probability has moved less   DPPO, arXiv 2602.04879, eq. 13
           than high along A or low against it
dppo_kl    the same with the binary KL of the probabilities    the same, eq. 14
clip_cov   grpo, without the selected tokens                   arXiv 2505.22617, section 4
kl_cov     -r A, plus kl |log r| for the selected tokens       the same
========== =================================================== =======================================================

Dr.GRPO (arXiv 2503.20783) is grpo with the aggregation ``constant`` and advantages that are not divided by their std.
REINFORCE++ (arXiv 2501.03262) is grpo with advantages normalized over the batch. docs/reference/objectives.md has the
config of each.

clip_cov and kl_cov select tokens by the covariance of their advantage and log-prob (:func:`selection_scores`). verl and
SkyRL choose within a micro-batch. Here the tokens of the whole step are compared, with the log-probs before the update,
so that the choice depends neither on the split into micro-batches nor on the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from agent_rl.config import Clip, KlConfig, KlEstimator
from agent_rl.config.objectives import OBJECTIVES, Aggregation, objective_spec

LOG_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp. Larger ones soon overflow float32, and the gradient of a clipped term,
0 * inf, would be NaN. A ratio of e^20 is outside of every clip."""
SEQUENCE_LOG_LIMIT = 10.0
"""Upper limit of a sequence's mean log-ratio in gspo, as in verl and SkyRL."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The inputs of a formula, ``[T]`` each: ``log_ratio_T`` log pi - log pi_old, within +-LOG_LIMIT, 0 where not
    sampled; ``logprobs_T`` log pi; ``advantages_T``; ``mask_T`` bool; ``sequence_T`` int64; ``selected_T`` bool: the
    tokens of the objective's selection."""

    log_ratio_T: Tensor
    logprobs_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor
    sequence_T: Tensor
    selected_T: Tensor


@dataclass(frozen=True, slots=True)
class Terms:
    """``loss_T`` with a gradient. ``clipped_T`` bool: the clip removed the token's gradient (for cispo: changed its
    weight). ``ratio_T`` detached: the ratio before the clip."""

    loss_T: Tensor
    clipped_T: Tensor
    ratio_T: Tensor


Formula = Callable[[Tokens, Clip], Terms]


def objective_terms(
    objective: str, logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor,
    sequence_T: Tensor, clip: Clip, selected_T: Tensor | None = None,
) -> Terms:  # fmt: skip
    """The terms of the objective registered as ``objective`` (:mod:`agent_rl.config.objectives`); see the table above.
    ``mask_T`` bool, ``sequence_T`` int64, the others floats."""
    # Old log-probs are undefined where the mask is 0; an infinite ratio there would give 0 * inf = NaN.
    log_ratio_T = torch.where(mask_T, logprobs_T - old_logprobs_T, torch.zeros_like(logprobs_T))
    log_ratio_T = log_ratio_T.clamp(-LOG_LIMIT, LOG_LIMIT)
    selected_T = torch.zeros_like(mask_T) if selected_T is None else selected_T & mask_T
    tokens = Tokens(log_ratio_T, logprobs_T, advantages_T, mask_T, sequence_T, selected_T)
    return _formula(objective)(tokens, clip)


@cache
def _formula(objective: str) -> Formula:
    formula: Formula = OBJECTIVES.load(objective_spec(objective).formula)
    return formula


def grpo(tokens: Tokens, clip: Clip) -> Terms:
    """The clipped ratio of each token."""
    return _clipped(tokens.log_ratio_T, tokens.advantages_T, clip)


def gspo(tokens: Tokens, clip: Clip) -> Terms:
    """The clipped mean ratio of the token's sequence."""
    log_ratio_T = _sequence_log_ratio(tokens.log_ratio_T, tokens.mask_T, tokens.sequence_T)
    return _clipped(log_ratio_T.clamp(max=SEQUENCE_LOG_LIMIT), tokens.advantages_T, clip)


def cispo(tokens: Tokens, clip: Clip) -> Terms:
    """Every token keeps its gradient; the clip limits only its weight."""
    ratio_T = tokens.log_ratio_T.detach().exp()
    weight_T = ratio_T.clamp(1.0 - clip.low, 1.0 + clip.high)
    return Terms(-weight_T * tokens.advantages_T * tokens.logprobs_T, weight_T != ratio_T, ratio_T)


def reinforce(tokens: Tokens, clip: Clip) -> Terms:
    """The ratio of each token, not clipped."""
    ratio_T = tokens.log_ratio_T.exp()
    return Terms(-ratio_T * tokens.advantages_T, torch.zeros_like(tokens.mask_T), ratio_T.detach())


def sapo(tokens: Tokens, clip: Clip) -> Terms:
    """The ratio of each token through a soft gate with slope 1 at the old policy."""
    if clip.tau is None:
        raise ValueError("sapo needs the temperatures of its gate: clip.tau")
    ratio_T = tokens.log_ratio_T.exp()
    positive, other = ratio_T.new_tensor(clip.tau)
    tau_T = torch.where(tokens.advantages_T > 0, positive, other)
    gate_T = (tau_T * (ratio_T - 1.0)).sigmoid() * (4.0 / tau_T)
    return Terms(-gate_T * tokens.advantages_T, torch.zeros_like(tokens.mask_T), ratio_T.detach())


def gmpo(tokens: Tokens, clip: Clip) -> Terms:
    """The geometric mean of the sequence's ratios. Each is clipped first, only where it rises with the advantage."""
    sign_T = tokens.advantages_T.sign()
    signed_T = sign_T * tokens.log_ratio_T
    bounded_T = sign_T * tokens.log_ratio_T.clamp(-clip.low, clip.high)
    mean_n = sequence_mean(sign_T * torch.minimum(signed_T, bounded_T), tokens.mask_T, tokens.sequence_T)
    ratio_T = mean_n.exp()[tokens.sequence_T]
    return Terms(-ratio_T * tokens.advantages_T, (signed_T > bounded_T).detach(), ratio_T.detach())


def clip_cov(tokens: Tokens, clip: Clip) -> Terms:
    """The clipped ratio; the selected tokens have no gradient."""
    terms = _clipped(tokens.log_ratio_T, tokens.advantages_T, clip)
    removed_T = tokens.selected_T & ~terms.clipped_T
    loss_T = torch.where(removed_T, torch.zeros_like(terms.loss_T), terms.loss_T)
    return Terms(loss_T, terms.clipped_T | removed_T, terms.ratio_T)


def kl_cov(tokens: Tokens, clip: Clip) -> Terms:
    """The ratio of each token, not clipped; the selected ones have a penalty on their distance from the old policy."""
    ratio_T = tokens.log_ratio_T.exp()
    penalty_T = clip.options["kl"] * tokens.log_ratio_T.abs() * tokens.selected_T
    return Terms(penalty_T - ratio_T * tokens.advantages_T, torch.zeros_like(tokens.mask_T), ratio_T.detach())


def dppo_tv(tokens: Tokens, clip: Clip) -> Terms:
    """Masked where the probability of the token itself has moved too far: the binary total variation."""
    new_T, old_T = _probabilities(tokens)
    return _within_divergence(tokens, clip, new_T - old_T, (new_T - old_T).abs())


def dppo_kl(tokens: Tokens, clip: Clip) -> Terms:
    """Masked by KL(old || new) of the token against all others together."""
    new_T, old_T = _probabilities(tokens)
    others_T = ((1.0 - old_T + DPPO_EPS) / (1.0 - new_T + DPPO_EPS)).log()
    kl_T = (1.0 - old_T) * others_T - old_T * tokens.log_ratio_T.detach()
    return _within_divergence(tokens, clip, new_T - old_T, kl_T)


DPPO_EPS = 1e-8
"""Keeps the KL of a token with probability 1 finite, as in SkyRL and verl."""


def _probabilities(tokens: Tokens) -> tuple[Tensor, Tensor]:
    logprobs_T = tokens.logprobs_T.detach()
    return logprobs_T.exp(), (logprobs_T - tokens.log_ratio_T.detach()).exp()


def _within_divergence(tokens: Tokens, clip: Clip, change_T: Tensor, divergence_T: Tensor) -> Terms:
    """``-r A`` without the tokens whose probability changed with A and diverged more than the clip; plus the option
    ``log_ratio_penalty`` times the squared log-ratio of every token (Kimi-K2.5, arXiv 2602.02276)."""
    ratio_T, advantages_T = tokens.log_ratio_T.exp(), tokens.advantages_T
    limit_T = torch.where(advantages_T > 0, clip.high, clip.low)
    masked_T = (change_T * advantages_T > 0) & (divergence_T > limit_T)
    loss_T = torch.where(masked_T, torch.zeros_like(ratio_T), -ratio_T * advantages_T)
    pull_T = clip.options["log_ratio_penalty"] * tokens.log_ratio_T.square()
    return Terms(loss_T + pull_T, masked_T, ratio_T.detach())


def _clipped(log_ratio_T: Tensor, advantages_T: Tensor, clip: Clip) -> Terms:
    """The clipped surrogate of PPO (arXiv 1707.06347, eq. 7), with both of the clip's extensions."""
    ratio_T = log_ratio_T.exp()
    bounded_T = ratio_T.clamp(1.0 - clip.low, 1.0 + clip.high)
    loss_T = -torch.minimum(ratio_T * advantages_T, bounded_T * advantages_T)
    cut_T = ((ratio_T > 1.0 + clip.high) & (advantages_T > 0)) | ((ratio_T < 1.0 - clip.low) & (advantages_T < 0))
    if clip.dual is not None:
        ceiling_T = -clip.dual * advantages_T
        over_T = (advantages_T < 0) & (loss_T > ceiling_T)
        loss_T = torch.where(over_T, ceiling_T, loss_T)
        cut_T = cut_T | over_T
    return Terms(loss_T, cut_T.detach(), ratio_T.detach())


def _sequence_log_ratio(log_ratio_T: Tensor, mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    """GSPO-token: the value is the sequence's mean log-ratio, the gradient that of the token.

    ``s_it = sg[s_i] * pi_t / sg[pi_t]``: with one advantage per sequence the sum over its tokens has GSPO's gradient.
    """
    mean_T = sequence_mean(log_ratio_T.detach(), mask_T, sequence_T)[sequence_T]
    return torch.where(mask_T, mean_T + log_ratio_T - log_ratio_T.detach(), torch.zeros_like(log_ratio_T))


def sequence_mean(values_T: Tensor, mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    """The mean over each sequence's sampled tokens, ``[n]``; 0 for a sequence without one."""
    count = int(sequence_T.max()) + 1 if len(sequence_T) else 0
    zeros_n = values_T.new_zeros(count)
    sums_n = zeros_n.index_add(0, sequence_T, torch.where(mask_T, values_T, torch.zeros_like(values_T)))
    return sums_n / zeros_n.index_add(0, sequence_T, mask_T.to(values_T.dtype)).clamp(min=1.0)


def aggregation_weights(
    aggregation: Aggregation,
    mask_T: Tensor,
    sequence_T: Tensor,
    *,
    tokens: float,
    sequences: float,
    length: float,
    weight: float,
    dtype: torch.dtype,
) -> Tensor:
    """``[T]`` weights of per-token terms, for sums over the global batch.

    ``tokens`` and ``sequences``: sampled tokens, and sequences with a sampled token, of the *global* batch (all
    micro-batches and ranks). ``token``: the mean over all tokens (DAPO, arXiv 2503.14476, eq. 8). ``sequence``: the
    mean over sequences of each one's mean (GRPO, arXiv 2402.03300, eq. 3). ``constant``: the sum of a sequence divided
    by ``length``, averaged over sequences (Dr.GRPO, arXiv 2503.20783: no length bias). ``prompt``: the mean over
    tasks of the mean over each one's tokens, whose samples weigh 1 / tokens of the task; ``weight`` is the sum of these
    weights over the sampled tokens.
    """
    weight_T = mask_T.to(dtype)
    return weight_T / AGGREGATIONS[aggregation](weight_T, sequence_T, Totals(tokens, sequences, length, weight))


@dataclass(frozen=True, slots=True)
class Totals:
    """The sampled tokens and sequences of the global batch, the constant length, and the tokens' sum of weights."""

    tokens: float
    sequences: float
    length: float
    weight: float


def _by_sequence(weight_T: Tensor, sequence_T: Tensor, totals: Totals) -> Tensor:
    count = int(sequence_T.max()) + 1 if len(sequence_T) else 0
    lengths_n = weight_T.new_zeros(count).index_add(0, sequence_T, weight_T)
    return totals.sequences * lengths_n.clamp(min=1.0)[sequence_T]


AGGREGATIONS: Mapping[Aggregation, Callable[[Tensor, Tensor, Totals], Tensor | float]] = {
    "token": lambda weight_T, sequence_T, totals: totals.tokens,
    "sequence": _by_sequence,
    "constant": lambda weight_T, sequence_T, totals: totals.sequences * totals.length,
    "prompt": lambda weight_T, sequence_T, totals: totals.weight,
}
"""The divisor of a token's weight, by aggregation."""


def kl_estimate(estimator: KlEstimator, logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """Estimates of KL(pi || reference) per token, ``[T]``, from tokens of pi (Schulman, "Approximating KL Divergence").

    With d = log pi - log reference: ``k1`` d (unbiased), ``k2`` d^2 / 2 (small bias), ``k3`` exp(-d) - 1 + d (unbiased,
    never negative; GRPO's, arXiv 2402.03300, eq. 4).

    A good estimate of the value may have another gradient than the KL (arXiv 2510.01555). In the loss, averaged over
    tokens of pi, k1's gradient is E[grad log pi] = 0, k2's is E[d grad log pi], that of KL(pi || reference), and k3's
    is that of KL(reference || pi). In the reward the gradient is E[k grad log pi], so k1 is right there. In k3 d is at
    least -LOG_LIMIT to avoid overflow.
    """
    return KL_ESTIMATORS[estimator](logprobs_T - reference_T)


def kl_penalty(kl: KlConfig, logprobs_T: Tensor, reference_T: Tensor, ratio_T: Tensor | None = None) -> Tensor:
    """The estimate of ``kl.estimator``, ``[T]``, before its coefficient, times the ratio to the old policy, where given
    (unbiased: DeepSeek-V3.2, arXiv 2512.02556, section 3.1). ``kl.k3_limit`` limits a token's k3, which grows with
    exp(-d) and would let one token outweigh a batch; a limited token has no gradient."""
    estimate_T = kl_estimate(kl.estimator, logprobs_T, reference_T)
    estimate_T = estimate_T if ratio_T is None else ratio_T * estimate_T
    return estimate_T if kl.estimator != "k3" or kl.k3_limit is None else estimate_T.clamp(max=kl.k3_limit)


def _k3(difference_T: Tensor) -> Tensor:
    return torch.expm1(-difference_T) + difference_T


KL_ESTIMATORS: Mapping[KlEstimator, Callable[[Tensor], Tensor]] = {
    "k1": lambda difference_T: difference_T,
    "k2": lambda difference_T: difference_T.square() / 2,
    "k3": lambda difference_T: _k3(difference_T.clamp(min=-LOG_LIMIT)),
}
"""Estimators as functions of log pi - log reference."""


def penalized_advantages(
    advantages_T: Tensor, kl_T: Tensor, mask_T: Tensor, sequence_T: Tensor, coefficient: float
) -> Tensor:
    """Advantages minus the KL of the tokens from each one on, ``[T]`` (REINFORCE++, arXiv 2501.03262, eq. 8)::

        A_t - coefficient * sum of KL_i over the sampled tokens i >= t of t's sequence

    Detached. ``sequence_T`` must be sorted, as in a packed micro-batch. Sums run per sequence, because a sum over the
    micro-batch would round one sequence's by the size of another's.
    """
    kl_T = torch.where(mask_T, kl_T.detach(), torch.zeros_like(kl_T)).double()
    sequences = kl_T.split(torch.bincount(sequence_T).tolist())
    to_come_T = torch.cat([part.flip(0).cumsum(0).flip(0) for part in sequences])
    return (advantages_T.detach().double() - coefficient * to_come_T).to(advantages_T.dtype)


def distilled_advantages(
    advantages_T: Tensor, logprobs_T: Tensor, teacher_T: Tensor, reward: float, coefficient: float
) -> Tensor:
    """``reward * A_t - coefficient * (log pi_old - log teacher)_t``, ``[T]``, detached: each token's reverse KL to the
    teacher in its own advantage, without discounting (Thinking Machines, "On-Policy Distillation", 2025)."""
    return reward * advantages_T.detach() - coefficient * (logprobs_T - teacher_T).detach()


def top_k_divergence(logprobs_Tk: Tensor, teacher_Tk: Tensor) -> Tensor:
    """KL(pi || teacher) ``[T]`` over k + 1 outcomes: k ids, and the rest of the vocabulary as one. From below it bounds
    the KL over the whole vocabulary, which it equals where both distributions have the same shape in the rest.

    ``logprobs_Tk``, ``teacher_Tk``: log-probs of the same ids. With its own gradient, as in GKD (arXiv 2306.13649, eq.
    4, on-policy with the reverse KL; NeMo RL's distillation sums the same k terms). Exactly 0 for equal log-probs. An
    id that the policy could not draw (-inf: a grammar excludes it) adds 0.
    """
    logprobs_Tk = logprobs_Tk.clamp(min=-1e3)  # exp(-1e3) is 0
    rest_T, teacher_rest_T = _log_rest(logprobs_Tk), _log_rest(teacher_Tk)
    inside_T = (logprobs_Tk.exp() * (logprobs_Tk - teacher_Tk)).sum(-1)
    return inside_T + rest_T.exp() * (rest_T - teacher_rest_T)


def _log_rest(logprobs_Tk: Tensor) -> Tensor:
    """``log(1 - sum exp)``, at least log 1e-6, where float32 ends."""
    return torch.log(-torch.expm1(logprobs_Tk.logsumexp(-1).clamp(max=-1e-6)))


def advantage_moments(advantages_T: Tensor, mask_T: Tensor) -> Tensor:
    """``[3]`` float64: number, sum and sum of squares of the sampled tokens' advantages. Results of micro-batches and
    ranks add up."""
    values = advantages_T[mask_T].double()
    return torch.stack((torch.ones_like(values).sum(), values.sum(), values.square().sum()))


def normalized_advantages(advantages_T: Tensor, moments_3: Tensor, *, eps: float = 1e-6) -> Tensor:
    """``(A - mean) / (std + eps)``, ``[T]``, with the moments over the step's sampled tokens (REINFORCE++, eq. 10)."""
    count, total, squares = moments_3.unbind()
    mean = total / count.clamp(min=1.0)
    std = (squares / count.clamp(min=1.0) - mean.square()).clamp(min=0.0).sqrt()
    return ((advantages_T.double() - mean) / (std + eps)).to(advantages_T.dtype)


def covariance_moments(advantages_T: Tensor, logprobs_T: Tensor, mask_T: Tensor) -> Tensor:
    """``[3]`` float64: number of sampled tokens, sum of their advantages and of their log-probs. Results of
    micro-batches and ranks add up."""
    advantages, logprobs = advantages_T[mask_T].double(), logprobs_T[mask_T].double()
    return torch.stack((torch.ones_like(logprobs).sum(), advantages.sum(), logprobs.sum()))


def selection_scores(
    objective: str, options: Mapping[str, float], advantages_T: Tensor, logprobs_T: Tensor, moments_3: Tensor
) -> Tensor:
    """``[T]`` float64: the tokens with the highest scores are selected, never one with -inf."""
    _, mean_advantage, mean_logprob = moments_3 / moments_3[0].clamp(min=1.0)
    covariance_T = (advantages_T.double() - mean_advantage) * (logprobs_T.double() - mean_logprob)
    scores: Tensor = OBJECTIVES.load(objective_spec(objective).selection or "")(covariance_T, options)
    return scores


def highest(scores_T: Tensor, all_scores_N: Tensor, fraction: float) -> Tensor:
    """Bool ``[T]``: the tokens among the ``fraction`` (at least one) of all scores that are highest."""
    if not len(all_scores_N):
        return torch.zeros_like(scores_T, dtype=torch.bool)
    limit = all_scores_N.topk(max(1, int(fraction * len(all_scores_N)))).values[-1]
    return (scores_T >= limit) & (scores_T > -torch.inf)


def by_covariance(covariance_T: Tensor, options: Mapping[str, float]) -> Tensor:
    """KL-cov: the highest covariances."""
    return covariance_T


def within_bounds(covariance_T: Tensor, options: Mapping[str, float]) -> Tensor:
    """clip-cov: any of those with a covariance within the bounds, chosen by its low bits."""
    inside_T = (covariance_T > options["cov_low"]) & (covariance_T < options["cov_high"])
    return torch.where(inside_T, (covariance_T * 2**10).frac(), -torch.inf)
