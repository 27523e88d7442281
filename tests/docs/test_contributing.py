"""The files and definitions that CONTRIBUTING.md gives as answers to a newcomer's questions are there."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Iterator

import pytest
import yaml
from support import doc_pages as pages

PAGE = pages.ROOT / "CONTRIBUTING.md"


def answers() -> Iterator[tuple[str, str, str]]:
    """The rows (question, file, definition) of the table under the heading of the twelve questions."""
    section = PAGE.read_text().split("## Twelve questions", 1)[1].split("\n## ", 1)[0]
    for line in section.splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] not in ("question", "---"):
            yield cells[0], cells[1], cells[2]


def definitions(body: Iterable[ast.stmt], prefix: str = "") -> Iterator[str]:
    """The names that a module or class defines; what a class defines as ``Class.name``."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name
            yield from definitions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


def test_there_are_twelve_questions() -> None:
    assert len(list(answers())) == 12


@pytest.mark.parametrize(("question", "file", "name"), list(answers()))
def test_each_question_is_answered_where_the_page_says(question: str, file: str, name: str) -> None:
    assert name in set(definitions(ast.parse((pages.ROOT / file).read_text()).body)), f"{file} defines no {name}"


def test_the_hooks_are_programs_of_the_development_environment() -> None:
    extras = tomllib.loads((pages.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    repositories = yaml.safe_load((pages.ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    for hook in repositories[0]["hooks"]:
        program = hook["entry"].split()[0].removeprefix(".venv/bin/")
        assert any(extra.startswith(f"{program}>") for extra in extras), f"{program} is not in the extra dev"
