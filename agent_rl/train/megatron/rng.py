"""The random state of one rank: everything that could draw a number in training."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker


def rng_state(device: str) -> dict[str, Any]:
    """Copies of the states of torch, numpy, Python and Megatron's tracker; what ``torch.load`` reads weights-only."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if device == "cuda" else None,
        "numpy": (kind, torch.from_numpy(np.asarray(keys, np.int64)), position, has_gauss, cached),
        "python": random.getstate(),
        "megatron": {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()},
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore what :func:`rng_state` gave."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    random.setstate(state["python"])
    get_cuda_rng_tracker().set_states(state["megatron"])
