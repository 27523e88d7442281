"""Mutates one expression of existing code, with the bug families of the generated tasks (``envs.mini.FAMILIES``).

Each family proposes replacements for a node of the syntax tree. The rest of the file's text stays unchanged.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from envs.swe.source_text import OPPOSITE, FunctionNode, SourceText, body_nodes, edited, first_line

_ORDERS: Mapping[type[ast.cmpop], tuple[tuple[str, str], ...]] = {
    ast.Lt: (("<=", "boundary"), (">", "flipped_comparison")),
    ast.Gt: ((">=", "boundary"), ("<", "flipped_comparison")),
    ast.LtE: (("<", "boundary"), (">=", "flipped_comparison")),
    ast.GtE: ((">", "boundary"), ("<=", "flipped_comparison")),
}
_ARITHMETIC: Mapping[type[ast.operator], str] = {
    **{ast.Add: "-", ast.Sub: "+", ast.Mult: "+"},
    **{ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "*"},
}
_BUILTINS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}


@dataclass(frozen=True, slots=True)
class Bug:
    """One mutation: ``function`` is the first line and the name of its function, ``source`` the mutated file."""

    family: str
    function: tuple[int, str]
    source: str


@dataclass(frozen=True, slots=True)
class InjectionSite:
    """One position of a file (``line`` and ``column``) with all its possible bugs."""

    line: int
    column: int
    bugs: tuple[Bug, ...]


_Span = tuple[int, int, tuple[tuple[str, str], ...]]
"""A part of one line of a file, by its start and end in bytes, and its possible replacements (text, family)."""


def injection_sites(source: str) -> list[InjectionSite]:
    """The injection sites inside the functions of a Python file. Empty if the file does not parse."""
    text = SourceText(source.encode(errors="surrogatepass"))
    return [
        _site(text, span, function)
        for function in ast.walk(text.tree)
        if isinstance(function, FunctionNode)
        for span in _spans(function, text)
    ]


def _site(text: SourceText, span: _Span, function: FunctionNode) -> InjectionSite:
    start, end, choices = span
    location = first_line(function), function.name
    bugs = [
        Bug(family, location, edited(text.content, [(start, end, new)]).decode())
        for new, family in choices
        if new != text.text(start, end)
    ]
    line = text.content.count(b"\n", 0, start) + 1
    return InjectionSite(line, start - text.line_starts[line - 1], tuple(filter(_compiles, bugs)))


def _compiles(bug: Bug) -> bool:
    try:
        compile(bug.source, "bug", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _spans(function: FunctionNode, text: SourceText) -> Iterator[_Span]:
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args) if argument.arg != "self"]
    for value in filter(None, [*function.args.defaults, *function.args.kw_defaults]):
        yield from _replacement(value, text, _other_constants(value, "wrong_default"))
    for node in body_nodes(function):
        for family in _FAMILIES:
            yield from family(node, text)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Name) and node.value.id in names:
            others = tuple((name, "wrong_variable") for name in names if name != node.value.id)[:2]
            yield from _replacement(node.value, text, others)


def _replacement(node: ast.expr, text: SourceText, choices: tuple[tuple[str, str], ...]) -> Iterator[_Span]:
    if choices and node.lineno == node.end_lineno:
        yield *text.span(node), choices


def _operator(left: ast.expr, right: ast.expr, text: SourceText, *choices: tuple[str, str]) -> Iterator[_Span]:
    if choices and (place := text.operator(left, right)):
        yield *place, choices


def _comparisons(node: ast.AST, text: SourceText) -> Iterator[_Span]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        kind = type(node.ops[0])
        choices = [(OPPOSITE[kind], "flipped_comparison")] if kind in OPPOSITE else _ORDERS[kind]
        yield from _operator(node.left, node.comparators[0], text, *choices)


def _arithmetic(node: ast.AST, text: SourceText) -> Iterator[_Span]:
    if isinstance(node, ast.BinOp) and not _is_text(node.left) and not _is_text(node.right):
        if isinstance(node.op, ast.Add | ast.Sub) and _number(node.right) is not None:
            start, end = text.span(node.left)[1], text.span(node)[1]
            if not set("\n()#") & set(text.text(start, end)):  # the `` + 1`` after a name
                yield start, end, (("", "off_by_one"),)
        if other := _ARITHMETIC.get(type(node.op)):
            yield from _operator(node.left, node.right, text, (other, "wrong_operator"))


def _booleans(node: ast.AST, text: SourceText) -> Iterator[_Span]:
    if isinstance(node, ast.BoolOp):
        other = "or" if isinstance(node.op, ast.And) else "and"
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from _operator(left, right, text, (other, "boolean_operator"))


def _conditions(node: ast.AST, text: SourceText) -> Iterator[_Span]:
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare):
        if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
            yield from _replacement(node.test, text, ((text.segment(node.test.operand), "negated_condition"),))
        elif isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
            yield from _replacement(node.test, text, ((f"not {text.segment(node.test)}", "negated_condition"),))


def _calls(node: ast.AST, text: SourceText) -> Iterator[_Span]:
    if not isinstance(node, ast.Call):
        return
    if isinstance(node.func, ast.Name) and (other := _BUILTINS.get(node.func.id)) and node.args:
        yield from _replacement(node.func, text, ((other, "wrong_builtin"),))
    if isinstance(node.func, ast.Name) and node.func.id == "range" and len(node.args) == 1:
        yield from _replacement(node.args[0], text, ((f"{text.segment(node.args[0])} - 1", "off_by_one"),))
    if len(node.args) == 2 and not node.keywords and not any(isinstance(arg, ast.Starred) for arg in node.args):
        first, second = node.args
        if first.lineno == second.end_lineno and text.segment(first) != text.segment(second):
            (start, comma), (after, end) = text.span(first), text.span(second)
            swapped = f"{text.segment(second)}{text.text(comma, after)}{text.segment(first)}"
            yield start, end, ((swapped, "swapped_arguments"),)


def _returns(node: ast.AST, text: SourceText) -> Iterator[_Span]:
    if isinstance(node, ast.Return) and node.value is not None and node.lineno == node.end_lineno:
        if isinstance(node.value, ast.Call | ast.Name | ast.Attribute | ast.BinOp):
            yield *text.span(node), ((text.segment(node.value), "missing_return"),)
        yield from _replacement(node.value, text, _other_constants(node.value, "wrong_constant"))


def _initials(node: ast.AST, text: SourceText) -> Iterator[_Span]:
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        yield from _replacement(node.value, text, _other_constants(node.value, "wrong_initial"))


def _indices(node: ast.AST, text: SourceText) -> Iterator[_Span]:
    if not isinstance(node, ast.Subscript):
        return
    if isinstance(node.slice, ast.Slice):
        for bound in (node.slice.lower, node.slice.upper):
            if bound is not None and (number := _number(bound)) is not None:
                yield from _replacement(bound, text, ((str(number + 1), "off_by_one"),))
    elif (number := _number(node.slice)) is not None:
        yield from _replacement(node.slice, text, ((str(number + 1 if number >= 0 else number - 1), "wrong_index"),))


_FAMILIES = (_comparisons, _arithmetic, _booleans, _conditions, _calls, _returns, _initials, _indices)


def _other_constants(node: ast.expr, family: str) -> tuple[tuple[str, str], ...]:
    """Other constants of the same type: the next number, or the other truth value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return ((str(not node.value), family),)
    number = _number(node)
    return () if number is None else ((str(number + 1), family),)


def _number(node: ast.expr) -> int | None:
    """The value of a literal integer, with its sign."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool):
        return node.value
    return None


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
