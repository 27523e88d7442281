"""Optimizer state in host memory between updates (``train.offload_optimizer``), or with moments in bfloat16
(``train.optimizer_moments``). Needs torch and Megatron.

::

    an update, parameter by parameter    host ── master, moments ──> device ── Adam ──> weight
                                         host <───────────────────── device

Adam runs on the device in float32 in every case. Offloading changes no number; the device holds the float32 state of
one parameter at a time. Megatron's float32 masters keep their shape there, to which gradients are attached.

Moments in bfloat16 have 8 bits. With a beta2 of 0.999 an update changes the second moment by a thousandth, and rounding
to nearest would freeze it. So the rounding threshold moves through all positions between two bfloat16 numbers, by the
golden ratio per update, and rounding is unbiased over several updates. It depends on the number of updates only, so a
resumed run rounds the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agent_rl.train.host_memory import host_tensor

_GOLDEN = round((1 << 16) * (5**0.5 - 1) / 2)
"""Its multiples modulo 2**16 are evenly distributed, also the first ones (Weyl)."""


@dataclass(frozen=True, slots=True, eq=False)
class MasterShard:
    """The master of one parameter, which Adam updates: elements ``[start, ...)`` of the flattened ``parameter``. In
    float32 it is the parameter's own memory."""

    parameter: torch.nn.Parameter
    start: int
    master: Tensor

    @property
    def own(self) -> bool:
        """Whether the master has its own memory."""
        return self.master.untyped_storage()._cdata != self.parameter.untyped_storage()._cdata


class StoredState:
    """The state of one of Megatron's optimizers between updates. ``slots[i]`` belongs to ``masters[i]``, flat, by name,
    as in :class:`agent_rl.train.optimizer.StateShard`."""

    def __init__(
        self,
        adam: Any,
        masters: Sequence[MasterShard],
        moments: Sequence[str],
        *,
        offload: bool = True,
        precision: torch.dtype = torch.float32,
    ) -> None:
        """``adam``: torch's, Transformer Engine's or Apex's. Moments start as zeros. ``offload``: all state is on the
        host, and the masters' device memory is freed. ``precision``: of the moments."""
        self._inner, self.masters, self._moments = adam, tuple(masters), tuple(moments)
        self._offloaded = [offload and shard.own for shard in masters]
        sizes = [shard.master.numel() for shard in masters]
        offloaded_sizes = [size for size, offloaded in zip(sizes, self._offloaded, strict=True) if offloaded]
        master_blocks = _blocks(masters, offloaded_sizes, torch.float32, offload=offload)
        moment_blocks = _blocks(masters, [size for size in sizes for _ in moments], precision, offload=offload)
        self.slots: list[Mapping[str, Tensor]] = []
        for shard, offloaded in zip(self.masters, self._offloaded, strict=True):
            flat = shard.master.detach().view(-1)
            master = next(master_blocks).copy_(flat) if offloaded else flat
            self.slots.append({"master": master, **{name: next(moment_blocks) for name in self._moments}})
        for index in range(len(self.masters)):
            self._free_device(index)
        add_counts(adam)

    @torch.no_grad()
    def step(self, updates: int) -> None:
        """Update every parameter that has a gradient, and its weight. ``updates``: number of updates made before."""
        index_of = {id(shard.master): index for index, shard in enumerate(self.masters)}
        groups = self._inner.param_groups
        for group in groups:
            settings = dict(group)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                index = index_of[id(parameter)]
                self._load(index)
                self._inner.param_groups = [single := {**settings, "params": [parameter]}]
                self._inner.step()
                # Transformer Engine's Adam counts updates in the group.
                group.update({key: value for key, value in single.items() if key == "step"})
                self._store(index, updates)
        self._inner.param_groups = groups

    def spread(self) -> None:
        """Copy the masters to the weights."""
        for shard, slots in zip(self.masters, self.slots, strict=True):
            _copy_to_weight(shard, slots["master"])

    def _load(self, index: int) -> None:
        """Copy the state of one parameter to its device, in float32."""
        shard, slots = self.masters[index], self.slots[index]
        device, shape = shard.master.device, shard.master.shape
        if self._offloaded[index]:
            shard.master.data = slots["master"].to(device, copy=True).view(shape)
        self._inner.state[shard.master].update(
            # Copy, then convert: in one call torch would convert on the host.
            {name: slots[name].to(device, copy=True).float().view(shape) for name in self._moments}
        )

    def _store(self, index: int, updates: int) -> None:
        """Store the state after an update, and write the weight."""
        shard, slots = self.masters[index], self.slots[index]
        state = self._inner.state[shard.master]
        for name in self._moments:
            slots[name].copy_(_rounded(state[name].view(-1), slots[name].dtype, updates))
        master = shard.master.detach().view(-1)
        if self._offloaded[index]:
            slots["master"].copy_(master)
        if shard.own:
            _copy_to_weight(shard, master)
        self._free_device(index)

    def _free_device(self, index: int) -> None:
        """Free the device memory of an update: an offloaded master keeps its shape and one element."""
        shard, slots = self.masters[index], self.slots[index]
        if self._offloaded[index]:
            shard.master.data = shard.master.new_zeros(1).expand(shard.master.shape)
        self._inner.state[shard.master].update({name: slots[name].view(shard.master.shape) for name in self._moments})


def _blocks(shards: Sequence[MasterShard], sizes: Sequence[int], dtype: torch.dtype, offload: bool) -> Iterator[Tensor]:
    """Zero tensors of these sizes in one block: on the host, or on the device of the masters."""
    device = shards[0].master.device if shards else torch.device("cpu")
    if offload or not shards:
        block = host_tensor(sum(sizes), dtype, pinned=device.type == "cuda").zero_()
    else:
        block = torch.zeros(sum(sizes), dtype=dtype, device=device)
    return iter(block.split(list(sizes)))


def _rounded(wide: Tensor, dtype: torch.dtype, updates: int) -> Tensor:
    """Round float32 ``wide``, in index, if ``dtype`` is bfloat16: add an offset below 2**16 that depends on
    ``updates``, then truncate the last 16 bits. Zero stays zero."""
    if dtype == wide.dtype:
        return wide
    wide.view(torch.int32).add_(updates * _GOLDEN % (1 << 16)).bitwise_and_(-1 << 16)
    return wide.to(dtype)


def counts_by_parameter(adam: Any) -> bool:
    """Whether the optimizer counts updates per parameter (torch's), not per group (Transformer Engine's and Apex's)."""
    return type(adam).__module__.startswith("torch.")


def add_counts(adam: Any) -> None:
    """Add the update counts that torch's Adam needs for every parameter with moments."""
    if counts_by_parameter(adam):
        for state in adam.state.values():
            state.setdefault("step", torch.tensor(0.0))


@contextmanager
def without_gradient_buffers(chunks: Sequence[Any]) -> Iterator[None]:
    """A context without memory for gradients, in whose index Megatron allocates the masters."""
    for chunk in chunks:
        chunk.offload_grad_buffers()
    try:
        yield
    finally:
        for chunk in chunks:
            chunk.restore_grad_buffers()


def _copy_to_weight(shard: MasterShard, master: Tensor) -> None:
    shard.parameter.detach().view(-1)[shard.start : shard.start + shard.master.numel()].copy_(master)
