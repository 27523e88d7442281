"""How late the event loop wakes: whatever is computed on it in one piece holds up every episode for so long."""

from __future__ import annotations

import asyncio

import numpy as np

EVERY = 0.05
"""Seconds from one look to the next."""


class LoopLag:
    """``late``: the seconds by which each look came too late, since :meth:`metrics` was last asked; the next comes
    ``every`` so many seconds."""

    def __init__(self, every: float = EVERY) -> None:
        self._every = every
        self.late: list[float] = []

    async def watch(self) -> None:
        """Look until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._every
            await asyncio.sleep(self._every)
            self.late.append(loop.time() - due)

    def metrics(self) -> dict[str, float]:
        """``loop/*`` since this was last asked; none where nothing was measured."""
        late, self.late = self.late, []
        return {"loop/lag_p99_ms": 1e3 * float(np.quantile(late, 0.99))} if late else {}
