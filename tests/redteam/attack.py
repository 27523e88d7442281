"""Output of the attacks of this suite, shown by ``pytest -m redteam -rP``."""

from __future__ import annotations


def report_stopped(attack: str, stopped_by: object) -> None:
    """Print that ``attack`` failed, and the message, error or result that stopped it."""
    print(f"tried: {attack}\n  stopped by: {stopped_by}")
