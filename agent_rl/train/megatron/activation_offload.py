"""Inputs of layers that lie in host memory until the backward pass (``train.offload_activations``).

With full recomputation they are all that a pass keeps of a layer. Copies are put into the GPU's queue between the
layers' work, and the host waits for none. Megatron 0.16.1 has two ways of its own: ``cpu_offloading`` refuses
recomputation, and ``fine_grained_activation_offloading`` is for parts of layers that are not run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agent_rl.train.pinned_memory import host_tensor

Kept = tuple[Tensor, torch.Size, torch.device]
"""The memory that an input is in, its shape, and where it was."""


def keep_inputs_on_host(modules: Sequence[Any]) -> None:
    """From now on, of Megatron's models with full recomputation."""
    memory = HostInputs()
    for module in modules:
        _hook(module.decoder, memory)


def _hook(block: Any, memory: HostInputs) -> None:
    checkpointed = block._checkpointed_forward

    def forward(*args: Any, **options: Any) -> Any:
        # Layers save nothing within: their operations run without gradients here, and again in the backward pass.
        with torch.autograd.graph.saved_tensors_hooks(memory.keep, memory.fetch):
            return checkpointed(*args, **options)

    block._checkpointed_forward = forward


class HostInputs:
    """Memory of the host, locked where a GPU copies to it, that is used again pass after pass. All copies are in one
    queue, so memory can be given on as soon as its copy back is in it."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def keep(self, tensor: Tensor) -> Kept:
        """Copy it; memory that is too small for it is given up."""
        memory = self._free.pop() if self._free else None
        if memory is None or memory.numel() < tensor.numel() or memory.dtype != tensor.dtype:
            memory = host_tensor(tensor.numel(), tensor.dtype, pinned=tensor.is_cuda)
        memory[: tensor.numel()].view(tensor.shape).copy_(tensor, non_blocking=True)
        return memory, tensor.shape, tensor.device

    def fetch(self, kept: Kept) -> Tensor:
        """What was kept, once."""
        memory, shape, device = kept
        tensor = memory[: shape.numel()].view(shape).to(device, copy=True, non_blocking=True)
        self._free.append(memory)
        return tensor
