"""The structure of the packages in numbers.

``python tests/support/import_graph.py [COMMIT]`` prints it (default: the working tree). Counted are modules, imports
between them, circles of modules, circles of the parts of ``agent_rl`` (its directories and files), settings that were
declared in a copy of the config, files with a function or class that takes the config, a section of it or a copy of
one, and files that name a model's ``config.json``. Imports inside of functions count. Needs the standard library alone.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("sandbox", "tools", "envs", "r3", "agent_rl")
SETTINGS = ("agent_rl.config", "agent_rl.rollout.settings", "agent_rl.train.settings")
"""Where the config's sections are, and where copies of them were."""

Graph = Mapping[str, frozenset[str]]


def modules(root: Path) -> dict[str, ast.Module]:
    """Every module of the packages by its dotted name."""
    paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    return {dotted(path.relative_to(root)): ast.parse(path.read_text()) for path in paths}


def dotted(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, name in it) for every import; the name is empty for ``import module``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def import_graph(trees: Mapping[str, ast.Module]) -> Graph:
    """Which modules of the packages each module imports."""

    def targets(name: str) -> Iterator[str]:
        for module, part in imported(trees[name]):
            yield f"{module}.{part}" if f"{module}.{part}" in trees else module

    return {name: frozenset(to for to in targets(name) if to in trees and to != name) for name in trees}


def parts_graph(graph: Graph) -> Graph:
    """The same between the parts of ``agent_rl``: ``agent_rl.train.worker`` belongs to the part ``train``."""
    part = {name: name.split(".")[1] for name in graph if name.startswith("agent_rl.")}
    return {
        one: frozenset(part[to] for name in part if part[name] == one for to in graph[name] if to in part) - {one}
        for one in set(part.values())
    }


def circles(graph: Graph) -> list[set[str]]:
    """Groups of nodes each of which reaches all others of its group."""
    reach = {name: reachable(graph, name) for name in graph}
    groups = {frozenset({a} | {b for b in reach[a] if a in reach[b]}) for a in graph}
    return [set(group) for group in groups if len(group) > 1]


def reachable(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        if (name := ahead.pop()) not in found:
            found.add(name)
            ahead.extend(graph[name])
    return found


def takes_settings(tree: ast.Module) -> bool:
    """Whether a function has a parameter, or a class a field, whose type is the config, a section or a copy of one."""
    known = {name for module, name in imported(tree) if module in SETTINGS}
    types = [node.annotation for node in ast.walk(tree) if isinstance(node, ast.arg | ast.AnnAssign)]
    return any(isinstance(node, ast.Name) and node.id in known for kind in types if kind for node in ast.walk(kind))


def fields(tree: ast.Module) -> int:
    """How many annotated fields the classes of a module have."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return sum(isinstance(statement, ast.AnnAssign) for node in classes for statement in node.body)


def reads_model_config(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.Constant) and node.value == "config.json" for node in ast.walk(tree))


def figures(root: Path) -> dict[str, int]:
    trees = modules(root)
    graph = import_graph(trees)
    return {
        "modules": len(trees),
        "imports between modules": sum(map(len, graph.values())),
        "circles of modules": len(circles(graph)),
        "circles of parts of agent_rl": len(circles(parts_graph(graph))),
        "settings declared in a copy of the config": sum(fields(trees[name]) for name in SETTINGS[1:] if name in trees),
        "files that take the config, a section or a copy": sum(map(takes_settings, trees.values())),
        "files that name config.json": sum(map(reads_model_config, trees.values())),
    }


def main(arguments: list[str]) -> None:
    with TemporaryDirectory() as directory:
        root = ROOT
        if arguments:
            archive = subprocess.run(["git", "archive", *arguments], cwd=ROOT, capture_output=True, check=True).stdout
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(directory, filter="data")
            root = Path(directory)
        for name, value in figures(root).items():
            print(f"{value:6} {name}")
        for circle in circles(import_graph(modules(root))):
            print("circle:", " <-> ".join(sorted(circle)))


if __name__ == "__main__":
    main(sys.argv[1:])
