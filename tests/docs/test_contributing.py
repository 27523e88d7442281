"""The files and definitions that CONTRIBUTING.md names in its table of questions exist."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Iterator

from support import doc_pages as pages

HEAD = "| question | file | definition |"


def answers() -> Iterator[tuple[str, str]]:
    """File and definition of each row."""
    lines = iter((pages.ROOT / "CONTRIBUTING.md").read_text().partition(f"{HEAD}\n")[2].splitlines()[1:])
    for line in itertools.takewhile(lambda line: line.startswith("|"), lines):
        _, file, name = line.strip("|").split("|")
        yield file.strip(" `"), name.strip(" `")


def definitions(body: Iterable[ast.stmt], prefix: str = "") -> Iterator[str]:
    """The names that a module or class defines; those of a class as ``Class.name``."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name
            yield from definitions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


def test_each_answer_names_a_definition_of_its_file() -> None:
    rows = list(answers())
    defined = {file: set(definitions(ast.parse((pages.ROOT / file).read_text()).body)) for file, _ in rows}
    assert rows
    assert not (missing := [f"{file} defines no {name}" for file, name in rows if name not in defined[file]]), missing
