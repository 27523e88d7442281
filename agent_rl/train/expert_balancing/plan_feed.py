"""Passes the plans of a pass to the MoE layers, micro-batch by micro-batch, as r3.megatron_replay passes the routes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import TransformerBlock
from numpy.typing import NDArray

from agent_rl.errors import TrainerError
from agent_rl.train.expert_balancing.borrowed_experts import (
    BalancedExperts,
    LayerBorrowing,
    SlotAssignment,
    SlotProducts,
)
from agent_rl.train.expert_balancing.moe_layer import BalancedMoELayer
from agent_rl.train.expert_balancing.transfer import Transfer
from r3.balance import ExpertLayout, LayerPlan
from r3.megatron_replay import is_recomputed

MIN_ROWS = 16
"""Rows from which on the bits of a product do not depend on their number: float32 on one thread of a CPU, measured."""

_NO_LIMIT = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class BalancingSpec:
    """How a model is built that can balance its experts.

    ``open_transfers``: from the experts of this rank by layer number to the transfers for passes without and with
    gradients (they may be one object).
    """

    layout: ExpertLayout
    open_transfers: Callable[[Mapping[int, BalancedExperts]], tuple[Transfer, Transfer]]


class ExpertBalancer:
    """Controls the MoE layers of one model's chunks on this rank.

    ``moe_layers``: the numbers (from 1) of the MoE layers; column i of the plans belongs to layer ``moe_layers[i]``.
    ``recompute`` and ``update``: the transfers of passes without and with gradients.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], spec: BalancingSpec, moe_layers: Sequence[int]) -> None:
        self._spec, self._microbatches = spec, [0] * len(chunks)
        self._rank = parallel_state.get_expert_model_parallel_rank()
        self._columns = {number: column for column, number in enumerate(moe_layers)}
        self._layers = [{layer.layer_number: layer for layer in self._enable_borrowing(chunk)} for chunk in chunks]
        experts = {number: layer.experts for layers in self._layers for number, layer in layers.items()}
        self.recompute, self.update = spec.open_transfers(experts)

    def _enable_borrowing(self, chunk: torch.nn.Module) -> Iterator[BalancedMoELayer]:
        for block in (module for module in chunk.modules() if isinstance(module, TransformerBlock)):
            for index, decoder_layer in enumerate(block.layers):
                for layer in (module for module in decoder_layer.modules() if isinstance(module, BalancedMoELayer)):
                    recomputed = is_recomputed(layer.config, index)
                    layer.enable_borrowing(self._spec.layout, recomputed=recomputed)
                    yield layer

    def set_placement(self, placement: Mapping[int, Sequence[int]], device: torch.device) -> None:
        """Set the expert in each parameter slot of the expert group, by layer number. Plans must use the same."""
        for layer in self._all_layers():
            layer.placement = torch.tensor(placement[layer.layer_number], device=device)

    @contextmanager
    def forward(self, chunk: int, plans: Mapping[int, LayerPlan] | None, *, backward: bool) -> Iterator[None]:
        """A context around one forward pass of one micro-batch through chunk ``chunk``.

        ``plans`` by column; None: nothing is borrowed. With ``backward``, they are kept until the backward pass. All
        ranks of the expert group must pass the same plans.
        """
        layers = self._layers[chunk]
        planned = [(number, plans[self._columns[number]]) for number in layers] if plans else []
        # A layer in which no rank borrows runs Megatron's own dispatcher.
        borrowing = [(number, plan) for number, plan in planned if (plan.borrowed >= 0).any()]
        by_layer = self._layer_borrowings(borrowing, self.update if backward else self.recompute)
        for number, layer in layers.items():
            layer.begin(by_layer.get(number), backward=backward)
        yield
        self._microbatches[chunk] += 1

    def _layer_borrowings(self, plans: Sequence[tuple[int, LayerPlan]], source: Transfer) -> dict[int, LayerBorrowing]:
        if not plans:
            return {}
        source.prefetch(*plans[0])
        tables = np.stack([slot_assignment_table(plan, self._rank) for _, plan in plans])
        assignments = torch.from_numpy(tables).to(torch.cuda.current_device())
        by_layer = {}
        for index, (number, plan) in enumerate(plans):
            products = slot_products(plan, self._rank, MIN_ROWS)
            by_layer[number] = LayerBorrowing(plans, index, source, SlotAssignment(*assignments[index]), products)
        return by_layer

    def finish(self, microbatches: int) -> None:
        """End a step of ``microbatches`` micro-batches and discard its plans. Raises TrainerError when a chunk ran
        another number, or when a recomputation is missing."""
        passes, pending = list(self._microbatches), sum(layer.pending_recomputations for layer in self._all_layers())
        self.clear()
        if any(count != microbatches for count in passes):
            raise TrainerError(f"balanced model chunks were run on {passes} micro-batches, not {microbatches}")
        if pending:
            raise TrainerError(f"{pending} plans were kept for a recomputation that did not come")

    def clear(self) -> None:
        """Discard all plans. Idempotent."""
        self._microbatches = [0] * len(self._layers)
        for layer in self._all_layers():
            layer.clear()

    def _all_layers(self) -> list[BalancedMoELayer]:
        return [layer for layers in self._layers for layer in layers.values()]


def slot_assignment_table(plan: LayerPlan, source: int) -> NDArray[np.int64]:
    """Returns the rows of :class:`SlotAssignment` ``[3, P]`` for rank ``source``. Tokens that were not foreseen follow
    after the foreseen ones, in the expert's fallback slot."""
    quota = plan.quota(source).astype(np.int64)
    stop = quota.cumsum(axis=1)
    experts, ranks = np.nonzero(plan.slot_of >= 0)
    table = np.zeros((3, plan.layout.ranks * (plan.layout.experts_per_rank + plan.layout.slots)), np.int64)
    table[:, plan.slot_of[experts, ranks]] = experts, (stop - quota)[experts, ranks], stop[experts, ranks]
    table[2, plan.fallback_slot] = _NO_LIMIT
    return table


def slot_products(plan: LayerPlan, rank: int, floor: int) -> SlotProducts:
    """Returns the products of the local slots of ``rank``. The minimum of rows is 0 when one rank computes all tokens
    of the expert, else ``floor`` or the number of these tokens: without a plan, the product would have that many."""
    experts = np.concatenate([plan.layout.placement.reshape(plan.layout.ranks, -1)[rank], plan.borrowed[rank]])
    shared, total = (plan.load > 0).sum(axis=1) > 1, plan.load.sum(axis=1)
    minimum = np.where(shared, np.minimum(total, floor), 0)[experts]
    short = bool((shared & (total < floor)).any())
    return SlotProducts(torch.from_numpy(experts), torch.from_numpy(minimum.astype(np.int64)), floor, short)
