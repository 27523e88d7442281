"""All experts of a machine's layers in its memory, for every rank there to borrow from.

::

    home ranks ── refresh, after every change of the weights ──> pool [layer, place] ── fetch ──> borrowers
         │                                                        one a machine
         └─ to the other machines, once each

An expert's place is that of its home, ``home rank * N + slot``. The pool is anonymous memory (memfd): its maker gives
it no name but hands its descriptors to the other ranks of the machine. So it is gone with the last of them, however
they end, and ``/dev/shm``, of which Docker gives 64 MB, plays no part. On a GPU its pages are pinned and copied from by
a stream of their own: written, and not yet run on a GPU.
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
from agent_rl.train.expert_balancing.transfer import Ahead, Coming, Counters, ExpertWeights, Transfer, TransferStats
from agent_rl.train.host_memory import free_memory
from r3.balance import Grid, Plan

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class _Member:
    """A rank of the world as the others know it. ``layers``: their numbers; ``machine``: equal where memory can be
    shared; ``ranks``: its expert group; ``nbytes``: of its layers' pool; ``free``: memory that its machine has left."""

    layers: tuple[int, ...]
    machine: tuple[Any, ...]
    ranks: tuple[int, ...]
    nbytes: int
    free: int


@dataclass(frozen=True, slots=True)
class _Copy:
    """How the expert at ``place`` gets into one machine's pool: from ``slot`` of global rank ``source``, its home,
    written by ``target``, a rank of that machine."""

    place: int
    slot: int
    source: int
    target: int


class Pool:
    """A :class:`~agent_rl.train.expert_balancing.transfer.Transfer` by memory that a machine's ranks share;
    gradients go home by ``exchange``, which is closed with the pool.

    ``layers``, ``ranks``, ``prefetch``, ``timeout``: as of :class:`Exchange`. All ranks of the world make theirs
    together; it has the weights of that moment. Raises ConfigError, on all ranks, where a machine has too little memory
    left.
    """

    def __init__(
        self,
        layers: Mapping[int, ExpertWeights],
        grid: Grid,
        ranks: Sequence[int],
        exchange: Exchange,
        *,
        prefetch: bool = True,
        timeout: float = 600.0,
    ) -> None:
        self._layers, self._exchange, self._rank = layers, exchange, dist.get_rank()
        self._own = list(ranks).index(self._rank)
        members = _gathered(_member(layers, grid, ranks))
        _check_memory(members)
        own = members[self._rank]
        stage = [rank for rank, member in enumerate(members) if member.layers == own.layers]
        self._group: Any = communicator(stage, timeout)
        self._copies = [copy for copy in _copies(grid, members, stage) if self._rank in (copy.source, copy.target)]
        maker = next(rank for rank in stage if members[rank].machine == own.machine)
        self._held = _shared(layers, grid.experts, maker, self._group)
        self._counters = Counters.of(layers)
        self._stream = _pinned(self._held, layers)
        self._ahead = Ahead(self._begin, self._counters, enabled=prefetch)
        self.refresh()

    def prefetch(self, layer: int, plan: Plan) -> None:
        """See :class:`Transfer`."""
        self._ahead.prefetch(layer, plan)

    def fetch(self, layer: int, plan: Plan) -> tuple[Tensor, Tensor]:
        """See :class:`Transfer`."""
        return self._ahead.fetch(layer, plan)

    def give_back(self, layer: int, plan: Plan, grad1: Tensor, grad2: Tensor) -> None:
        """See :class:`Transfer`."""
        self._exchange.give_back(layer, plan, grad1, grad2)

    def _begin(self, layer: int, plan: Plan) -> Coming:
        experts, slots = self._layers[layer], plan.borrowed[self._own]
        places = np.argsort(plan.grid.home)[slots[slots >= 0]].tolist()
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            first, second = (
                _taken(held, places, weight)
                for held, weight in zip(self._held[layer], (experts.weight1, experts.weight2), strict=True)
            )
        copied = None if self._stream is None else self._stream.record_event()
        return Coming((first, second), partial(_join, copied, first, second))

    @torch.no_grad()
    def refresh(self) -> None:
        """See :class:`Transfer`. Nobody reads until everybody has written: each rank waits for all of its layers'."""
        started = time.perf_counter()
        self._ahead.drop()
        self._settle()
        dist.barrier(self._group)  # all have read what they were to read
        for layer in self._layers:
            self._write(layer)
        self._settle()
        dist.barrier(self._group)  # all have written
        self._counters.add(TransferStats(refresh_ms=1e3 * (time.perf_counter() - started)))

    def _write(self, layer: int) -> None:
        experts, operations, received = self._layers[layer], [], []
        for copy in self._copies:
            for weight, held in zip((experts.weight1, experts.weight2), self._held[layer], strict=True):
                if copy.source == copy.target:
                    held[copy.place].copy_(weight[copy.slot], non_blocking=True)
                elif copy.source == self._rank:
                    operations.append(dist.P2POp(dist.isend, weight.detach()[copy.slot], copy.target, self._group))
                else:
                    received.append((held[copy.place], torch.empty_like(weight[0])))
                    operations.append(dist.P2POp(dist.irecv, received[-1][1], copy.source, self._group))
        wait(start(operations))
        for held, buffer in received:
            held.copy_(buffer, non_blocking=True)

    def _settle(self) -> None:
        """Wait for the GPU's copies from and to the pool."""
        if self._stream is not None:
            torch.cuda.synchronize()

    def take_stats(self) -> TransferStats:
        """See :class:`Transfer`; with those of the exchange that gives back."""
        return self._counters.take() + self._exchange.take_stats()

    def close(self) -> None:
        """See :class:`Transfer`."""
        self._ahead.drop()
        self._settle()
        if self._stream is not None:
            for held in (held for pair in self._held.values() for held in pair):
                unpin_memory(held.data_ptr())
        self._held.clear()
        group, self._group = self._group, None
        leave(group)
        self._exchange.close()


def open_transfers(
    layers: Mapping[int, ExpertWeights], grid: Grid, config: BalanceConfig, ranks: Sequence[int], timeout: float
) -> tuple[Transfer, Transfer]:
    """What fetches in passes without gradients and in those with, as ``config.transfer`` says: one object where the two
    are alike. Collective, and raises, as :class:`Pool`."""
    exchange = Exchange(layers, grid, ranks, prefetch=config.prefetch, timeout=timeout)
    kinds = (config.transfer.recompute, config.transfer.update)
    found: dict[str, Transfer] = {"exchange": exchange}
    if "pool" in kinds:
        found["pool"] = Pool(layers, grid, ranks, exchange, prefetch=config.prefetch, timeout=timeout)
    return found[kinds[0]], found[kinds[1]]


def _gathered(own: _Member) -> list[_Member]:
    """Those of all ranks of the world, in their order."""
    members: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(members, own)
    return members


def _member(layers: Mapping[int, ExpertWeights], grid: Grid, ranks: Sequence[int]) -> _Member:
    weights = [weight for experts in layers.values() for weight in (experts.weight1, experts.weight2)]
    machine = (
        Path("/proc/sys/kernel/random/boot_id").read_text(),
        os.stat("/proc/self/ns/pid").st_ino,
        grid.machine[list(ranks).index(dist.get_rank())],
    )
    nbytes = sum(weight[0].nbytes * grid.experts for weight in weights)
    return _Member(tuple(layers), machine, tuple(ranks), nbytes, free_memory())


def _check_memory(members: Sequence[_Member]) -> None:
    for machine in dict.fromkeys(member.machine for member in members):
        mates = [member for member in members if member.machine == machine]
        pools = {member.layers: member.nbytes for member in mates}
        needed, free = sum(pools.values()), min(member.free for member in mates)
        if needed > free:
            raise ConfigError(
                f"train.balance.transfer: a pool of all experts takes {needed / _GIB:.1f} GiB of a machine's memory, "
                f"which has {free / _GIB:.1f} GiB left: set it to exchange, or give the machine more memory"
            )


def _copies(grid: Grid, members: Sequence[_Member], stage: Sequence[int]) -> Iterator[_Copy]:
    """How every machine gets every expert of the layers of ``stage``, the global ranks that have them."""
    for machine in dict.fromkeys(members[rank].machine for rank in stage):
        mates = [rank for rank in stage if members[rank].machine == machine]
        group = members[mates[0]].ranks
        readers = [rank for rank in group if rank in mates]
        for place in range(grid.experts):
            home, slot = divmod(place, grid.homes)
            here = [rank for rank in mates if members[rank].ranks[home] == rank]
            if here:
                yield _Copy(place, slot, here[0], here[0])
            else:
                yield _Copy(place, slot, group[home], readers[place % len(readers)])


def _shared(
    layers: Mapping[int, ExpertWeights], experts: int, maker: int, group: Any
) -> dict[int, tuple[Tensor, Tensor]]:
    """The pool of the layers, ``[E, 2 I, H]`` and ``[E, H, I]`` each, in memory that global rank ``maker`` makes and
    all ranks of its machine map. The ranks of ``group`` call it together."""
    mine = (
        [os.memfd_create(f"experts-{layer}") for layer in layers for _ in range(2)] if maker == dist.get_rank() else []
    )
    made: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(made, (dist.get_rank(), os.getpid(), mine), group)
    process, descriptors = next((process, files) for rank, process, files in made if rank == maker)
    files = iter(descriptors)
    held = {
        layer: (
            _mapped(f"/proc/{process}/fd/{next(files)}", found.weight1, experts),
            _mapped(f"/proc/{process}/fd/{next(files)}", found.weight2, experts),
        )
        for layer, found in layers.items()
    }
    dist.barrier(group)  # everybody has mapped it
    for descriptor in mine:
        os.close(descriptor)
    return held


def _mapped(path: str, weight: Tensor, experts: int) -> Tensor:
    """The file's memory as that many experts like those of ``weight``; the first to map it makes it long enough."""
    shape = (experts, *weight.shape[1:])
    return torch.from_file(path, shared=True, size=math.prod(shape), dtype=weight.dtype).view(shape)


def _pinned(held: Mapping[int, tuple[Tensor, Tensor]], layers: Mapping[int, ExpertWeights]) -> torch.cuda.Stream | None:
    """Pin the pool for this rank's GPU; the stream that copies from it. None on a CPU, and where there is no layer."""
    if not any(experts.weight1.is_cuda for experts in layers.values()):
        return None
    for memory in (memory for pair in held.values() for memory in pair):
        pin_memory(memory.data_ptr(), memory.nbytes)
    return torch.cuda.Stream()


def _taken(held: Tensor, places: Sequence[int], weight: Tensor) -> Tensor:
    """A copy of the pool's experts at ``places``, ``[live, ...]``, where ``weight`` is."""
    taken = weight.new_empty(len(places), *held.shape[1:])
    for row, place in zip(taken, places, strict=True):
        row.copy_(held[place], non_blocking=True)
    return taken


def _join(copied: torch.cuda.Event | None, *weights: Tensor) -> None:
    """Make the current stream wait until ``weights`` are ``copied``; they were allocated for the stream that copies."""
    if copied is not None:
        torch.cuda.current_stream().wait_event(copied)
        for weight in weights:
            weight.record_stream(torch.cuda.current_stream())
