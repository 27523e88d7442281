"""The router-shift ratio of RSPO (arXiv 2510.23027): how far the router has moved at the experts that a token used.

With the router's probabilities r of the old and r' of the current policy, over the K experts that the token used in
each of L layers::

    gamma = exp( - mean over layers and experts of | log r'(expert) - log r(expert) | )

The experts are replayed in both passes, so both see the same ones. Axes: ``T`` tokens, ``L`` layers, ``K`` experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from agent_rl.train.megatron.gate import Gate

GATES = "gates"
"""The old policy's log-probabilities ``[T, L, K]`` among the extras of a batch."""


@contextmanager
def recorded_gates(chunk: Any) -> Iterator[list[Tensor]]:
    """The log-probabilities ``[T, K]`` of the experts that each layer used within the block, in the order of layers."""
    gates = [module for module in chunk.modules() if isinstance(module, Gate) and module.router_replay is not None]
    recorded: list[Tensor] = []
    for gate in gates:
        gate.recorded = recorded
    try:
        yield recorded
    finally:
        for gate in gates:
            gate.recorded = None


def log_router_shift(old_TLK: Tensor, new_TLK: Tensor, present: Tensor | None = None) -> Tensor:
    """``log gamma`` ``[T]``, at most 0, of the token that each row predicts, the next one. ``present`` bool ``[T]`` or
    ``[T, L]``: where the experts were given; elsewhere the router has not moved."""
    distance_TL = (new_TLK - old_TLK).abs().mean(-1)
    if present is not None:
        distance_TL = torch.where(present if present.ndim == 2 else present[:, None], distance_TL, 0.0)
    return -distance_TL.mean(-1).roll(1)
