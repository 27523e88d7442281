"""The weights of an engine after an adapter update, and the adapter format that trainer and engine share
(:mod:`agent_rl.engine.server.lora_merge`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from agent_rl.engine.server.lora_merge import SUFFIX, BaseWeights, merge, pack
from agent_rl.models.families import keeps_float32
from agent_rl.weight_sync.digests import Digests
from agent_rl.weight_sync.served import engine_order

__all__ = ["SUFFIX", "BaseWeights", "add_merged", "merge", "pack"]


def add_merged(digests: Digests, base: BaseWeights, changes: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Add to ``digests`` the weights, in ``dtype``, of an engine that started with ``base`` and received ``changes``
    (by the names of the transfer)."""
    for name in sorted(base.names, key=engine_order):
        change = changes.get(name + SUFFIX)
        sent = (name, base[name]) if change is None else (name + SUFFIX, change.cpu())
        ((_, weight),) = base.merged([sent])
        loaded = weight.to(torch.float32 if keeps_float32(name) else dtype)
        data = loaded.contiguous().view(-1).view(torch.uint8).numpy()
        digests.add([name], [tuple(weight.shape)], loaded.dtype.itemsize, data)
