"""The imports between the modules of the packages, and their circles. Imports inside of functions count."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGES = ("sandbox", "tools", "envs", "r3", "agent_rl")

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
            assert node.level == 0, f"line {node.lineno}: relative import"
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
