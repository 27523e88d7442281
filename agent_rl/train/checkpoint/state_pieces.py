"""This rank's training state as checkpoint pieces (:mod:`.pieces`), read from and written to the optimizer.

The optimizer's three float32 tensors per parameter are the full state: its master weights are the weights in float32
training and determine them in bfloat16 training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from agent_rl.train.checkpoint.pieces import FlatRange, ParamShard, PieceReader, Snapshot
from agent_rl.train.host_memory import host_tensor
from agent_rl.train.megatron import hf_weights as hf
from agent_rl.train.megatron.hf_weights import ParamMapping, Sharding
from agent_rl.train.megatron.model import PolicyModel
from agent_rl.train.megatron.parallel import ParallelState
from agent_rl.train.optimizer import SLOTS, PolicyOptimizer, StateShard, named_parameters


class StatePieces:
    """The state of one model and optimizer. Only :meth:`load` is collective."""

    def __init__(self, model: PolicyModel, optimizer: PolicyOptimizer) -> None:
        self._optimizer, self._ranks = optimizer, model.ranks
        self._mappings = _mappings_by_name(model)
        self._host: Tensor | None = None

    def snapshot(self) -> Snapshot:
        """Copy this rank's pieces to host memory. Every snapshot reuses that memory: write one before you take the
        next."""
        shards = [shard for shard in self._optimizer.shards() if self._writes(self._mappings[shard.name])]
        if self._host is None:
            total = len(SLOTS) * sum(shard.stop - shard.start for shard in shards)
            self._host = host_tensor(total, torch.float32, pinned=any(s.slots["master"].is_cuda for s in shards))
        pieces: list[tuple[FlatRange, str]] = []
        offset = 0
        for shard in shards:
            for slot in SLOTS:
                source = shard.slots[slot]
                self._host[offset : offset + source.numel()].copy_(source)
                offset += source.numel()
                pieces.extend((flat_range, slot) for flat_range in self._ranges(shard))
        return Snapshot(pieces, self._host[:offset].numpy(), self._optimizer.counts)

    def load(self, reader: PieceReader, counts: Mapping[str, int]) -> None:
        """Load this rank's state from a checkpoint of any parallel layout, shard by shard, and update the model's
        weights. Raises TrainerError where the checkpoint is damaged or belongs to another model."""
        self._optimizer.load(lambda shard: self._read(reader, shard), counts)

    def _read(self, reader: PieceReader, shard: StateShard) -> dict[str, Tensor]:
        stretches = self._ranges(shard)
        return {
            slot: torch.from_numpy(np.concatenate([reader.read(flat_range, slot) for flat_range in stretches]))
            for slot in SLOTS
        }

    def _ranges(self, shard: StateShard) -> list[FlatRange]:
        """The flat ranges that make up a shard: one, or one per expert where experts are not in order."""
        mapping = self._mappings[shard.name]
        part = part_of(mapping, shard.shape, self._ranks)
        if mapping.expert_order == tuple(range(len(mapping.expert_order))) or shard.start == shard.stop:
            return [FlatRange(part, shard.start, shard.stop)]
        size, each = math.prod(shard.shape[1:]), (1, *shard.shape[1:])
        bounds = [
            (expert, max(shard.start - position * size, 0), min(shard.stop - position * size, size))
            for position, expert in enumerate(hf.own_experts(mapping, self._ranks))
        ]
        return [
            FlatRange(ParamShard(part.name, each, 0, expert, len(mapping.expert_order)), start, stop)
            for expert, start, stop in bounds
            if start < stop
        ]

    def _writes(self, mapping: ParamMapping) -> bool:
        """Whether this rank is the first of those with the same data."""
        if mapping.sharding is Sharding.REPLICATED and self._ranks.tensor_rank > 0:
            return False
        if mapping.names == (hf.EMBEDDING,) and self._ranks.pipeline_rank > 0:  # a tied output's copy
            return False
        if self._optimizer.distributed:
            return True
        if mapping.sharding in (Sharding.EXPERTS_GATE_UP, Sharding.EXPERTS_DOWN):
            return bool(parallel_state.get_expert_data_parallel_rank() == 0)
        return bool(parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0)


def part_of(mapping: ParamMapping, shape: Sequence[int], ranks: ParallelState) -> ParamShard:
    """The shard of its parameter that this rank's weight of ``shape`` is, viewed so that one axis is sharded."""
    name, sizes = mapping.names[0], tuple(shape)
    match mapping.sharding:
        case Sharding.REPLICATED:
            return ParamShard(name, sizes)
        case Sharding.ROWS | Sharding.QKV:
            return ParamShard(name, sizes, 0, ranks.tensor_rank, ranks.tensor_size)
        case Sharding.COLUMNS:
            return ParamShard(name, sizes, 1, ranks.tensor_rank, ranks.tensor_size)
        case Sharding.GATE_UP:
            return ParamShard(name, (2, sizes[0] // 2, *sizes[1:]), 1, ranks.tensor_rank, ranks.tensor_size)
        case Sharding.EXPERTS_GATE_UP | Sharding.EXPERTS_DOWN:
            return ParamShard(name, sizes, 0, ranks.expert_rank, ranks.expert_size)


def _mappings_by_name(model: PolicyModel) -> dict[str, ParamMapping]:
    """The mappings by the optimizer's name of their parameter."""
    mappings = {id(mapping.parameter): mapping for mapping in model.param_mappings()}
    return {name: mappings[id(parameter)] for name, parameter in named_parameters(model.modules)}
