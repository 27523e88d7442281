"""Text of tool results: two styles, a character limit that keeps head and tail, and line numbers.

Also a scanner for values between an opening and a closing tag. Each search starts at the end of the previous match, and
a tag without an end stops the scan, so the time is linear in the text. A regular expression with ``.*?`` would search
for the same missing end once for each opening tag.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

Style = Literal["full", "concise"]
"""``full``: results in sentences, as in R2E-Gym. ``concise``: results in as few tokens as possible."""

MAX_CHARS = 10_000
"""The default limit of a result, in characters."""

DOS = "\r\n"
_NOTE_CHARS = 60


def clip(text: str, limit: int = MAX_CHARS) -> str:
    """``text`` in at most ``limit`` characters: its head, a note on the omitted part, its tail.

    Raises ValueError for a ``limit`` below 100, which leaves no space for the note.
    """
    if limit < 100:
        raise ValueError(f"a limit of {limit} characters leaves no room for the note; 100 is the least")
    if len(text) <= limit:
        return text
    kept = limit - _NOTE_CHARS
    head, tail = (kept + 1) // 2, kept // 2
    return f"{text[:head]}\n[... {len(text) - kept} characters left out ...]\n{text[-tail:]}"


def split_lines(text: str) -> list[str]:
    """The lines of ``text`` as grep and sed count them: only ``\\n`` ends a line."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return lines


def line_end(text: str) -> str:
    """``DOS`` if it ends every line of ``text``, else a newline."""
    return DOS if 0 < text.count(DOS) == text.count("\n") else "\n"


def with_line_ends(text: str, end: str) -> str:
    """``text`` with DOS line ends if ``end`` is ``DOS``; else unchanged."""
    return text.replace(DOS, "\n").replace("\n", DOS) if end == DOS else text


def number_lines(lines: list[str], first: int = 1) -> str:
    """``lines`` as ``cat -n`` prints them, the first one numbered ``first``."""
    return "\n".join(f"{number:6d}\t{line}" for number, line in enumerate(lines, first))


def elements(text: str, opening: re.Pattern[str], closing: str) -> Iterator[tuple[str, str]]:
    """The name and the text of each element; elements do not nest. ``opening`` has a group for the name and must match
    in linear time."""
    position = 0
    while (opened := opening.search(text, position)) is not None:
        end = text.find(closing, opened.end())
        if end < 0:
            return
        yield opened[1], text[opened.end() : end]
        position = end + len(closing)


def through_last(text: str, character: str) -> str:
    """``text`` up to its last ``character``, so that a pattern such as ``[^>]+>`` always finds its end."""
    return text[: text.rfind(character) + 1]
