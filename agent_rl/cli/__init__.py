"""The command line. Commands import heavy modules when they run, so that ``--help`` stays fast."""

from agent_rl.cli.root import app, main

__all__ = ["app", "main"]
