"""Optimizer state that lies in host memory between updates (``train.offload_optimizer``). Needs torch and Megatron.

::

    an update, parameter by parameter    host ── master, moments ──> device ── Adam ──> weight
                                         host <───────────────────── device

Adam runs where and as it would without, so no number changes; a device holds the state of one parameter at a time. What
remains of Megatron's float32 masters there is their shape, which gradients are attached to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agent_rl.train.host_copies import host_tensor


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


class HostState:
    """The state of one of Megatron's optimizers on the host: ``slots[i]`` of ``held[i]``, flat float32 by name, as
    :class:`agent_rl.train.optimizer.StateShard` has them."""

    def __init__(self, adam: Any, held: Sequence[Held], moments: Sequence[str]) -> None:
        """Of torch's ``adam``, or Transformer Engine's or Apex's. Moments begin as zeros; the masters' memory on the
        device is freed."""
        self._inner, self.held, self._moments = adam, tuple(held), tuple(moments)
        self._own = [one.own for one in held]
        sizes = [
            one.master.numel() for one, own in zip(held, self._own, strict=True) for _ in range(own + len(moments))
        ]
        pinned = any(one.master.is_cuda for one in held)
        places = iter(host_tensor(sum(sizes), torch.float32, pinned=pinned).zero_().split(sizes))
        self.slots: list[Mapping[str, Tensor]] = []
        for one, own in zip(self.held, self._own, strict=True):
            master = next(places).copy_(one.master.detach().view(-1)) if own else one.master.detach().view(-1)
            self.slots.append({"master": master, **{name: next(places) for name in self._moments}})
        for index in range(len(self.held)):
            self._leave(index)
        add_counts(adam)

    @torch.no_grad()
    def step(self) -> None:
        """Adam's update of every parameter that has a gradient, and the weights that follow from it."""
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
                self._keep(place)
        self._inner.param_groups = groups

    def spread(self) -> None:
        """Make the weights those of the masters."""
        for one, slots in zip(self.held, self.slots, strict=True):
            _copy_to_weight(one, slots["master"])

    def _fetch(self, place: int) -> None:
        """The state of one parameter onto its device."""
        one, slots = self.held[place], self.slots[place]
        if self._own[place]:
            one.master.data = slots["master"].to(one.master.device, copy=True).view(one.master.shape)
        self._inner.state[one.master].update(
            {name: slots[name].to(one.master.device, copy=True).view(one.master.shape) for name in self._moments}
        )

    def _keep(self, place: int) -> None:
        """What an update left of it back to the host, and into the weight."""
        one, slots = self.held[place], self.slots[place]
        state = self._inner.state[one.master]
        for name in self._moments:
            slots[name].copy_(state[name].view(-1))
        if self._own[place]:
            slots["master"].copy_(one.master.detach().view(-1))
            _copy_to_weight(one, one.master.detach().view(-1))
        self._leave(place)

    def _leave(self, place: int) -> None:
        """Let go of what is on the device: a master keeps its shape and one element, moments are the host's."""
        one, slots = self.held[place], self.slots[place]
        if self._own[place]:
            one.master.data = one.master.new_zeros(1).expand(one.master.shape)
        self._inner.state[one.master].update({name: slots[name].view(one.master.shape) for name in self._moments})


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
