"""``agent-rl convert``: an fp8 or mxfp4 checkpoint to bfloat16. Prints its progress."""

from __future__ import annotations

import importlib.util
import signal
import time
from pathlib import Path

import typer

from agent_rl.errors import UserError
from agent_rl.models.hub import fetch_model
from agent_rl.train.hf_index import LoadProgress

GIB = 1 << 30
REPORT_SECONDS = 10.0


def run_convert(source: Path, target: Path) -> None:
    """Convert ``source`` to ``target``. SIGTERM stops it as Ctrl-C does. Raises UserError, one line."""
    if importlib.util.find_spec("torch") is None:
        raise UserError("convert needs torch; run `agent-rl install trainer`")
    from agent_rl.train.quantized.convert import Conversion

    conversion = Conversion.plan(fetch_model(source, "convert"), target)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if done := len(conversion.shards) - len(conversion.missing()):
        typer.echo(f"resuming: {done} of {len(conversion.shards)} files are written")
    reporter = Reporter()
    conversion.run(reporter.progress, reporter.report)
    typer.echo(f"{reporter.line()}; wrote {target}")


class Reporter:
    """Prints a line of progress every REPORT_SECONDS."""

    def __init__(self) -> None:
        self.progress = LoadProgress()
        self._started = self._printed = time.monotonic()

    def report(self) -> None:
        if (now := time.monotonic()) - self._printed >= REPORT_SECONDS:
            self._printed = now
            typer.echo(self.line())

    def line(self) -> str:
        read, needed = self.progress.read, self.progress.needed
        rate = read / max(time.monotonic() - self._started, 1e-9)
        return f"converted {read / GIB:.2f} of {needed / GIB:.2f} GiB, {rate / GIB:.2f} GiB/s"
