"""Renews which rank owns each expert, where expert ranks span nodes. Import only in rank processes.

::

    routes of a step ─ tokens by source node, of some micro-batches of all ranks
                     ─ every rank chooses the placement of some layers, where it saves more time than moving takes
    old owners ── weights and optimizer state of the experts that move, parameter by parameter ──> new owners
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from agent_rl.models.cuts import ParamShard
from agent_rl.train.checkpoint.piece_files import FlatRange
from agent_rl.train.checkpoint.rank_state import StatePieces
from agent_rl.train.expert_balancing.exchange import start, wait
from agent_rl.train.expert_balancing.report import Moved
from agent_rl.train.megatron.model import PolicyModel
from agent_rl.train.optimizer import PolicyOptimizer, StateShard, named_parameters
from agent_rl.train.reference import Reference
from r3.balance import ExpertLayout, TimeModel
from r3.balance.placement import joint_placement
from r3.balance.planners import by_source_node, layer_times

Counts = NDArray[np.int32]

SAMPLED = 16
"""Micro-batches of a step by which owners are chosen."""


class PlacementRenewal:
    """Chooses placements for the experts of a model. ``ranks``: those of the expert group. ``times``: of the passes of
    a step. ``moving``: picoseconds in which a rank sends or receives the state of one expert. ``every``: steps for
    which a placement stays.

    All ranks of the world construct theirs together.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        layout: ExpertLayout,
        columns: Sequence[int],
        moe_layers: int,
        times: Sequence[TimeModel],
        *,
        moving: int,
        every: int,
        device: torch.device,
    ) -> None:
        infos: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())] * dist.get_world_size()
        dist.all_gather_object(infos, (layout.nodes, ranks[0], tuple(columns)))
        nodes = max(info[0] for info in infos)
        peers = sorted({first for _, first, theirs in infos if theirs == tuple(columns)})
        self._share, self._shares = peers.index(ranks[0]), len(peers)
        self._leads, self._columns, self._device = ranks[0] == dist.get_rank(), list(columns), device
        self._times, self._moving, self._every = times, moving, every
        node_of_rank = tuple(rank * nodes // layout.ranks for rank in range(layout.ranks))
        in_order = np.tile(np.arange(layout.experts, dtype=np.int32), (moe_layers, 1))
        self._layout = replace(layout, node_of_rank=node_of_rank, placement=in_order)
        self._steps = 0

    def due(self) -> bool:
        """Count a step. Returns whether it renews the placement: the first, and then every so many."""
        self._steps += 1
        return self._every > 0 and self._layout.nodes > 1 and (self._steps - 1) % self._every == 0

    def choose(self, counts: Counts) -> NDArray[np.int32] | None:
        """Returns the new placement ``[moe_layers, E]`` for the tokens ``counts`` ``[M, C, R, E]`` of this rank's
        group, the same on every rank, or None if all experts stay. Collective over the world."""
        sources = self._gathered(counts)
        steps = self._every * len(counts) / max(1, len(sources))
        held, ranks = self._layout.placement, dist.get_world_size()
        own = np.tile(held[0], (-(-len(held) // ranks), 1))  # of layers rank, rank + ranks, ...
        for at, layer in enumerate(range(dist.get_rank(), len(held), ranks)):
            own[at] = self._of_layer(sources[:, layer : layer + 1], layer, steps)
        every = torch.empty(ranks * len(own), self._layout.experts, dtype=torch.int32, device=self._device)
        dist.all_gather_into_tensor(every, torch.from_numpy(own).to(self._device))
        found = every.cpu().numpy().reshape(ranks, len(own), -1).swapaxes(0, 1).reshape(-1, held.shape[1])[: len(held)]
        if np.array_equal(found, self._layout.placement):
            return None
        self._layout = replace(self._layout, placement=found)
        return found

    def _gathered(self, counts: Counts) -> Counts:
        """Returns ``[m, moe_layers, K, E]``: micro-batches of all groups, in turn."""
        layout = self._layout
        shape = (SAMPLED, len(layout.placement), layout.nodes, layout.experts)
        sources = torch.zeros(shape, dtype=torch.int32, device=self._device)
        if self._leads and self._columns:
            by_node = torch.from_numpy(by_source_node(counts[: -(-SAMPLED // self._shares)], layout))
            sources[self._share :: self._shares][: len(by_node), self._columns] = by_node.to(self._device)
        dist.all_reduce(sources)
        found = sources.cpu().numpy()
        return found[found.any(axis=(1, 2, 3))]

    def _of_layer(self, sources: Counts, layer: int, steps: float) -> NDArray[np.int32]:
        """Returns ``[E]`` from ``sources`` ``[m, 1, K, E]``."""
        old = replace(self._layout, placement=self._layout.placement[layer : layer + 1])
        new = replace(old, placement=joint_placement(sources, old, link_weight(old, self._times[-1])))
        saved = sum(int((layer_times(sources, old, t) - layer_times(sources, new, t))[0]) for t in self._times)
        moving = self._moving * _most_moved(old.owner_rank[0], new.owner_rank[0], old.ranks)
        return (new if saved * steps > moving else old).placement[0]


def link_weight(layout: ExpertLayout, times: TimeModel) -> float:
    """Returns how much of the mean load a token that leaves its node counts for. A quarter of its time, as borrowed
    experts keep most of these tokens in their node anyway."""
    return times.link * (layout.ranks // layout.nodes) / (4 * times.pair)


def _most_moved(old: NDArray[np.int32], new: NDArray[np.int32], ranks: int) -> int:
    moved = old != new
    return int(max(np.bincount(owner[moved], minlength=ranks).max() for owner in (old, new)))


@dataclass(frozen=True, slots=True)
class _Segment:
    """Elements that ``target`` needs and ``source`` has: ``size`` from ``source_start`` of its shard on, to
    ``target_start`` of the target's."""

    source: int
    target: int
    source_start: int
    target_start: int
    size: int

    @property
    def stays(self) -> bool:
        return (self.source, self.source_start) == (self.target, self.target_start)


Ranges = Mapping[tuple[str, str], Sequence[FlatRange]]
"""The flat ranges of a rank's shards of expert parameters, by kind (optimizer, reference) and the optimizer's name."""


@torch.no_grad()
def move_experts(
    model: PolicyModel, optimizer: PolicyOptimizer, placement: NDArray[np.int32], reference: Reference | None
) -> Moved:
    """Move the weights and optimizer state of experts, and their weights in ``reference``, to the ranks of
    ``placement`` ``[moe_layers, E]``. The weights are set from the optimizer's masters, which determine them.
    Collective."""
    started, nbytes = time.perf_counter(), 0
    names = {id(parameter): name for name, parameter in named_parameters(model.modules)}
    shards = {"optimizer": list(optimizer.shards()), "reference": reference.shards(names) if reference else []}
    before = _expert_ranges(model, optimizer, shards)
    model.set_placement(placement)
    everyone: list[tuple[Ranges, Ranges]] = [({}, {})] * dist.get_world_size()
    dist.all_gather_object(everyone, (before, _expert_ranges(model, optimizer, shards)))
    own = {(kind, shard.name): shard for kind, of_kind in shards.items() for shard in of_kind}
    for key in sorted({key for pair in everyone for ranges in pair for key in ranges}):
        segments = _segments([(old.get(key, ()), new.get(key, ())) for old, new in everyone])
        nbytes += _exchange(list(segments), own.get(key), model.device)
    optimizer.load(lambda shard: shard.slots, optimizer.counts)
    return Moved(nbytes, 1e3 * (time.perf_counter() - started))


def _expert_ranges(
    model: PolicyModel, optimizer: PolicyOptimizer, shards: Mapping[str, Sequence[StateShard]]
) -> Ranges:
    pieces = StatePieces(model, optimizer)
    return {
        (kind, name): ranges
        for kind, of_kind in shards.items()
        for name, ranges in pieces.expert_ranges(of_kind).items()
    }


def _segments(of_ranks: Sequence[tuple[Sequence[FlatRange], Sequence[FlatRange]]]) -> Iterator[_Segment]:
    """How one parameter's ranges get from their ``(held, needed)`` ranges by rank: from the rank itself where it holds
    them, else from one of the ranks that do."""
    holders: dict[ParamShard, list[tuple[int, int, FlatRange]]] = {}
    for rank, (held, _) in enumerate(of_ranks):
        for offset, flat_range in _with_offsets(held):
            holders.setdefault(flat_range.part, []).append((rank, offset, flat_range))
    for target, (_, needed) in enumerate(of_ranks):
        for offset, wanted in _with_offsets(needed):
            position = wanted.start
            while position < wanted.stop:
                having = [each for each in holders[wanted.part] if each[2].start <= position < each[2].stop]
                own = [each for each in having if each[0] == target]
                source, source_offset, found = own[0] if own else having[target % len(having)]
                size = min(found.stop, wanted.stop) - position
                starts = source_offset + position - found.start, offset + position - wanted.start
                yield _Segment(source, target, *starts, size)
                position += size


def _with_offsets(ranges: Sequence[FlatRange]) -> Iterator[tuple[int, FlatRange]]:
    """Returns the ranges of single experts and where they start in the shard."""
    offset = 0
    for flat_range in ranges:
        part, first = flat_range.part, offset - flat_range.start
        count, size = part.shape[0], math.prod(part.shape) // part.shape[0]
        for expert in range(flat_range.start // size, -(-flat_range.stop // size)):
            start, stop = max(flat_range.start, expert * size), min(flat_range.stop, (expert + 1) * size)
            single = replace(
                part, shape=(1, *part.shape[1:]), index=part.index * count + expert, count=part.count * count
            )
            yield first + start, FlatRange(single, start - expert * size, stop - expert * size)
        offset += flat_range.size


def _exchange(segments: Sequence[_Segment], shard: StateShard | None, device: torch.device) -> int:
    """Replace the state of this rank's ``shard`` by the segments for it; returns the bytes received."""
    rank = dist.get_rank()
    segments = [each for each in segments if rank in (each.source, each.target)]
    if shard is None or all(each.stays for each in segments):
        return 0
    old = torch.stack([values.to(device, torch.float32) for values in shard.slots.values()])
    new, received, operations = torch.empty_like(old), list[tuple[_Segment, Tensor]](), []
    for each in segments:
        taken = slice(each.source_start, each.source_start + each.size)
        if each.source == each.target == rank:
            new[:, each.target_start : each.target_start + each.size] = old[:, taken]
        elif each.source == rank:
            operations.append(dist.P2POp(dist.isend, old[:, taken].contiguous(), each.target))
        else:
            received.append((each, old.new_empty(len(old), each.size)))
            operations.append(dist.P2POp(dist.irecv, received[-1][1], each.source))
    wait(start(operations))
    for each, values in received:
        new[:, each.target_start : each.target_start + each.size] = values
    for stored, values in zip(shard.slots.values(), new, strict=True):
        stored.copy_(values)
    return sum(values.nbytes for _, values in received)
