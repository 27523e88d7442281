"""The attacks of this suite: their texts, and their output, which ``pytest -m redteam -rP`` shows."""

from __future__ import annotations

import re
from pathlib import Path


def read_attacks(path: Path) -> tuple[str, dict[str, str]]:
    """The common text and the attacks by name, from a file with a line ``[name]`` above each of them."""
    name = r"^\[(common|[a-z][^\[\]]* [^\[\]]*)\]\n"
    _, *parts = re.split(name, path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    attacks = dict(zip(parts[::2], parts[1::2], strict=True))
    return attacks.pop("common"), attacks


def report_stopped(attack: str, stopped_by: object) -> None:
    """Print that ``attack`` failed, and the message, error or result that stopped it."""
    print(f"tried: {attack}\n  stopped by: {stopped_by}")
