"""A copy of all experts in the host memory of a node, from which its ranks borrow.

::

    owner ranks ── refresh, after every change of the weights ──> pool [layer, slot] ── fetch ──> borrowers
         │                                                        one per node
         └─ to each other node once

An expert is stored at its parameter slot, ``owner rank * N + local slot``. The pool is anonymous memory (memfd): one
rank creates it and passes its descriptors to the other ranks of the node. The memory is freed when the last rank ends,
however it ends, and does not use ``/dev/shm``, which Docker limits to 64 MB. On a GPU its pages are pinned, and a
separate stream copies from them; this path has not been run on a GPU.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

from agent_rl.config import BalanceConfig
from agent_rl.errors import ConfigError
from agent_rl.train.expert_balancing.exchange import Exchange, communicator, leave, start, wait
from agent_rl.train.expert_balancing.transfer import (
    ExpertWeights,
    PendingFetch,
    Prefetcher,
    Transfer,
    TransferCounters,
    TransferStats,
)
from agent_rl.train.host_memory import free_memory
from r3.balance import ExpertLayout, LayerPlan

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class _RankInfo:
    """What every rank publishes about itself. ``layers``: its layer numbers; ``node``: equal on ranks that can share
    memory; ``ranks``: its expert group; ``nbytes``: bytes of its layers' pool; ``free``: free memory of its node."""

    layers: tuple[int, ...]
    node: tuple[Any, ...]
    ranks: tuple[int, ...]
    nbytes: int
    free: int


@dataclass(frozen=True, slots=True)
class _PoolWrite:
    """How one expert gets into ``pool_slot`` of one node's pool: from ``local_slot`` of its owner, global rank
    ``source``, written by ``target``, a rank of that node."""

    pool_slot: int
    local_slot: int
    source: int
    target: int


class HostPool:
    """A :class:`~agent_rl.train.expert_balancing.transfer.Transfer` through memory that the ranks of a node share.
    Gradients return through ``exchange``, which is closed with the pool.

    ``layers``, ``ranks``, ``prefetch``, ``timeout``: see :class:`Exchange`. All ranks of the world construct theirs
    together; the pool then has the current weights. Raises ConfigError on all ranks when a node has too little free
    memory.
    """

    def __init__(
        self,
        layers: Mapping[int, ExpertWeights],
        layout: ExpertLayout,
        ranks: Sequence[int],
        exchange: Exchange,
        *,
        prefetch: bool = True,
        timeout: float = 600.0,
    ) -> None:
        self._layers, self._exchange, self._rank = layers, exchange, dist.get_rank()
        self._group_rank = list(ranks).index(self._rank)
        infos = _gather_infos(_rank_info(layers, layout, ranks))
        _check_memory(infos)
        own = infos[self._rank]
        stage = [rank for rank, info in enumerate(infos) if info.layers == own.layers]
        self._group: Any = communicator(stage, timeout)
        writes = _pool_writes(layout, infos, stage)
        self._writes = [write for write in writes if self._rank in (write.source, write.target)]
        creator = next(rank for rank in stage if infos[rank].node == own.node)
        self._pool = _shared(layers, layout.experts, creator, self._group)
        self._counters = TransferCounters.for_layers(layers)
        self._stream = _pin(self._pool, layers)
        self._prefetcher = Prefetcher(self._start, self._counters, enabled=prefetch)
        self.refresh()

    def prefetch(self, layer: int, plan: LayerPlan) -> None:
        """See :class:`Transfer`."""
        self._prefetcher.prefetch(layer, plan)

    def fetch(self, layer: int, plan: LayerPlan) -> tuple[Tensor, Tensor]:
        """See :class:`Transfer`."""
        return self._prefetcher.fetch(layer, plan)

    def return_gradients(self, layer: int, plan: LayerPlan, grad1: Tensor, grad2: Tensor) -> None:
        """See :class:`Transfer`."""
        self._exchange.return_gradients(layer, plan, grad1, grad2)

    def _start(self, layer: int, plan: LayerPlan) -> PendingFetch:
        experts, slots = self._layers[layer], plan.borrowed[self._group_rank]
        pool_slots = np.argsort(plan.layout.placement)[slots[slots >= 0]].tolist()
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            first, second = (
                _copy_experts(pool, pool_slots, weight)
                for pool, weight in zip(self._pool[layer], (experts.weight1, experts.weight2), strict=True)
            )
        copied = None if self._stream is None else self._stream.record_event()
        return PendingFetch((first, second), partial(_wait_for_copy, copied, first, second))

    @torch.no_grad()
    def refresh(self) -> None:
        """See :class:`Transfer`. Returns after all ranks have written: then every rank may read."""
        started = time.perf_counter()
        self._prefetcher.drop()
        self._synchronize()
        dist.barrier(self._group)  # all ranks have finished reading the old weights
        for layer in self._layers:
            self._write(layer)
        self._synchronize()
        dist.barrier(self._group)  # all ranks have written the new weights
        self._counters.add(TransferStats(refresh_ms=1e3 * (time.perf_counter() - started)))

    def _write(self, layer: int) -> None:
        experts, operations, received = self._layers[layer], [], []
        for write in self._writes:
            for weight, pool in zip((experts.weight1, experts.weight2), self._pool[layer], strict=True):
                if write.source == write.target:
                    pool[write.pool_slot].copy_(weight[write.local_slot], non_blocking=True)
                elif write.source == self._rank:
                    expert = weight.detach()[write.local_slot]
                    operations.append(dist.P2POp(dist.isend, expert, write.target, self._group))
                else:
                    received.append((pool[write.pool_slot], torch.empty_like(weight[0])))
                    operations.append(dist.P2POp(dist.irecv, received[-1][1], write.source, self._group))
        wait(start(operations))
        for expert, buffer in received:
            expert.copy_(buffer, non_blocking=True)

    def _synchronize(self) -> None:
        """Wait for the GPU's copies from and to the pool."""
        if self._stream is not None:
            torch.cuda.synchronize()

    def take_stats(self) -> TransferStats:
        """See :class:`Transfer`; includes the exchange that returns gradients."""
        return self._counters.take() + self._exchange.take_stats()

    def close(self) -> None:
        """See :class:`Transfer`."""
        self._prefetcher.drop()
        self._synchronize()
        if self._stream is not None:
            for pool in (pool for pair in self._pool.values() for pool in pair):
                unpin_memory(pool.data_ptr())
        self._pool.clear()
        group, self._group = self._group, None
        leave(group)
        self._exchange.close()


def open_transfers(
    layers: Mapping[int, ExpertWeights],
    layout: ExpertLayout,
    config: BalanceConfig,
    ranks: Sequence[int],
    timeout: float,
) -> tuple[Transfer, Transfer]:
    """Returns the transfers for passes without and with gradients, as ``config.transfer`` names them: one object when
    both are of one kind. Collective; raises as :class:`HostPool`."""
    exchange = Exchange(layers, layout, ranks, timeout=timeout)
    kinds = (config.transfer.recompute, config.transfer.update)
    transfers: dict[str, Transfer] = {"exchange": exchange}
    if "pool" in kinds:
        transfers["pool"] = HostPool(layers, layout, ranks, exchange, timeout=timeout)
    return transfers[kinds[0]], transfers[kinds[1]]


def _gather_infos(own: _RankInfo) -> list[_RankInfo]:
    """Returns the infos of all ranks of the world, in their order."""
    infos: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(infos, own)
    return infos


def _rank_info(layers: Mapping[int, ExpertWeights], layout: ExpertLayout, ranks: Sequence[int]) -> _RankInfo:
    weights = [weight for experts in layers.values() for weight in (experts.weight1, experts.weight2)]
    node = (
        Path("/proc/sys/kernel/random/boot_id").read_text(),
        os.stat("/proc/self/ns/pid").st_ino,
        layout.node_of_rank[list(ranks).index(dist.get_rank())],
    )
    nbytes = sum(weight[0].nbytes * layout.experts for weight in weights)
    return _RankInfo(tuple(layers), node, tuple(ranks), nbytes, free_memory())


def _check_memory(infos: Sequence[_RankInfo]) -> None:
    for node in dict.fromkeys(info.node for info in infos):
        of_node = [info for info in infos if info.node == node]
        pools = {info.layers: info.nbytes for info in of_node}
        needed, free = sum(pools.values()), min(info.free for info in of_node)
        if needed > free:
            raise ConfigError(
                f"train.balance.transfer: a pool of all experts needs {needed / _GIB:.1f} GiB of a node's memory, and "
                f"{free / _GIB:.1f} GiB are free: set it to exchange, or use nodes with more memory"
            )


def _pool_writes(layout: ExpertLayout, infos: Sequence[_RankInfo], stage: Sequence[int]) -> Iterator[_PoolWrite]:
    """How every node gets every expert of the layers of ``stage``, the global ranks that have these layers."""
    for node in dict.fromkeys(infos[rank].node for rank in stage):
        on_node = [rank for rank in stage if infos[rank].node == node]
        group = infos[on_node[0]].ranks
        writers = [rank for rank in group if rank in on_node]
        for pool_slot in range(layout.experts):
            owner, local_slot = divmod(pool_slot, layout.experts_per_rank)
            owners = [rank for rank in on_node if infos[rank].ranks[owner] == rank]
            if owners:
                yield _PoolWrite(pool_slot, local_slot, owners[0], owners[0])
            else:
                yield _PoolWrite(pool_slot, local_slot, group[owner], writers[pool_slot % len(writers)])


def _shared(
    layers: Mapping[int, ExpertWeights], experts: int, owner: int, group: Any
) -> dict[int, tuple[Tensor, Tensor]]:
    """Returns the pool of the layers, ``[E, 2 I, H]`` and ``[E, H, I]`` each, in memory that global rank ``owner``
    creates and all ranks of its node map. The ranks of ``group`` call it together."""
    creates = owner == dist.get_rank()
    own_files = [os.memfd_create(f"experts-{layer}") for layer in layers for _ in range(2)] if creates else []
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (dist.get_rank(), os.getpid(), own_files), group)
    process, descriptors = next((process, files) for rank, process, files in gathered if rank == owner)
    files = iter(descriptors)
    pool = {
        layer: (
            _map_experts(f"/proc/{process}/fd/{next(files)}", weights.weight1, experts),
            _map_experts(f"/proc/{process}/fd/{next(files)}", weights.weight2, experts),
        )
        for layer, weights in layers.items()
    }
    dist.barrier(group)  # all ranks have mapped the files
    for descriptor in own_files:
        os.close(descriptor)
    return pool


def _map_experts(path: str, weight: Tensor, experts: int) -> Tensor:
    """Map a file as ``experts`` experts shaped like those of ``weight``; the first mapping sets the file's size."""
    shape = (experts, *weight.shape[1:])
    return torch.from_file(path, shared=True, size=math.prod(shape), dtype=weight.dtype).view(shape)


def _pin(pool: Mapping[int, tuple[Tensor, Tensor]], layers: Mapping[int, ExpertWeights]) -> torch.cuda.Stream | None:
    """Pin the pool for this rank's GPU and return the stream that copies from it; None on a CPU or without layers."""
    if not any(experts.weight1.is_cuda for experts in layers.values()):
        return None
    for memory in (memory for pair in pool.values() for memory in pair):
        pin_memory(memory.data_ptr(), memory.nbytes)
    return torch.cuda.Stream()


def _copy_experts(pool: Tensor, pool_slots: Sequence[int], weight: Tensor) -> Tensor:
    """Returns a copy of the experts in ``pool_slots``, ``[live, ...]``, on the device of ``weight``."""
    experts = weight.new_empty(len(pool_slots), *pool.shape[1:])
    for expert, slot in zip(experts, pool_slots, strict=True):
        expert.copy_(pool[slot], non_blocking=True)
    return experts


def _wait_for_copy(copied: torch.cuda.Event | None, *weights: Tensor) -> None:
    """Make the current stream wait until ``weights`` are ``copied``; they were allocated on the copying stream."""
    if copied is not None:
        torch.cuda.current_stream().wait_event(copied)
        for weight in weights:
            weight.record_stream(torch.cuda.current_stream())
