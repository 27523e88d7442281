"""Keep layer inputs in host memory until the backward pass (``train.offload_activations``).

With full recomputation a layer's input is all that a pass keeps of it. Copies are queued on the GPU between the layers,
and the host waits for none. Megatron 0.16.1 cannot do this: ``cpu_offloading`` refuses recomputation, and
``fine_grained_activation_offloading`` only covers parts of layers that are not recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agent_rl.train.host_memory import host_tensor

OffloadedTensor = tuple[Tensor, torch.Size, torch.device]
"""Host memory of an input, its shape, and its device."""


def offload_layer_inputs(modules: Sequence[Any]) -> None:
    """Offload the layer inputs of Megatron models with full recomputation."""
    memory = HostActivations()
    for module in modules:
        _hook(module.decoder, memory)


def _hook(block: Any, memory: HostActivations) -> None:
    checkpointed = block._checkpointed_forward

    def forward(*args: Any, **options: Any) -> Any:
        # The layers themselves save nothing here: their operations run without gradients until the backward pass.
        with torch.autograd.graph.saved_tensors_hooks(memory.store, memory.fetch):
            return checkpointed(*args, **options)

    block._checkpointed_forward = forward


class HostActivations:
    """A pool of host memory, pinned for a GPU, that every pass reuses. All copies are in one queue, so memory is free
    as soon as the copy back is queued."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def store(self, tensor: Tensor) -> OffloadedTensor:
        """Copy ``tensor`` to the host. A free block that is too small is dropped."""
        memory = self._free.pop() if self._free else None
        if memory is None or memory.numel() < tensor.numel() or memory.dtype != tensor.dtype:
            memory = host_tensor(tensor.numel(), tensor.dtype, pinned=tensor.is_cuda)
        memory[: tensor.numel()].view(tensor.shape).copy_(tensor, non_blocking=True)
        return memory, tensor.shape, tensor.device

    def fetch(self, stored: OffloadedTensor) -> Tensor:
        """Copy a stored tensor back to its device and free its host memory."""
        memory, shape, device = stored
        tensor = memory[: shape.numel()].view(shape).to(device, copy=True, non_blocking=True)
        self._free.append(memory)
        return tensor
