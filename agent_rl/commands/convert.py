"""``agent-rl convert``: an fp8 or mxfp4 checkpoint to bfloat16. Prints its progress."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path

import typer

from agent_rl.errors import UserError
from agent_rl.models.hub import fetch_model


def run_convert(source: Path, target: Path) -> None:
    """Convert ``source`` to ``target``. SIGTERM stops it as Ctrl-C does. Raises UserError, one line."""
    if importlib.util.find_spec("torch") is None:
        raise UserError("convert needs torch; run `agent-rl install trainer`")
    from agent_rl.train.quantized.convert import Conversion, Reporter

    conversion = Conversion.plan(fetch_model(source, "convert"), target)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if done := len(conversion.shards) - len(conversion.missing()):
        typer.echo(f"resuming: {done} of {len(conversion.shards)} files are written")
    reporter = Reporter(typer.echo)
    conversion.run(reporter.progress, reporter.report)
    typer.echo(f"{reporter.line()}; wrote {target}")
