"""This rank's training state as checkpoint pieces (:mod:`.piece_files`), read from and written to the optimizer.

The optimizer's float32 tensors per parameter are the full state: its master weights are the weights in float32
training and determine them in bfloat16 training. The value head of a critic, which every rank holds, is one more
parameter, which rank 0 writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from agent_rl.models.cuts import ParamShard
from agent_rl.train.checkpoint.piece_files import FlatRange, PieceReader, Snapshot
from agent_rl.train.critic import Critic
from agent_rl.train.host_memory import host_tensor
from agent_rl.train.megatron.hf_weights import ParamMapping
from agent_rl.train.megatron.model import PolicyModel
from agent_rl.train.optimizer import PolicyOptimizer, StateShard, named_parameters

VALUE_HEAD = "value_head"
"""The name of the critic's state, and of the count of its updates."""


class StatePieces:
    """The state of one model, its optimizer and its critic. Only :meth:`load` is collective."""

    def __init__(self, model: PolicyModel, optimizer: PolicyOptimizer, critic: Critic | None = None) -> None:
        self._optimizer, self._critic, self._ranks = optimizer, critic, model.ranks
        self._mappings = _mappings_by_name(model)
        self._host: Tensor | None = None

    def snapshot(self) -> Snapshot:
        """Copy this rank's pieces to host memory. Every snapshot reuses that memory: write one before you take the
        next."""
        shards = [shard for shard in self._optimizer.shards() if self._writes(self._mappings[shard.name])]
        written = [(self._ranges(shard), shard.slots) for shard in shards]
        counts = self._optimizer.counts
        if self._critic is not None:
            counts |= {VALUE_HEAD: self._critic.updates}
            if self._ranks.rank == 0:
                written.append(([_value_head(self._critic)], self._critic.slots()))
        if self._host is None:
            total = sum(tensor.numel() for _, slots in written for tensor in slots.values())
            self._host = host_tensor(total, torch.float32, pinned=any(s["master"].is_cuda for _, s in written))
        pieces: list[tuple[FlatRange, str]] = []
        offset = 0
        for ranges, slots in written:
            for slot, source in slots.items():
                self._host[offset : offset + source.numel()].copy_(source)
                offset += source.numel()
                pieces.extend((flat_range, slot) for flat_range in ranges)
        return Snapshot(pieces, self._host[:offset].numpy(), counts)

    def load(self, reader: PieceReader, counts: Mapping[str, int]) -> None:
        """Load this rank's state from a checkpoint of any parallel layout, shard by shard, and update the model's
        weights. A checkpoint of a run without a critic leaves a new one as it is. Raises TrainerError where the
        checkpoint is damaged or belongs to another model."""
        self._optimizer.load(lambda shard: self._read(reader, shard), counts)
        if self._critic is not None and VALUE_HEAD in counts:
            for slot, tensor in self._critic.slots().items():
                tensor.copy_(torch.from_numpy(reader.read(_value_head(self._critic), slot)))
            self._critic.updates = counts[VALUE_HEAD]

    def expert_ranges(self, shards: Iterable[StateShard]) -> dict[str, list[FlatRange]]:
        """Returns the flat ranges of those of ``shards`` that belong to experts, by the optimizer's name."""
        of_experts = [shard for shard in shards if self._mappings[shard.name].described.cut.ranks == "expert"]
        return {shard.name: self._ranges(shard) for shard in of_experts}

    def _read(self, reader: PieceReader, shard: StateShard) -> dict[str, Tensor]:
        ranges, none = self._ranges(shard), np.empty(0, np.float32)
        return {
            slot: torch.from_numpy(np.concatenate([none, *(reader.read(flat_range, slot) for flat_range in ranges)]))
            for slot in shard.slots
        }

    def _ranges(self, shard: StateShard) -> list[FlatRange]:
        """The flat ranges that make up a shard of the optimizer: those of its parameter's shards that overlap it."""
        mapping = self._mappings[shard.name]
        described, ranges, offset = mapping.described, list[FlatRange](), 0
        for part in described.cut.shards(described.tensors, tuple(shard.shape), mapping.place(self._ranks)):
            size = math.prod(part.shape)
            start, stop = max(shard.start - offset, 0), min(shard.stop - offset, size)
            if start < stop:
                ranges.append(FlatRange(part, start, stop))
            offset += size
        return ranges

    def _writes(self, mapping: ParamMapping) -> bool:
        """Whether this rank is the first of those with the same data."""
        kind = mapping.described.cut.ranks
        if mapping.described.copied or (not kind and self._ranks.tensor_rank > 0):
            return False
        if self._optimizer.distributed:
            return True
        if kind == "expert":
            return bool(parallel_state.get_expert_data_parallel_rank() == 0)
        return bool(parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0)


def _value_head(critic: Critic) -> FlatRange:
    size = critic.slots()["master"].numel()
    return FlatRange(ParamShard(VALUE_HEAD, (size,)), 0, size)


def _mappings_by_name(model: PolicyModel) -> dict[str, ParamMapping]:
    """The mappings by the optimizer's name of their parameter."""
    mappings = {id(mapping.parameter): mapping for mapping in model.param_mappings()}
    return {name: mappings[id(parameter)] for name, parameter in named_parameters(model.modules)}
