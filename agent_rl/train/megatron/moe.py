"""A layer of experts: Megatron's own, with the parts it leaves to Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``product(tokens [N, I], weight [E, O, I], ends int32 [E])``: each expert's tokens, which end at ``ends``, times its
weight, ``[N, O]``."""


def grouped_product(tokens: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """All in one."""
    return F.grouped_mm(tokens, weight.transpose(1, 2), offs=ends)


def one_product_an_expert(tokens: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """One after another; the host waits for the ends."""
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([rows @ own.T for rows, own in zip(tokens.split(counts), weight, strict=True)])


class Experts(torch.nn.Module):
    """This rank's experts with stacked weights: ``weight1 [E, 2 I, H]`` (gate over up) and ``weight2 [E, H, I]``."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: Any = None, *, product: Product
    ) -> None:
        super().__init__()
        self._product = product
        if pg_collection.expt_tp.size() != 1:
            raise ValueError("experts are not cut over tensor ranks: expert_tensor_parallel_size must be 1")
        inner, hidden = config.moe_ffn_hidden_size, config.hidden_size
        self.weight1 = self._weight(config, num_local_experts, 2 * inner, hidden)
        self.weight2 = self._weight(config, num_local_experts, hidden, inner)

    @staticmethod
    def _weight(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
        device = torch.cuda.current_device()
        weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        config.init_method(weight)
        # Expert gradients are summed over the ranks that hold the same experts. Tensor ranks are among them (they route
        # different tokens), which Megatron's own experts get wrong where expert parallelism is 1.
        weight.allreduce = config.expert_model_parallel_size * config.tensor_model_parallel_size == 1  # type: ignore
        # Otherwise the gradient norm would take other tensor ranks' experts for copies of rank 0's.
        set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)
        return weight

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Tokens ``[N, H]`` sorted by expert, each one's gate weight ``[N]``; returns ``[N, H]`` and no bias."""
        ends = tokens_per_expert.cumsum(0).to(device=tokens.device, dtype=torch.int32)
        hidden = self._times(tokens, "weight1", ends)
        return self._times(gated(hidden, probs), "weight2", ends), None

    def _times(self, tokens: Tensor, name: str, ends: Tensor) -> Tensor:
        return self._product(tokens, getattr(self, name), ends)


def gated(hidden: Tensor, probs: Tensor) -> Tensor:
    """An expert's inner layer ``[N, I]``: from gate over up ``[N, 2 I]``, times each token's gate weight ``[N]``."""
    gate, up = hidden.chunk(2, dim=-1)
    return (F.silu(gate) * up * probs[:, None]).to(hidden.dtype)


OF_A_PASS = (
    *("probs", "local_probs"),  # gates
    *("routing_map", "local_map", "reversed_local_input_permutation_mapping"),  # which token goes where
    *("_order", "_copies"),  # the same, of slots
    *("token_probs", "dispatched_probs", "token_indices", "dispatched_indices", "dispatched_routing_map"),  # of DeepEP
    *("tokens_per_expert", "reversed_mapping_for_combine"),
)
"""What a dispatcher holds of a pass: Megatron's all-to-all, allgather and flex (which has a manager for it), and that
of :mod:`agent_rl.train.expert_balancing.moe_layer`."""


class ReleasingMoELayer(MoELayer):
    """Megatron's, whose dispatcher lets go of gates and maps when a pass is through.

    It would hold them until the layer's next pass, and by the gates' graph what a recomputation of the layer keeps, its
    input's gradient among it: 2 H bytes a token and layer, in all layers at once. The maps take E + 8 k more.
    """

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """See Megatron's."""
        whole: Tensor = super().postprocess(output, shared_expert_output)
        for holder in (self.token_dispatcher, getattr(self.token_dispatcher, "_comm_manager", None)):
            for name in OF_A_PASS:
                if hasattr(holder, name):
                    setattr(holder, name, None)
        return whole


class EvenMoELayer(ReleasingMoELayer):
    """For the allgather dispatcher, whose ranks must bring equally many tokens: fills up to the largest number.

    Filled rows are routed to no expert and cut off again; the router never sees them.
    """

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
        self._tokens = len(hidden_states)
        most = torch.tensor(self._tokens, device=hidden_states.device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, self.token_dispatcher.tp_ep_group)
        missing = int(most) - self._tokens
        restore = (torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) for x in (hidden_states, probs, routing_map))
        return super().preprocess(*restore)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        whole: Tensor = super().postprocess(output, None)[: self._tokens]
        return whole if shared_expert_output is None else whole + shared_expert_output
