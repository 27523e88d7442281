"""Which lines of a Python file R2E-Gym's editor leaves out: ``_get_elided_lines`` in its ``tools/file_editor.py``."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator

_SHORTEST_BODY = 3  # a body is left out where its last line is at least so many after its first
_SHORTEST_DOCSTRING = 4


def condensed(text: str, name: str) -> list[tuple[int, str]]:
    """The lines that are kept, each with its number from 0, and a note in the place of those left out.

    Raises SyntaxError, which names the file ``name``, ValueError for text with a null byte, and MemoryError or
    RecursionError for text that is nested too deeply for Python's parser.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(text, filename=name)
    spans = list(_spans(tree))
    hidden = {line for first, last in spans for line in range(first, last + 1)}
    notes = [(first, f"... eliding lines {first + 1}-{last + 1} ...") for first, last in spans]
    kept = [(at, line) for at, line in enumerate(text.splitlines()) if at not in hidden]
    return sorted(notes + kept, key=lambda line: line[0])


def _spans(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """First and last line, from 0, of each longer function body, and of the inside of each longer class docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first, last = node.body[0].lineno - 1, _end(node.body[-1])
            if last - first >= _SHORTEST_BODY:
                yield first, last
        elif isinstance(node, ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
            first, last = node.body[0].lineno - 1, _end(node.body[0])
            if last - first >= _SHORTEST_DOCSTRING:
                yield first + 1, last - 1


def _end(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - 1
