"""The command line. Heavy imports come after the arguments are parsed, so that ``--help`` answers at once."""

from agent_rl.cli.root import app, main

__all__ = ["app", "main"]
