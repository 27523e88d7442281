"""Holds back a sandbox whose output costs the host too much CPU time to take: pipes that nobody empties make it
wait."""

from __future__ import annotations

import threading
import time

_SHARE = 0.04
"""Of the sandbox's own CPU limit. Estimates may be off by a factor of two before a sandbox costs the host a tenth of
it."""
_SAVINGS = 0.25
"""CPU seconds of the host that a sandbox may cost at once: a long log passes without a wait, a flood soon has to."""


class Toll:
    """What taking one sandbox's output may cost: a share of its CPU limit, all its commands together. Thread-safe."""

    def __init__(self, cpus: float) -> None:
        self._rate = _SHARE * cpus
        self._left = _SAVINGS
        self._at = time.monotonic()
        self._lock = threading.Lock()

    def wait_after(self, cost: float) -> float:
        """Seconds to wait after output that took the host ``cost`` CPU seconds."""
        with self._lock:
            now = time.monotonic()
            self._left = min(_SAVINGS, self._left + (now - self._at) * self._rate) - cost
            self._at = now
            return max(0.0, -self._left / self._rate)
