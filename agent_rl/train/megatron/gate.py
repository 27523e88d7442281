"""The router's gate: scores, choice of experts, and gate weights of every family, with replay built in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from agent_rl.models.spec import ModelSpec

MIN_SUM = 1e-20
"""The sum of a token's gates is at least this where they are normalized, as in DeepSeek-V3's and GLM-4's references."""
GATES = "gates"
"""The old policy's log-probabilities ``[T, L, K]`` among the extras of a batch."""


class Gate(TopKRouter):
    """Eq. 8 of the R3 paper for any score: ``g_i = c I_i s_i / sum_j I_j s_j``.

    ``s`` are the scores (softmax or sigmoid of the logits), ``c`` the scale. ``I`` are the chosen experts: the router's
    own choice, by score plus correction bias within the best groups, or the replayed experts. Neither the bias nor the
    groups are part of the gates. Without normalization the gates are ``c I_i s_i``. ``bias``: of the logits, where the
    family has one.
    """

    def __init__(self, config: Any, pg_collection: Any = None, *, model_spec: ModelSpec) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self._spec = model_spec
        self.recorded: list[Tensor] | None = None
        if model_spec.router_bias:  # Megatron would add one to every linear layer too
            self.bias = torch.nn.Parameter(self.weight.new_zeros(model_spec.num_experts))
            self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The gates and the chosen experts of ``logits [..., E]``, both ``[tokens, E]``."""
        spec, logits = self._spec, logits.flatten(0, -2)
        # The softmax over the chosen logits equals the normalized softmax over all, and rounds less.
        late = spec.scoring == "softmax" and spec.norm_topk_prob and self.expert_bias is None
        scores = (
            logits if late else logits.float().sigmoid() if spec.scoring == "sigmoid" else logits.float().softmax(-1)
        )
        corrected = scores if self.expert_bias is None else scores + self.expert_bias
        if self.router_replay is None:
            experts = self._choose(corrected, spec.top_k)[1]
        else:
            experts = self.router_replay.get_replay_topk(corrected, spec.top_k, default_compute_topk=self._choose)[1]
        if self.recorded is not None:
            wide = logits.detach().float()
            logs = F.logsigmoid(wide) if spec.scoring == "sigmoid" else wide.log_softmax(-1)
            self.recorded.append(logs.gather(1, experts))
        gates = scores.gather(1, experts)
        if late:
            gates = gates.float().softmax(-1)
        elif spec.norm_topk_prob:
            gates = gates / gates.sum(-1, keepdim=True).clamp(min=MIN_SUM)
        gates = (gates * spec.gate_scale).type_as(logits)
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
        return torch.zeros_like(logits).scatter(1, experts, gates), chosen

    def _choose(self, scores: Tensor, top_k: int, *_unused: Any, **_unused_options: Any) -> tuple[Tensor, Tensor]:
        """The best ``top_k`` scores and their experts. Groups are ranked by the sum of their two best experts
        (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
        spec = self._spec
        if spec.expert_groups > 1:
            grouped = scores.unflatten(-1, (spec.expert_groups, -1))
            best = grouped.topk(2, dim=-1)[0].sum(-1).topk(spec.top_groups, dim=-1)[1]
            allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)
            scores = grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)
        return torch.topk(scores, top_k, dim=-1)


@contextmanager
def recorded_gates(chunk: Any) -> Iterator[list[Tensor]]:
    """The log-probabilities ``[T, K]`` of the experts that each layer used within the block, in the order of layers."""
    gates = [module for module in chunk.modules() if isinstance(module, Gate) and module.router_replay is not None]
    recorded: list[Tensor] = []
    for gate in gates:
        gate.recorded = recorded
    try:
        yield recorded
    finally:
        for gate in gates:
            gate.recorded = None


def log_router_shift(old_TLK: Tensor, new_TLK: Tensor, present: Tensor | None = None) -> Tensor:
    """The log of the router-shift ratio of RSPO (arXiv 2510.23027): how far the router has moved.

    With the router's probabilities r of the old and r' of the current policy, over the K experts that the token used in
    each of L layers, which are replayed in both passes::

        gamma = exp( - mean over layers and experts of | log r'(expert) - log r(expert) | )

    Returns ``log gamma`` ``[T]``, at most 0, of the token that each row predicts, the next one. ``present`` bool
    ``[T]`` or ``[T, L]``: where the experts were given; elsewhere the router has not moved.
    """
    distance_TL = (new_TLK - old_TLK).abs().mean(-1)
    if present is not None:
        distance_TL = torch.where(present if present.ndim == 2 else present[:, None], distance_TL, 0.0)
    return -distance_TL.mean(-1).roll(1)
