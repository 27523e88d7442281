"""A condensed view of a Python file: the bodies of longer functions left out."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_SHORT_BODY = 5  # a body of fewer lines is shown


def outline(lines: list[str]) -> str:
    """``lines`` numbered, function bodies of five lines or more replaced by a note; all of them if they don't parse."""
    hidden: dict[int, int] = {}
    for first, last in _long_bodies("\n".join(lines)):
        hidden.setdefault(first, last)
    shown = []
    number = 1
    while number <= len(lines):
        if number in hidden:
            shown.append(f"       ... lines {number}-{hidden[number]} left out ...")
            number = hidden[number] + 1
        else:
            shown.append(f"{number:6d}\t{lines[number - 1]}")
            number += 1
    return "\n".join(shown)


def _long_bodies(source: str) -> Iterator[tuple[int, int]]:
    """First and last line of each long function body, outer functions before those inside them."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # another Python's syntax, or no Python at all
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first, last = node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno
            if last - first + 1 >= _SHORT_BODY and first > node.lineno:
                yield first, last
