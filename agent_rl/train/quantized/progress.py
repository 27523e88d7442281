"""Lines with the progress of a conversion."""

from __future__ import annotations

import time
from collections.abc import Callable

from agent_rl.train.hf_index import LoadProgress

GIB = 1 << 30
REPORT_SECONDS = 10.0


class Reporter:
    """Prints a line of progress every REPORT_SECONDS."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self.progress = LoadProgress()
        self._print_line = print_line
        self._started = self._printed = time.monotonic()

    def report(self) -> None:
        if (now := time.monotonic()) - self._printed >= REPORT_SECONDS:
            self._printed = now
            self._print_line(self.line())

    def line(self) -> str:
        read, needed = self.progress.read, self.progress.needed
        rate = read / max(time.monotonic() - self._started, 1e-9)
        return f"converted {read / GIB:.2f} of {needed / GIB:.2f} GiB, {rate / GIB:.2f} GiB/s"
