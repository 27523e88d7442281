"""How tools put text before the agent: two styles of answer, and a cap that keeps head and tail."""

from __future__ import annotations

from typing import Literal

Style = Literal["full", "concise"]
"""``full`` answers in sentences, as R2E-Gym's tools do; ``concise`` in as few tokens as can be."""

MAX_CHARS = 10_000
"""Characters one answer may hold unless told otherwise."""

DOS = "\r\n"
_NOTE_ROOM = 60


def clip(text: str, limit: int = MAX_CHARS) -> str:
    """``text`` in at most ``limit`` characters: its head and its tail, with a note of what was left out between them.

    ``limit`` is at least 100, so that the note has room.
    """
    if limit < 100:
        raise ValueError(f"a limit of {limit} characters leaves no room for the note; 100 is the least")
    if len(text) <= limit:
        return text
    kept = limit - _NOTE_ROOM
    head, tail = (kept + 1) // 2, kept // 2
    return f"{text[:head]}\n[... {len(text) - kept} characters left out ...]\n{text[-tail:]}"


def split_lines(text: str) -> list[str]:
    """The lines of ``text`` as grep and sed count them: only a newline ends a line."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return lines


def line_end(text: str) -> str:
    """What ends the lines of ``text``: ``DOS`` where that ends each of them, else a newline."""
    return DOS if 0 < text.count(DOS) == text.count("\n") else "\n"


def with_line_ends(text: str, end: str) -> str:
    """``text`` with the line ends of a file that has DOS's; for another it stays as it is."""
    return text.replace(DOS, "\n").replace("\n", DOS) if end == DOS else text


def number_lines(lines: list[str], first: int = 1) -> str:
    """``lines`` as ``cat -n`` prints them, the first one numbered ``first``."""
    return "\n".join(f"{number:6d}\t{line}" for number, line in enumerate(lines, first))
