"""Generalized advantage estimation (arXiv 1506.02438) over sampled tokens or turns, and the value loss of PPO (arXiv
1707.06347). Pure functions of torch tensors.

Axes: ``T`` the tokens of one packed micro-batch, ``k`` its steps. A step is a sampled token, or a turn: a run of
sampled tokens between two observations. Observation tokens are no steps: the value after a step is that of the next
step of the same sequence, whatever lies between. A sequence's reward belongs to its last step::

    delta_k = r_k + gamma V_(k+1) - V_k        A_k = sum_j (gamma lambda)^j delta_(k+j)        R_k = V_k + A_k

The returns ``R``, which the values learn, may use another lambda (VC-PPO, arXiv 2503.01491; SAO, arXiv 2607.07508).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agent_rl.config.train import CriticConfig


@dataclass(frozen=True, slots=True, eq=False)
class Estimates:
    """``advantages_T`` of sampled tokens and ``returns_T`` of steps, float32, 0 elsewhere. ``steps_T`` bool: where a
    step begins."""

    advantages_T: Tensor
    returns_T: Tensor
    steps_T: Tensor


def generalized_advantages(
    values_T: Tensor, rewards_T: Tensor, mask_T: Tensor, sequence_T: Tensor, critic: CriticConfig
) -> Estimates:
    """GAE in float64. ``values_T``: of the state before a token. ``rewards_T``: the reward of the token's sequence.
    ``mask_T`` bool: sampled, never the first token of a sequence; ``sequence_T`` int64."""
    steps_T = mask_T.clone()
    if critic.step == "turn":
        steps_T[1:] &= ~mask_T[:-1]
    sequence_k, values_k = sequence_T[steps_T], values_T[steps_T].double()
    ends_k = torch.ones_like(sequence_k, dtype=torch.bool)
    ends_k[:-1] = sequence_k[1:] != sequence_k[:-1]
    following_k = torch.where(ends_k, 0.0, values_k.roll(-1))
    delta_k = torch.where(ends_k, rewards_T[steps_T].double(), 0.0) + critic.gamma * following_k - values_k
    advantages_k = _discounted_sums(delta_k, sequence_k, critic.gamma * critic.gae_lambda)
    returns_k = values_k + _discounted_sums(delta_k, sequence_k, critic.gamma * critic.value_lambda)
    step_T = steps_T.cumsum(0) - 1
    zeros_T = torch.zeros_like(values_T, dtype=torch.float32)
    return Estimates(
        zeros_T.masked_scatter(mask_T, advantages_k[step_T[mask_T]].float()),
        zeros_T.masked_scatter(steps_T, returns_k.float()),
        steps_T,
    )


def _discounted_sums(values_k: Tensor, sequence_k: Tensor, factor: float) -> Tensor:
    """``sum_j factor^j values_(k+j)`` within the sequence of each k, in log2(k) passes: each doubles the terms."""
    total_k, reach = values_k.clone(), 1
    while reach < len(total_k):
        same = sequence_k[reach:] == sequence_k[:-reach]
        # The right side is a new tensor, so all terms are those of the pass before.
        total_k[:-reach] += torch.where(same, total_k[reach:] * factor**reach, 0.0)
        reach *= 2
    return total_k


def value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, steps_T: Tensor, *, clip: float | None, count: int
) -> tuple[Tensor, Tensor]:
    """This micro-batch's share of ``1 / (2 count) sum_k max((V - R)^2, (clip(V) - R)^2)``, where ``clip(V)`` is within
    ``clip`` of the old value; and the number of steps whose loss is the clipped one. ``count``: steps of the global
    batch."""
    error_T, clipped_T = (values_T - returns_T) ** 2, torch.zeros_like(steps_T)
    if clip is not None:
        limited_T = (old_values_T + (values_T - old_values_T).clamp(-clip, clip) - returns_T) ** 2
        clipped_T = (limited_T > error_T) & steps_T
        error_T = torch.maximum(error_T, limited_T)
    loss = torch.where(steps_T, error_T, torch.zeros_like(error_T)).sum() / (2 * max(1, count))
    return loss, clipped_T.sum().to(values_T.dtype)
