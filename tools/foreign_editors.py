"""What the editors of R2E-Gym and OpenHands have in common: both are variants of one ``str_replace_editor``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MAX_FILE_BYTES = 16 << 20
PATH_KIND = 'if [ -d "$1" ]; then echo folder; elif [ -e "$1" ]; then echo file; else echo nothing; fi'
OVERWRITE = 'LC_ALL=C; cat > "$1"'

NumberLines = Callable[[str, str, int], str]
"""Renders lines with their numbers: their text, a label, the number of the first line."""

_CONTEXT_LINES = 4
_CLIPPED = (
    "<response clipped><NOTE>To save on context only part of this file has been shown to you. You should retry this "
    "tool after you have searched inside the file with `grep -n` in order to find the line numbers of what you are "
    "looking for.</NOTE>"
)


def clip_head(text: str, max_chars: int) -> str:
    """The first ``max_chars`` characters of ``text``, and a note if there are more."""
    return text if len(text) <= max_chars else text[:max_chars] + _CLIPPED


def printable(text: str) -> str:
    """``text`` with U+FFFD for bytes that were not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def number_lines(text: str, label: str, first: int = 1) -> str:
    """``text`` as ``cat -n`` prints it, the first line numbered ``first``."""
    numbered = "\n".join(f"{number:6}\t{line}" for number, line in enumerate(text.expandtabs().split("\n"), first))
    return f"Here's the result of running `cat -n` on {label}:\n{numbered}\n"


def describe_replacement(path: str, text: str, old: str, new: str, number: NumberLines) -> str:
    """The observation after the one ``old`` in ``text`` became ``new``: the changed lines with their context."""
    line = text.split(old)[0].count("\n")
    first = max(0, line - _CONTEXT_LINES)
    lines = text.replace(old, new).split("\n")[first : line + _CONTEXT_LINES + new.count("\n") + 1]
    snippet = number("\n".join(lines), f"a snippet of {path}", first + 1)
    note = "Review the changes and make sure they are as expected. Edit the file again if necessary."
    return f"The file {path} has been edited. {snippet}{note}"


def describe_insertion(path: str, lines: Sequence[str], line: int, new: str, number: NumberLines) -> str:
    """The observation after ``new`` was inserted behind the first ``line`` of ``lines``."""
    shown = [*lines[max(0, line - _CONTEXT_LINES) : line], *new.split("\n"), *lines[line : line + _CONTEXT_LINES]]
    snippet = number("\n".join(shown), "a snippet of the edited file", max(1, line - _CONTEXT_LINES + 1))
    note = (
        "Review the changes and make sure they are as expected (correct indentation, no duplicate lines, etc). "
        "Edit the file again if necessary."
    )
    return f"The file {path} has been edited. {snippet}{note}"
