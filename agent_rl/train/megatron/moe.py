"""The MoE layer: Megatron's own, with the parts that Megatron takes from Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from agent_rl.models.parts import ExpertForm

ExpertMatmul = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``matmul(tokens [N, I], weight [E, O, I], ends int32 [E])``: each expert's tokens, which end at ``ends``, times its
weight; returns ``[N, O]``."""


def grouped_matmul(tokens: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """One kernel for all experts."""
    return F.grouped_mm(tokens, weight.transpose(1, 2), offs=ends)


def matmul_per_expert(tokens: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """One matmul after the other; the host waits for ``ends``."""
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([rows @ own.T for rows, own in zip(tokens.split(counts), weight, strict=True)])


class Experts(torch.nn.Module):
    """This rank's experts with stacked weights: ``weight1 [E, 2 I, H]`` (gate over up) and ``weight2 [E, H, I]``."""

    inputs = 2  # projections in weight1

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: Any = None, *, product: ExpertMatmul
    ) -> None:
        super().__init__()
        self._product = product
        if pg_collection.expt_tp.size() != 1:
            raise ValueError("expert_tensor_parallel_size must be 1: single experts are never sharded")
        inner, hidden = config.moe_ffn_hidden_size, config.hidden_size
        self.weight1 = self._weight(config, num_local_experts, self.inputs * inner, hidden)
        self.weight2 = self._weight(config, num_local_experts, hidden, inner)

    @staticmethod
    def _weight(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
        device = torch.cuda.current_device()
        weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        config.init_method(weight)
        # Expert gradients are summed over the ranks with the same experts. That includes tensor ranks, which route
        # different tokens; Megatron's own experts get this wrong without expert parallelism.
        weight.allreduce = config.expert_model_parallel_size * config.tensor_model_parallel_size == 1  # type: ignore
        # Otherwise the gradient norm would treat experts on other tensor ranks as copies of rank 0's.
        set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)
        return weight

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Tokens ``[N, H]`` sorted by expert and their gate weights ``probs [N]``; returns ``[N, H]`` and no bias."""
        ends = tokens_per_expert.cumsum(0).to(device=tokens.device, dtype=torch.int32)
        hidden = self._times(tokens, "weight1", ends)
        return self._times(self._activation(hidden, probs), "weight2", ends), None

    def _activation(self, hidden: Tensor, probs: Tensor) -> Tensor:
        return gated_activation(hidden, probs)

    def _times(self, tokens: Tensor, name: str, ends: Tensor) -> Tensor:
        return self._product(tokens, getattr(self, name), ends)


def gated_activation(hidden: Tensor, probs: Tensor) -> Tensor:
    """An expert's inner layer ``[N, I]``: from gate over up ``[N, 2 I]``, times each token's gate weight ``[N]``."""
    gate, up = hidden.chunk(2, dim=-1)
    return (F.silu(gate) * up * probs[:, None]).to(hidden.dtype)


class SquaredExperts(Experts):
    """Experts of Nemotron-H without gates: ``weight1 [E, I, H]``."""

    inputs = 1

    def _activation(self, hidden: Tensor, probs: Tensor) -> Tensor:
        return (F.relu(hidden).square() * probs[:, None]).to(hidden.dtype)


class ClampedExperts(Experts):
    """Experts of gpt-oss (arXiv 2508.10925) with ``bias1 [E, 2 I]`` and ``bias2 [E, H]``."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: Any = None, *, product: ExpertMatmul
    ) -> None:
        super().__init__(num_local_experts, config, pg_collection, product=product)
        self.bias1 = self._weight(config, num_local_experts, self.weight1.shape[1])
        self.bias2 = self._weight(config, num_local_experts, self.weight2.shape[1])

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """See :class:`Experts`."""
        counts = tokens_per_expert.to(tokens.device)

        def with_bias(inputs: Tensor, name: str, bias: Tensor) -> Tensor:
            rows = bias.repeat_interleave(counts, dim=0, output_size=len(inputs))
            return self._times(inputs, name, counts.cumsum(0).to(torch.int32)) + rows

        inner = clamped_activation(with_bias(tokens, "weight1", self.bias1))
        output = with_bias(inner, "weight2", self.bias2) * probs[:, None]
        return output.to(tokens.dtype), None


def clamped_activation(hidden: Tensor) -> Tensor:
    """The inner layer ``[N, I]`` from gate over up ``[N, 2 I]``."""
    gate, up = hidden.chunk(2, dim=-1)
    gate, up = gate.clamp(max=_CLAMP), up.clamp(-_CLAMP, _CLAMP)
    return gate * (gate * _SIGMOID_FACTOR).sigmoid() * (up + 1)


_CLAMP, _SIGMOID_FACTOR = 7.0, 1.702
EXPERTS: Mapping[ExpertForm, type[Experts]] = MappingProxyType(
    {"gated": Experts, "clamped": ClampedExperts, "squared": SquaredExperts}
)

PASS_STATE = (
    *("probs", "local_probs"),  # gates
    *("routing_map", "local_map", "reversed_local_input_permutation_mapping"),  # which token goes where
    *("_order", "_copies"),  # the same, of slots
    *("token_probs", "dispatched_probs", "token_indices", "dispatched_indices", "dispatched_routing_map"),  # of DeepEP
    *("tokens_per_expert", "reversed_mapping_for_combine"),
)
"""Attributes in which dispatchers keep the state of a pass: Megatron's all-to-all, allgather and flex (in a manager),
and :mod:`agent_rl.train.expert_balancing.moe_layer`."""


class ReleasingMoELayer(MoELayer):
    """Megatron's MoE layer, whose dispatcher frees gates and maps at the end of a pass.

    Megatron keeps them until the layer's next pass. The autograd graph of the gates keeps what a recomputation of the
    layer saved: 2 H bytes per token and layer, in all layers at once. The maps take E + 8 k bytes more.
    """

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """See Megatron's."""
        combined: Tensor = super().postprocess(output, shared_expert_output)
        for holder in (self.token_dispatcher, getattr(self.token_dispatcher, "_comm_manager", None)):
            for name in PASS_STATE:
                if hasattr(holder, name):
                    setattr(holder, name, None)
        return combined


class PaddedMoELayer(ReleasingMoELayer):
    """For the allgather dispatcher, which needs the same number of tokens on all ranks: pads to the largest number.

    Padding rows go to no expert and are removed from the output. The router never sees them.
    """

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
        self._tokens = len(hidden_states)
        longest = torch.tensor(self._tokens, device=hidden_states.device)
        torch.distributed.all_reduce(longest, torch.distributed.ReduceOp.MAX, self.token_dispatcher.tp_ep_group)
        missing = int(longest) - self._tokens
        padded = (torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) for x in (hidden_states, probs, routing_map))
        return super().preprocess(*padded)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        combined: Tensor = super().postprocess(output, None)[: self._tokens]
        return combined if shared_expert_output is None else combined + shared_expert_output
