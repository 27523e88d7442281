"""A Python file with its syntax tree, in which text is replaced by position, so that the rest keeps its form.

Positions are bytes, as in syntax trees, so the text also keeps its form for other versions of Python.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Change = tuple[int, int, str]
"""Start, end and new text."""

OPPOSITE: Mapping[type[ast.cmpop], str] = {
    **{ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not"},
    **{ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"},
}
"""The comparison that holds exactly where another one does not."""


@dataclass(frozen=True)
class SourceText:
    """A Python file."""

    content: bytes

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree, empty for a file that this Python cannot parse or whose lines it counts differently."""
        try:
            return ast.parse(self.content) if b"\r" not in self.content.replace(b"\r\n", b"") else ast.Module([], [])
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return ast.Module([], [])

    @cached_property
    def line_starts(self) -> Sequence[int]:
        """The position of each line, and the end of the file."""
        return [0, *(match.end() for match in re.finditer(rb"\n", self.content)), len(self.content)]

    def span(self, node: Any) -> tuple[int, int]:
        """The start and end of a node."""
        return (
            self.line_starts[node.lineno - 1] + node.col_offset,
            self.line_starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def text(self, start: int, end: int) -> str:
        return self.content[start:end].decode()

    def segment(self, node: Any) -> str:
        """The text of a node."""
        return self.text(*self.span(node))

    def operator(self, left: ast.expr, right: ast.expr) -> tuple[int, int] | None:
        """The place of the operator between two operands, or None if a comment or the end of a line is beside it."""
        start, end = self.span(left)[1], self.span(right)[0]
        between = self.content[start:end]
        start += len(between) - len(between.lstrip(b" \t)"))
        end -= len(between) - len(between.rstrip(b" \t("))
        return None if end <= start or set(b"\n#\\") & set(self.content[start:end]) else (start, end)


def first_line(function: FunctionNode) -> int:
    """The first line of a function with its decorators."""
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])


def body_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function's body in the order of the text, without functions, classes and f-strings inside it."""
    pending = list(getattr(function, "body", ()))
    while pending:
        node = pending.pop(0)
        if not isinstance(node, FunctionNode | ast.ClassDef | ast.JoinedStr):
            yield node
            pending += ast.iter_child_nodes(node)


def edited(block: bytes, changes: Iterable[Change], start: int = 0) -> bytes:
    """``block``, which begins at byte ``start`` of its file, with texts replaced."""
    parts, at = [], start
    for begin, end, text in sorted(changes):
        parts += [block[at - start : begin - start], text.encode()]
        at = end
    return b"".join([*parts, block[at - start :]])
