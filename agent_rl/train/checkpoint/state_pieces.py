"""This rank's training state as pieces (:mod:`.pieces`): out of the optimizer, and back into it.

The optimizer's float32 masters are the weights themselves in float32 training and determine them in bfloat16, so the
three tensors a parameter that it keeps are all the state there is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from agent_rl.train.checkpoint.pieces import Part, PieceReader, Snapshot, Stretch
from agent_rl.train.megatron import hf_weights as hf
from agent_rl.train.megatron.hf_weights import Cut, Slot
from agent_rl.train.megatron.model import PolicyModel
from agent_rl.train.megatron.parallel import Ranks
from agent_rl.train.optimizer import SLOTS, PolicyOptimizer, StateShard
from agent_rl.train.pinned_memory import host_tensor


class StatePieces:
    """The state of one model and optimizer. Nothing here is collective but :meth:`load`."""

    def __init__(self, model: PolicyModel, optimizer: PolicyOptimizer) -> None:
        self._optimizer, self._ranks = optimizer, model.ranks
        self._slots = _slots_by_name(model)
        self._host: Tensor | None = None

    def snapshot(self) -> Snapshot:
        """Copy this rank's pieces to host memory, the same memory every time: write one before the next is taken."""
        shards = [shard for shard in self._optimizer.shards() if self._writes(self._slots[shard.name])]
        if self._host is None:
            total = len(SLOTS) * sum(shard.stop - shard.start for shard in shards)
            self._host = host_tensor(total, torch.float32, pinned=any(s.slots["master"].is_cuda for s in shards))
        pieces: list[tuple[Stretch, str]] = []
        offset = 0
        for shard in shards:
            for slot in SLOTS:
                source = shard.slots[slot]
                self._host[offset : offset + source.numel()].copy_(source)
                offset += source.numel()
                pieces.extend((stretch, slot) for stretch in self._stretches(shard))
        return Snapshot(pieces, self._host[:offset].numpy(), self._optimizer.counts)

    def load(self, reader: PieceReader, counts: Mapping[str, int]) -> None:
        """Take this rank's state out of a checkpoint of any layout, one shard after the other; the model's weights
        follow. Raises TrainerError where it is of another model or damaged."""
        self._optimizer.load(lambda shard: self._read(reader, shard), counts)

    def _read(self, reader: PieceReader, shard: StateShard) -> dict[str, Tensor]:
        stretches = self._stretches(shard)
        return {
            slot: torch.from_numpy(np.concatenate([reader.read(stretch, slot) for stretch in stretches]))
            for slot in SLOTS
        }

    def _stretches(self, shard: StateShard) -> list[Stretch]:
        """What the shard is of its parameter, one after the other: one stretch, but of experts that are not at home in
        order one of each expert."""
        slot = self._slots[shard.name]
        part = part_of(slot, shard.shape, self._ranks)
        if slot.home == tuple(range(len(slot.home))) or shard.start == shard.stop:
            return [Stretch(part, shard.start, shard.stop)]
        size, each = math.prod(shard.shape[1:]), (1, *shard.shape[1:])
        bounds = [
            (expert, max(shard.start - place * size, 0), min(shard.stop - place * size, size))
            for place, expert in enumerate(hf.own_experts(slot, self._ranks))
        ]
        return [
            Stretch(Part(part.name, each, 0, expert, len(slot.home)), start, stop)
            for expert, start, stop in bounds
            if start < stop
        ]

    def _writes(self, slot: Slot) -> bool:
        """Whether this rank is the first of those that keep the same stretch."""
        if slot.cut is Cut.WHOLE and self._ranks.tensor_rank > 0:
            return False
        if slot.names == (hf.EMBEDDING,) and self._ranks.pipeline_rank > 0:  # a tied output's copy
            return False
        if self._optimizer.distributed:
            return True
        if slot.cut in (Cut.EXPERTS_GATE_UP, Cut.EXPERTS_DOWN):
            return bool(parallel_state.get_expert_data_parallel_rank() == 0)
        return bool(parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0)


def part_of(slot: Slot, shape: Sequence[int], ranks: Ranks) -> Part:
    """Which part of its parameter this rank's weight of ``shape`` is, viewed so that the cut is along one axis."""
    name, sizes = slot.names[0], tuple(shape)
    match slot.cut:
        case Cut.WHOLE:
            return Part(name, sizes)
        case Cut.ROWS | Cut.QKV:
            return Part(name, sizes, 0, ranks.tensor_rank, ranks.tensor_size)
        case Cut.COLUMNS:
            return Part(name, sizes, 1, ranks.tensor_rank, ranks.tensor_size)
        case Cut.GATE_UP:
            return Part(name, (2, sizes[0] // 2, *sizes[1:]), 1, ranks.tensor_rank, ranks.tensor_size)
        case Cut.EXPERTS_GATE_UP | Cut.EXPERTS_DOWN:
            return Part(name, sizes, 0, ranks.expert_rank, ranks.expert_size)


def _slots_by_name(model: PolicyModel) -> dict[str, Slot]:
    """The slots by the optimizer's names of their parameters."""
    slots = {id(slot.parameter): slot for slot in model.slots()}
    return {name: slots[id(parameter)] for name, parameter in _named_parameters(model.modules)}


def _named_parameters(modules: Sequence[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for index, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            yield f"{index}.{name}", parameter
