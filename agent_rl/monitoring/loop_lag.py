"""Measures the delay of the event loop. Blocking work on the loop delays every episode."""

from __future__ import annotations

import asyncio

import numpy as np

INTERVAL = 0.05
"""Seconds between two measurements."""


class LoopLag:
    """``delays``: measured delays in seconds since the last call of :meth:`metrics`."""

    def __init__(self, interval: float = INTERVAL) -> None:
        self._interval = interval
        self.delays: list[float] = []

    async def watch(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._interval
            await asyncio.sleep(self._interval)
            self.delays.append(loop.time() - due)

    def metrics(self) -> dict[str, float]:
        """``loop/*`` since the last call; empty if there is no measurement."""
        delays, self.delays = self.delays, []
        return {"loop/lag_p99_ms": 1e3 * float(np.quantile(delays, 0.99))} if delays else {}
