"""Brings the plans of a pass to the layers of experts, micro-batch by micro-batch; as r3.megatron_replay brings the
routes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import TransformerBlock
from numpy.typing import NDArray
from torch import Tensor

from agent_rl.errors import TrainerError
from agent_rl.train.expert_balancing.borrowed_experts import BalancedExperts, Placement, Work
from agent_rl.train.expert_balancing.moe_layer import BalancedMoELayer
from agent_rl.train.expert_balancing.transfer import Transfer
from r3.balance import Grid, Plan
from r3.megatron_replay import is_recomputed

_EVERY = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class Balancing:
    """How a model is built that can be balanced.

    ``transfers`` is given this rank's home experts by their layer's number, and gives what fetches in passes without
    gradients and in those with (they may be one). Where an expert's tokens are shared out, each part is computed with
    at least ``min_rows`` rows, or as many as all have together, some of zeros: a CPU's products of fewer rows have
    other bits (measured: float32 on one thread needs 16). ``keep_order``: a token's experts are added up in the order
    without balancing (all-to-all alone).
    """

    grid: Grid
    transfers: Callable[[Mapping[int, BalancedExperts]], tuple[Transfer, Transfer]]
    min_rows: int = 16
    keep_order: bool = True


class ExpertBalancer:
    """Drives the layers of experts of one model's chunks on this rank.

    ``moe_layers``: the numbers (from 1) of the layers with experts; column i of the plans is layer ``moe_layers[i]``.
    ``recompute`` and ``update`` bring the experts in passes without gradients and in those with.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], balancing: Balancing, moe_layers: Sequence[int]) -> None:
        self._balancing, self._microbatches = balancing, [0] * len(chunks)
        self._source = parallel_state.get_expert_model_parallel_rank()
        self._columns = {number: column for column, number in enumerate(moe_layers)}
        self._layers = [{layer.layer_number: layer for layer in self._adopt_chunk(chunk)} for chunk in chunks]
        experts = {number: layer.experts for layers in self._layers for number, layer in layers.items()}
        self.recompute, self.update = balancing.transfers(experts)

    def _adopt_chunk(self, chunk: torch.nn.Module) -> Iterator[BalancedMoELayer]:
        grid, keep_order = self._balancing.grid, self._balancing.keep_order
        for block in (module for module in chunk.modules() if isinstance(module, TransformerBlock)):
            for place, decoder_layer in enumerate(block.layers):
                for layer in (module for module in decoder_layer.modules() if isinstance(module, BalancedMoELayer)):
                    layer.adopt(grid, recomputed=is_recomputed(layer.config, place), keep_order=keep_order)
                    yield layer

    def rehome(self, homes: Mapping[int, Sequence[int]], device: torch.device) -> None:
        """The expert in each home place of the expert group, by layer number; plans must be made for them."""
        for layer in self._all():
            layer.home = torch.tensor(homes[layer.layer_number], device=device)

    @contextmanager
    def forward(self, chunk: int, plans: Mapping[int, Plan] | None, *, backward: bool) -> Iterator[None]:
        """Around one forward pass of one micro-batch through chunk ``chunk``.

        ``plans`` by column; None: nothing is borrowed. They are kept until the backward pass, which ``backward`` says
        will follow. All ranks of the expert group must give the same.
        """
        layers = self._layers[chunk]
        visit = [(number, plans[self._columns[number]]) for number in layers] if plans else []
        # Where nobody borrows, the layer stays Megatron's own.
        visit = [(number, plan) for number, plan in visit if (plan.borrowed >= 0).any()]
        works = self._works(visit, self.update if backward else self.recompute)
        for number, layer in layers.items():
            layer.begin(works.get(number), backward=backward)
        yield
        self._microbatches[chunk] += 1

    def _works(self, visit: Sequence[tuple[int, Plan]], transfer: Transfer) -> dict[int, Work]:
        if not visit:
            return {}
        transfer.prefetch(*visit[0])
        tables = np.stack([placement_table(plan, self._source) for _, plan in visit])
        placed = torch.from_numpy(tables).to(torch.cuda.current_device())
        works = {}
        for place, (number, plan) in enumerate(visit):
            held, least = local_slots(plan, self._source, self._balancing.min_rows)
            works[number] = Work(visit, place, transfer, Placement(*placed[place]), held, least)
        return works

    def finish(self, microbatches: int) -> None:
        """After a step of so many micro-batches. Clears. Raises TrainerError where a chunk was not run on as many, or a
        recomputation was left out."""
        passes, left = list(self._microbatches), sum(layer.left for layer in self._all())
        self.clear()
        if any(count != microbatches for count in passes):
            raise TrainerError(f"balanced model chunks were run on {passes} micro-batches, not {microbatches}")
        if left:
            raise TrainerError(f"{left} plans were kept for a recomputation that did not come")

    def clear(self) -> None:
        """Forget all plans. Idempotent."""
        self._microbatches = [0] * len(self._layers)
        for layer in self._all():
            layer.clear()

    def _all(self) -> list[BalancedMoELayer]:
        return [layer for layers in self._layers for layer in layers.values()]


def placement_table(plan: Plan, source: int) -> NDArray[np.int64]:
    """The rows of a :class:`Placement` ``[3, P]``. Tokens that were not foreseen come after those that were."""
    quota = plan.quota(source).astype(np.int64)
    stop = quota.cumsum(axis=1)
    experts, ranks = np.nonzero(plan.slot_of >= 0)
    table = np.zeros((3, plan.grid.ranks * (plan.grid.homes + plan.grid.slots)), np.int64)
    table[:, plan.slot_of[experts, ranks]] = experts, (stop - quota)[experts, ranks], stop[experts, ranks]
    table[2, plan.fallback_slot] = _EVERY
    return table


def local_slots(plan: Plan, rank: int, min_rows: int) -> tuple[Tensor, Tensor]:
    """Which local slots of ``rank`` hold an expert, and the least rows of their products.

    Where an expert's tokens stay together nothing is filled up, nor beyond all the tokens it has: so it would be
    computed without a plan.
    """
    experts = np.concatenate([plan.grid.home.reshape(plan.grid.ranks, -1)[rank], plan.borrowed[rank]])
    shared = (plan.load > 0).sum(axis=1) > 1
    least = np.where(shared, np.minimum(plan.load.sum(axis=1), min_rows), 0)[experts]
    return torch.from_numpy(experts >= 0), torch.from_numpy(least.astype(np.int64))
