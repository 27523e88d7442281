"""A scanner for text formats whose values stand between an opening and a closing tag.

Each search starts where the one before ended, and a tag without an end stops the scan, so the time is linear in the
text. A regular expression with ``.*?`` looks for the same missing end once for every opening tag.
"""

from __future__ import annotations

import re
from collections.abc import Iterator


def elements(text: str, opening: re.Pattern[str], closing: str) -> Iterator[tuple[str, str]]:
    """The name and the text of each element, none of which lies in another. ``opening`` has a group for the name, and
    itself takes linear time."""
    position = 0
    while (opened := opening.search(text, position)) is not None:
        end = text.find(closing, opened.end())
        if end < 0:
            return
        yield opened[1], text[opened.end() : end]
        position = end + len(closing)


def through_last(text: str, character: str) -> str:
    """``text`` up to its last ``character``. In what is left ``[^>]+>`` finds its end from wherever it starts."""
    return text[: text.rfind(character) + 1]
