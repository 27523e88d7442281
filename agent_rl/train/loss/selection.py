"""Tokens that an objective treats apart by the covariance of their advantage and log-prob: clip-cov and KL-cov.

"The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv 2505.22617, section 4. verl
and SkyRL choose within a micro-batch. Here the tokens of the whole step are compared, with the log-probs before the
update, so that the choice depends neither on the split into micro-batches nor on the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from agent_rl.config.objectives import OBJECTIVES, objective_spec


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
