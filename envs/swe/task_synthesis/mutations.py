"""Mutates one expression of existing code, with the bug families of the generated tasks (``envs.mini.FAMILIES``).

Each family proposes replacements for a node of the syntax tree. The rest of the file's text stays unchanged.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

_COMPARISONS: Mapping[type[ast.cmpop], tuple[tuple[str, str], ...]] = {
    ast.Lt: (("<=", "boundary"), (">", "flipped_comparison")),
    ast.Gt: ((">=", "boundary"), ("<", "flipped_comparison")),
    ast.LtE: (("<", "boundary"), (">=", "flipped_comparison")),
    ast.GtE: ((">", "boundary"), ("<=", "flipped_comparison")),
    ast.Eq: (("!=", "flipped_comparison"),),
    ast.NotEq: (("==", "flipped_comparison"),),
    ast.Is: (("is not", "flipped_comparison"),),
    ast.IsNot: (("is", "flipped_comparison"),),
    ast.In: (("not in", "flipped_comparison"),),
    ast.NotIn: (("in", "flipped_comparison"),),
}
_ARITHMETIC: Mapping[type[ast.operator], tuple[str, ...]] = {
    ast.Add: ("-",),
    ast.Sub: ("+",),
    ast.Mult: ("+",),
    ast.FloorDiv: ("*",),
    ast.Div: ("*",),
    ast.Mod: ("*",),
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


@dataclass(frozen=True, slots=True)
class _Span:
    """A part of one line of a file, by offsets, and its possible replacements (text, family)."""

    start: int
    end: int
    choices: tuple[tuple[str, str], ...]


def injection_sites(source: str) -> list[InjectionSite]:
    """The injection sites inside the functions of a Python file. Empty if the file does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    text = _Text(source)
    return [
        _site(source, span, function)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for span in _spans(function, text)
    ]


def _site(source: str, span: _Span, function: ast.FunctionDef | ast.AsyncFunctionDef) -> InjectionSite:
    location = _first_line(function), function.name
    bugs = [
        Bug(family, location, source[: span.start] + text + source[span.end :])
        for text, family in span.choices
        if text != source[span.start : span.end]
    ]
    line = source.count("\n", 0, span.start) + 1
    return InjectionSite(line, span.start - source.rfind("\n", 0, span.start) - 1, tuple(filter(_compiles, bugs)))


def _compiles(bug: Bug) -> bool:
    try:
        compile(bug.source, "bug", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The first line of a function's code object, which includes its decorators."""
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])


class _Text:
    """Converts the positions of a syntax tree (line, column in bytes) to character offsets."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._lines = source.split("\n")
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line) + 1)

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self._offset(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> int:
        return self._offset(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def segment(self, node: ast.expr | ast.stmt) -> str:
        return self.source[self.start(node) : self.end(node)]

    def between(self, left: ast.expr, right: ast.expr) -> tuple[int, int]:
        """Offsets of the operator between two operands, without surrounding white space and parentheses."""
        start, end = self.end(left), self.start(right)
        while start < end and self.source[start] in " \t)":
            start += 1
        while end > start and self.source[end - 1] in " \t(":
            end -= 1
        return start, end

    def _offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode(errors="ignore"))


def _spans(function: ast.FunctionDef | ast.AsyncFunctionDef, text: _Text) -> Iterator[_Span]:
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args) if argument.arg != "self"]
    yield from _defaults(function, text)
    for node in _body_nodes(function):
        for family in _FAMILIES:
            yield from family(node, text)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Name) and node.value.id in names:
            others = tuple((name, "wrong_variable") for name in names if name != node.value.id)[:2]
            yield from _replacement(node.value, text, others)


def _body_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function's body, without nested functions and classes and without annotations."""
    for part in getattr(function, "body", []):
        pending: list[ast.AST] = [part]
        while pending:
            node = pending.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.JoinedStr):
                continue
            yield node
            pending += ast.iter_child_nodes(node)


def _replacement(node: ast.expr, text: _Text, choices: tuple[tuple[str, str], ...]) -> Iterator[_Span]:
    if choices and node.lineno == node.end_lineno:
        yield _Span(text.start(node), text.end(node), choices)


def _operator(left: ast.expr, right: ast.expr, text: _Text, choices: tuple[tuple[str, str], ...]) -> Iterator[_Span]:
    start, end = text.between(left, right)
    if choices and 0 < end - start <= 6 and "\n" not in text.source[start:end] and "#" not in text.source[start:end]:
        yield _Span(start, end, choices)


def _defaults(function: ast.FunctionDef | ast.AsyncFunctionDef, text: _Text) -> Iterator[_Span]:
    for value in [*function.args.defaults, *(default for default in function.args.kw_defaults if default is not None)]:
        yield from _replacement(value, text, _other_constants(value, "wrong_default"))


def _comparisons(node: ast.AST, text: _Text) -> Iterator[_Span]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield from _operator(node.left, node.comparators[0], text, _COMPARISONS[type(node.ops[0])])


def _arithmetic(node: ast.AST, text: _Text) -> Iterator[_Span]:
    if isinstance(node, ast.BinOp) and not _is_text(node.left) and not _is_text(node.right):
        choices = [(other, "wrong_operator") for other in _ARITHMETIC.get(type(node.op), ())]
        if isinstance(node.op, ast.Add | ast.Sub) and _is_number(node.right):
            yield from _deletion(text.end(node.left), text.end(node), text, "off_by_one")
        yield from _operator(node.left, node.right, text, tuple(choices))


def _deletion(start: int, end: int, text: _Text, family: str) -> Iterator[_Span]:
    """Delete the text between two offsets, such as the `` + 1`` after a name."""
    if "\n" not in text.source[start:end] and not set("()#") & set(text.source[start:end]):
        yield _Span(start, end, (("", family),))


def _booleans(node: ast.AST, text: _Text) -> Iterator[_Span]:
    if isinstance(node, ast.BoolOp):
        other = "or" if isinstance(node.op, ast.And) else "and"
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from _operator(left, right, text, ((other, "boolean_operator"),))


def _conditions(node: ast.AST, text: _Text) -> Iterator[_Span]:
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare):
        if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
            yield from _replacement(node.test, text, ((text.segment(node.test.operand), "negated_condition"),))
        elif isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
            yield from _replacement(node.test, text, ((f"not {text.segment(node.test)}", "negated_condition"),))


def _calls(node: ast.AST, text: _Text) -> Iterator[_Span]:
    if not isinstance(node, ast.Call):
        return
    if isinstance(node.func, ast.Name) and (other := _BUILTINS.get(node.func.id)) and node.args:
        yield from _replacement(node.func, text, ((other, "wrong_builtin"),))
    if isinstance(node.func, ast.Name) and node.func.id == "range" and len(node.args) == 1:
        yield from _replacement(node.args[0], text, ((f"{text.segment(node.args[0])} - 1", "off_by_one"),))
    if len(node.args) == 2 and not node.keywords and not any(isinstance(arg, ast.Starred) for arg in node.args):
        first, second = node.args
        if first.lineno == second.end_lineno and text.segment(first) != text.segment(second):
            swapped = f"{text.segment(second)}{text.source[text.end(first) : text.start(second)]}{text.segment(first)}"
            yield _Span(text.start(first), text.end(second), ((swapped, "swapped_arguments"),))


def _returns(node: ast.AST, text: _Text) -> Iterator[_Span]:
    if isinstance(node, ast.Return) and node.value is not None and node.lineno == node.end_lineno:
        if isinstance(node.value, ast.Call | ast.Name | ast.Attribute | ast.BinOp):
            yield _Span(text.start(node), text.end(node), ((text.segment(node.value), "missing_return"),))
        yield from _replacement(node.value, text, _other_constants(node.value, "wrong_constant"))


def _initials(node: ast.AST, text: _Text) -> Iterator[_Span]:
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        yield from _replacement(node.value, text, _other_constants(node.value, "wrong_initial"))


def _indices(node: ast.AST, text: _Text) -> Iterator[_Span]:
    if not isinstance(node, ast.Subscript):
        return
    if isinstance(node.slice, ast.Slice):
        for bound in (node.slice.lower, node.slice.upper):
            if bound is not None and (number := _number(bound)) is not None:
                yield from _replacement(bound, text, ((str(number + 1), "off_by_one"),))
    elif (number := _number(node.slice)) is not None:
        yield from _replacement(node.slice, text, ((str(number + 1 if number >= 0 else number - 1), "wrong_index"),))


_FAMILIES: tuple[Callable[[ast.AST, _Text], Iterator[_Span]], ...] = (
    _comparisons,
    _arithmetic,
    _booleans,
    _conditions,
    _calls,
    _returns,
    _initials,
    _indices,
)


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


def _is_number(node: ast.expr) -> bool:
    return _number(node) is not None


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
