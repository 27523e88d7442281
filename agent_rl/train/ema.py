"""The exponential moving average of the trained weights (``train.ema``), for evaluation and export. Needs torch.

After each update, with the float32 master w of every weight that the rank holds::

    average <- decay * average + (1 - decay) * w          the first average is the starting weights

The average is in host memory, cut as the optimizer's state is, so no rank sends anything for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from agent_rl.train.host_memory import host_tensor

EMA = "ema"
"""The average's name among the tensors of a parameter's state."""


class WeightAverage:
    """``values``: the averages of ``masters``, flat, float32, in their order."""

    def __init__(self, masters: Sequence[Tensor], decay: float) -> None:
        self._decay, sizes = decay, [master.numel() for master in masters]
        block = host_tensor(sum(sizes), torch.float32, pinned=any(master.is_cuda for master in masters))
        self.values = block.split(sizes)
        for value, master in zip(self.values, masters, strict=True):
            value.copy_(master.view(-1))

    @torch.no_grad()
    def update(self, masters: Iterable[Tensor]) -> None:
        """Take the ``masters`` of an update into the average."""
        for value, master in zip(self.values, masters, strict=True):
            value.lerp_(master.view(-1).to("cpu"), 1.0 - self._decay)
