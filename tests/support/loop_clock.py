"""An event loop's clock that a test puts forward, so that bounds of minutes are tried in milliseconds."""

from __future__ import annotations

import asyncio


class LoopClock:
    """The running event loop's clock: what it has due by the new time happens as if that time had passed."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._ahead, real = 0.0, loop.time
        loop.time = lambda: real() + self._ahead  # type: ignore[method-assign]

    async def put_forward(self, seconds: float) -> None:
        self._ahead += seconds
        await asyncio.sleep(0.01)
