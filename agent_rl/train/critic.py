"""The critic: a value head on the policy's last hidden states, with its own optimizer. Imports torch.

::

    old log-prob pass ─ hidden ─> log-probs
                            └──> values ─ GAE over the rewards ─> advantages, returns
    mini step         ─ hidden ─> log-probs ─ policy loss ─┐
                            └──> values ─── value loss ────┴─> backward: policy (its optimizer), head (its own)

Values come from the passes of the policy, so they replay the same routes. The head is tiny: every rank holds all of it
and its optimizer in float32, under every parallel layout. The last pipeline stage computes the values; the sum of its
gradient over all ranks is the only communication.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agent_rl.config import TrainConfig
from agent_rl.train.loss.gae import generalized_advantages, value_loss
from agent_rl.train.megatron.packed_batch import LossFn, PackedBatch
from agent_rl.train.reports import CriticReport, CriticUpdate

if TYPE_CHECKING:
    from agent_rl.train.megatron.model import PolicyModel
    from agent_rl.train.megatron.parallel import ParallelState

_BETAS = (0.5, 0.95)
"""Adam's, of the value head. It makes one update per step, so a momentum of ten updates would overshoot the returns."""
_ROWS = 4096
"""Tokens whose hidden states are converted to float32 at once."""


class ValueHead(torch.nn.Module):
    """``V = h w / H + b`` of hidden states ``h [T, H]``, float32; 0 at the start. Divided by H, so that an update of
    Adam changes a value by about the learning rate, whatever the width of the model. ``weight [H + 1]``: w and b."""

    def __init__(self, hidden: int, trunk_gradient: float, device: torch.device) -> None:
        """``trunk_gradient``: factor of the gradient that the hidden states receive."""
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden + 1, device=device))
        self._trunk_gradient = trunk_gradient

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """Values ``[T]``."""
        weight, bias = self.weight[:-1] / hidden_TH.shape[1], self.weight[-1]
        product: Tensor = _Product.apply(hidden_TH, weight, self._trunk_gradient)
        return product + bias


class _Product(torch.autograd.Function):
    """``hidden [T, H] @ weight [H]`` in float32, without a float32 copy of the hidden states."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, trunk_gradient: float) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.trunk_gradient = trunk_gradient
        return torch.cat([part.float() @ weight for part in hidden.split(_ROWS)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None]:
        (hidden, weight), slope = ctx.saved_tensors, gradients[0]
        of_weight = torch.zeros_like(weight)
        for part, of_part in zip(hidden.split(_ROWS), slope.split(_ROWS), strict=True):
            of_weight += of_part @ part.float()
        if not ctx.trunk_gradient:
            return None, of_weight, None
        return torch.outer(slope * ctx.trunk_gradient, weight).to(hidden.dtype), of_weight, None


class Critic:
    """The value head of ``model``, its optimizer and what it reports of a step."""

    def __init__(self, model: PolicyModel, train: TrainConfig) -> None:
        """Attach a new value head to ``model``."""
        self._config, self._model, ranks = train.critic, model, model.ranks
        # Every tensor rank computes the values of all tokens, and the backward pass sums their gradients.
        trunk_gradient = train.critic.coefficient / ranks.tensor_size
        model.value_head = self._head = ValueHead(model.model_spec.hidden, trunk_gradient, model.device)
        self._adam = torch.optim.Adam([self._head.weight], train.critic.lr, _BETAS, foreach=False)
        zeros = torch.zeros_like(self._head.weight)
        state = {"step": torch.tensor(0.0), "exp_avg": zeros.clone(), "exp_avg_sq": zeros.clone()}
        self._adam.state[self._head.weight] = state
        self._warmup = train.critic.warmup_steps * train.updates_per_step
        self._moments, self._updates = torch.zeros(6, dtype=torch.float64), list[CriticUpdate]()

    @property
    def updates(self) -> int:
        """Updates of the value head."""
        return int(self._adam.state[self._head.weight]["step"])

    @updates.setter
    def updates(self, count: int) -> None:
        self._adam.state[self._head.weight]["step"].fill_(count)

    @property
    def warming_up(self) -> bool:
        """Whether the policy waits for its critic."""
        return self.updates < self._warmup

    def slots(self) -> Mapping[str, Tensor]:
        """The state ``[H + 1]``, live: the weights ``master`` and Adam's moments."""
        moments = self._adam.state[self._head.weight]
        return {"master": self._head.weight.data, "exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"]}

    def estimate(self, inputs: Sequence[PackedBatch], values: Sequence[Tensor]) -> list[PackedBatch]:
        """The micro-batches of a step with GAE's ``advantages``, and ``returns``, ``steps`` and ``old_values``, among
        their extras ``[T]``. Their ``advantages`` are the rewards before. ``values [T]``: of the old log-prob pass."""
        self._moments, self._updates, estimated = torch.zeros_like(self._moments), [], list[PackedBatch]()
        for item, values_T in zip(inputs, values, strict=True):
            rewards_T, mask_T, sequence_T = (item.extras[name].cpu() for name in ("advantages", "sampled", "sequence"))
            old_T = values_T.float().cpu()
            found = generalized_advantages(old_T, rewards_T, mask_T, sequence_T, self._config)
            self._moments += _moments(old_T[found.steps_T], found.returns_T[found.steps_T])
            extras = {"advantages": found.advantages_T, "returns": found.returns_T, "steps": found.steps_T}
            estimated.append(replace(item, extras={**item.extras, **extras, "old_values": values_T.detach()}))
        return estimated

    def loss(self, policy_loss: LossFn, inputs: Sequence[PackedBatch]) -> LossFn:
        """``policy_loss`` plus the value loss of a mini step with these micro-batches. Collective."""
        count = torch.tensor(sum(int(item.extras["steps"].sum()) for item in inputs))
        steps, clip = int(self._model.sum_over_data(count)), self._config.clip
        self._updates.append(CriticUpdate(steps))

        def loss_fn(logprobs_T: Tensor, entropy_T: Tensor | None, batch: PackedBatch) -> tuple[Tensor, dict[str, Any]]:
            loss, reported = policy_loss(logprobs_T, entropy_T, batch)
            names = ("values", "old_values", "returns", "steps")
            own, clipped = value_loss(*(batch.extras[name] for name in names), clip=clip, count=steps)
            return loss + own, {**reported, "critic_loss": own.detach(), "critic_clipped": clipped}

        return loss_fn

    def step(self, reported: Sequence[Mapping[str, float | Tensor]]) -> None:
        """Update the head by the gradients of all ranks, unless they are not finite. ``reported``: what the loss
        function returned of each micro-batch. Collective."""
        weight = self._head.weight
        if weight.grad is None or not _computes_values(self._model.ranks):
            weight.grad = torch.zeros_like(weight)
        torch.distributed.all_reduce(weight.grad)
        norm = float(weight.grad.norm())
        if math.isfinite(norm):
            self._adam.step()
        weight.grad = None
        loss, clipped = (sum(float(item[name]) for item in reported) for name in ("critic_loss", "critic_clipped"))
        self._updates[-1] = replace(self._updates[-1], loss=loss, clipped=clipped, grad_norm=norm)

    def report(self) -> CriticReport:
        """Report the step."""
        return CriticReport(tuple(self._moments.tolist()), tuple(self._updates))


def _computes_values(ranks: ParallelState) -> bool:
    """Whether this rank's gradient is one of the sum: tensor ranks have equal ones, context and data ranks parts."""
    return ranks.last_stage and ranks.tensor_rank == 0


def _moments(values_k: Tensor, returns_k: Tensor) -> Tensor:
    """``[6]``: count, and sums of V, R, R^2, R - V and (R - V)^2. Results of micro-batches and ranks add up."""
    values_k, returns_k = values_k.double(), returns_k.double()
    errors_k = returns_k - values_k
    terms = (torch.ones_like(values_k), values_k, returns_k, returns_k**2, errors_k, errors_k**2)
    return torch.stack([each.sum() for each in terms])
