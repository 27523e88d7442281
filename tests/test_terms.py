"""The word list of CONTRIBUTING.md: no identifier of the packages uses a word that the list replaces."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def replaced_words() -> frozenset[str]:
    """The words in backticks in the last column of the word list."""
    _, _, section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Word list")
    rows = [line.split("|")[-2] for line in section.splitlines() if line.startswith("| ")]
    return frozenset(word for cell in rows for word in re.findall(r"`(\w+)`", cell))


def identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


@pytest.mark.parametrize("package", ["agent_rl", "envs", "r3", "sandbox", "tools"])
def test_identifiers_use_the_word_list(package: str) -> None:
    replaced = replaced_words()
    assert replaced, "CONTRIBUTING.md has no word list"
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, name in identifiers(ast.parse(path.read_text()))
        if replaced & {word.lower() for word in WORDS.findall(name)}
    ]
    assert not wrong, "\n".join(wrong)
