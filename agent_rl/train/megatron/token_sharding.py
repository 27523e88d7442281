"""Which tokens of a packed micro-batch this rank computes, and how their results return to batch order. Applies the
indices of :mod:`r3.shard` to tensors."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_rl.errors import TrainerError
from agent_rl.train.megatron.packed_batch import PackedBatch, PackedRoutes
from agent_rl.train.megatron.parallel import ParallelState
from r3.routing import Routing, RoutingError
from r3.shard import (
    Packing,
    RouteShard,
    ShardSpec,
    check_identity,
    context_order,
    context_places,
    cut_routes,
    moe_columns,
    router_slice,
    stage_layers,
)


def shard_spec(ranks: ParallelState, moe: tuple[bool, ...], *, model_chunks: int = 1) -> ShardSpec:
    """The tokens and MoE layers of this rank's routers. ``moe[i]``: layer i has experts; ``model_chunks``: virtual
    stages per rank."""
    chunks = stage_layers(len(moe), ranks.pipeline_size, model_chunks)[ranks.pipeline_rank]
    return ShardSpec(
        columns=moe_columns(
            [number for chunk in chunks for number in chunk], [index + 1 for index, yes in enumerate(moe) if yes]
        ),
        context_rank=ranks.context_rank,
        context_size=ranks.context_size,
        tensor_rank=ranks.tensor_rank,
        tensor_size=ranks.tensor_size,
    )


class Layout:
    """How one micro-batch is divided among context and tensor ranks.

    ``lengths``: this context rank's tokens of each sequence. ``source`` int64 ``[local]``: which token of the batch
    each local token is, -1 for padding. ``positions`` int64 ``[local]``. ``chunks``: the two chunks of every sequence
    on this rank under context parallelism.
    """

    def __init__(self, batch: PackedBatch, spec: ShardSpec) -> None:
        self.spec = spec
        self.packing = Packing(tuple(batch.cu_seqlens.diff().tolist()), spec.multiple)
        self.context_size, self.chunks = spec.context_size, spec.chunks
        self.lengths = [length // spec.context_size for length in self.packing.padded_lengths]
        rows = self.packing.rows(context_places(self.packing, spec))
        self.source, self.positions = torch.from_numpy(rows.source), torch.from_numpy(rows.positions)
        self._sample_ids, self._tokens = batch.sample_ids, batch.tokens.cpu().numpy()

    def take(self, rows: Tensor, padding: int) -> Tensor:
        """This context rank's rows of ``rows [T, ...]``, with the value ``padding`` at padding tokens."""
        source = self.source.to(rows.device)
        taken = rows[source.clamp(min=0)]
        return taken.masked_fill((source < 0).view(-1, *[1] * (rows.ndim - 1)), padding)

    @property
    def router_padding(self) -> Tensor:
        """bool ``[rows]``: which tokens of this rank's routers are padding."""
        return self.source[router_slice(len(self.source), self.spec)] < 0

    def shard_routes(self, routes: PackedRoutes, num_experts: int) -> RouteShard:
        """This rank's shard of the routes of a full batch."""
        experts, present = routes.experts.cpu().numpy(), routes.present.cpu().numpy()
        bounds = self.packing.cu_seqlens[1:-1]
        parts = zip(np.split(experts, bounds), np.split(present, bounds), strict=True)
        routings = [Routing(rows, mask, (), num_experts) for rows, mask in parts]
        return cut_routes(routings, self._sample_ids, self._tokens, self.packing, self.spec)

    def check(self, shard: RouteShard) -> int:
        """Check that row i of ``shard`` belongs to token i of the input. Returns the number of rows compared.

        Raises TrainerError with sample and token.
        """
        try:
            return check_identity(shard, self._sample_ids, self._tokens, self.packing, self.spec)
        except RoutingError as error:
            raise TrainerError(f"the routes do not belong to the tokens of the batch: {error}") from None

    def gather_context(self, rows: Tensor) -> Tensor:
        """All context ranks' rows in the order of the padded sequences; the backward pass sums the gradient on the
        owner."""
        from megatron.core.parallel_state import get_context_parallel_group
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        gathered = gather_from_sequence_parallel_region(
            rows.contiguous(), tensor_parallel_output_grad=True, group=get_context_parallel_group()
        )
        return gathered[self._gathered_order.to(rows.device)]

    @cached_property
    def _gathered_order(self) -> Tensor:
        order: NDArray[np.int64] = context_order(self.packing, self.spec)
        return torch.from_numpy(order)
