"""How an attack of the suite says what it tried and what stopped it (shown by ``pytest -m redteam -rP``)."""

from __future__ import annotations


def held(attack: str, stopped_by: object) -> None:
    """Say that ``attack`` failed, and what stopped it: a message, an error, or what the attacker got instead."""
    print(f"tried: {attack}\n  stopped by: {stopped_by}")
