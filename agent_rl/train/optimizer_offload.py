"""Optimizer state that lies in host memory between updates (``train.offload_optimizer``), or has its moments in
bfloat16 (``train.optimizer_moments``). Needs torch and Megatron.

::

    an update, parameter by parameter    host ── master, moments ──> device ── Adam ──> weight
                                         host <───────────────────── device

Adam runs where and as it would without, in float32: offloaded, no number changes; a device holds the float32 state of
one parameter at a time. What remains of Megatron's float32 masters there is their shape, which gradients are attached
to.

Moments in bfloat16 have 8 bits, and with a beta2 of 0.999 an update changes the second by a thousandth: rounded to the
nearest it would stand still. So the point at which a number is rounded up walks through all places between two numbers
of bfloat16, by the golden ratio from update to update: over some updates rounding takes nothing away and adds nothing.
It depends on the count of updates alone, so a run that is resumed rounds as it would have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agent_rl.train.pinned_memory import host_tensor

_GOLDEN = round((1 << 16) * (5**0.5 - 1) / 2)
"""Multiples of it, modulo 2**16, come near every number, the first ones already (Weyl)."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What an optimizer keeps of one parameter: ``master`` (what Adam updates) is elements ``[start, ...)`` of the
    flattened ``parameter``. It is the parameter's own memory where that is float32."""

    parameter: torch.nn.Parameter
    start: int
    master: Tensor

    @property
    def own(self) -> bool:
        """Whether the master is memory of its own."""
        return self.master.untyped_storage()._cdata != self.parameter.untyped_storage()._cdata


class KeptState:
    """The state of one of Megatron's optimizers as it lies between updates: ``slots[i]`` of ``held[i]``, flat, by name,
    as :class:`agent_rl.train.optimizer.StateShard` has them."""

    def __init__(
        self,
        adam: Any,
        held: Sequence[Held],
        moments: Sequence[str],
        *,
        offload: bool = True,
        precision: torch.dtype = torch.float32,
    ) -> None:
        """Of torch's ``adam``, or Transformer Engine's or Apex's. Moments begin as zeros. ``offload``: the host has all
        of it, and the masters' memory on the device is freed. ``precision``: the moments'."""
        self._inner, self.held, self._moments = adam, tuple(held), tuple(moments)
        self._moved = [offload and one.own for one in held]
        sizes = [one.master.numel() for one in held]
        moved = [size for size, moves in zip(sizes, self._moved, strict=True) if moves]
        masters = _places(held, moved, torch.float32, offload=offload)
        kept = _places(held, [size for size in sizes for _ in moments], precision, offload=offload)
        self.slots: list[Mapping[str, Tensor]] = []
        for one, moves in zip(self.held, self._moved, strict=True):
            own = one.master.detach().view(-1)
            master = next(masters).copy_(own) if moves else own
            self.slots.append({"master": master, **{name: next(kept) for name in self._moments}})
        for index in range(len(self.held)):
            self._leave(index)
        add_counts(adam)

    @torch.no_grad()
    def step(self, updates: int) -> None:
        """Adam's update of every parameter that has a gradient, and the weights that follow from it; ``updates`` were
        made before."""
        index = {id(one.master): place for place, one in enumerate(self.held)}
        groups = self._inner.param_groups
        for group in groups:
            settings = dict(group)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                place = index[id(parameter)]
                self._fetch(place)
                self._inner.param_groups = [one := {**settings, "params": [parameter]}]
                self._inner.step()
                # Transformer Engine's Adam counts its updates in the group.
                group.update({key: value for key, value in one.items() if key == "step"})
                self._keep(place, updates)
        self._inner.param_groups = groups

    def spread(self) -> None:
        """Make the weights those of the masters."""
        for one, slots in zip(self.held, self.slots, strict=True):
            _copy_to_weight(one, slots["master"])

    def _fetch(self, place: int) -> None:
        """The state of one parameter onto its device, in float32."""
        one, slots = self.held[place], self.slots[place]
        device, shape = one.master.device, one.master.shape
        if self._moved[place]:
            one.master.data = slots["master"].to(device, copy=True).view(shape)
        self._inner.state[one.master].update(
            # In two steps: from host to device in one, torch would convert on the host.
            {name: slots[name].to(device, copy=True).float().view(shape) for name in self._moments}
        )

    def _keep(self, place: int, updates: int) -> None:
        """What an update left of it back to where it lies, and into the weight."""
        one, slots = self.held[place], self.slots[place]
        state = self._inner.state[one.master]
        for name in self._moments:
            slots[name].copy_(_rounded(state[name].view(-1), slots[name].dtype, updates))
        master = one.master.detach().view(-1)
        if self._moved[place]:
            slots["master"].copy_(master)
        if one.own:
            _copy_to_weight(one, master)
        self._leave(place)

    def _leave(self, place: int) -> None:
        """Let go of what is on the device for an update alone: a master that moved keeps its shape and one element."""
        one, slots = self.held[place], self.slots[place]
        if self._moved[place]:
            one.master.data = one.master.new_zeros(1).expand(one.master.shape)
        self._inner.state[one.master].update({name: slots[name].view(one.master.shape) for name in self._moments})


def _places(held: Sequence[Held], sizes: Sequence[int], dtype: torch.dtype, *, offload: bool) -> Iterator[Tensor]:
    """Zeros of so many numbers each, in one block: on the host, or with what is ``held``."""
    device = held[0].master.device if held else torch.device("cpu")
    if offload or not held:
        block = host_tensor(sum(sizes), dtype, pinned=device.type == "cuda").zero_()
    else:
        block = torch.zeros(sum(sizes), dtype=dtype, device=device)
    return iter(block.split(list(sizes)))


def _rounded(wide: Tensor, dtype: torch.dtype, updates: int) -> Tensor:
    """Float32 ``wide``, which is overwritten, in bfloat16, where that is ``dtype``: before the last 16 bits are cut
    off, a number below 2**16 is added that walks with ``updates``. A zero stays one."""
    if dtype == wide.dtype:
        return wide
    wide.view(torch.int32).add_(updates * _GOLDEN % (1 << 16)).bitwise_and_(-1 << 16)
    return wide.to(dtype)


def counts_by_parameter(adam: Any) -> bool:
    """Whether it counts its updates in each parameter's state, as torch's does; Transformer Engine's and Apex's count
    in their groups."""
    return type(adam).__module__.startswith("torch.")


def add_counts(adam: Any) -> None:
    """Begin the counts that torch's Adam wants of every parameter that has moments."""
    if counts_by_parameter(adam):
        for state in adam.state.values():
            state.setdefault("step", torch.tensor(0.0))


@contextmanager
def without_gradients(chunks: Sequence[Any]) -> Iterator[None]:
    """Inside, Megatron's model chunks have no memory for gradients: in its place Megatron makes the masters."""
    for chunk in chunks:
        chunk.offload_grad_buffers()
    try:
        yield
    finally:
        for chunk in chunks:
            chunk.restore_grad_buffers()


def _copy_to_weight(one: Held, master: Tensor) -> None:
    one.parameter.detach().view(-1)[one.start : one.start + one.master.numel()].copy_(master)
