"""The import direction, the lightness of what must be light, and that our generic package names are ours."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import import_graph

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("sandbox", "tools", "envs", "r3", "agent_rl")

MAY_IMPORT = {
    "sandbox": set(),
    "tools": {"sandbox"},
    "envs": {"sandbox", "tools"},
    "r3": set(),
    "agent_rl": {"sandbox", "tools", "envs", "r3"},
}

BASE = {"types", "config", "errors", "utils", "monitoring", "models"}
RUNNING = {"render", "engine", "rollout", "endpoint", "evaluation"}
INSIDE_AGENT_RL = {
    "errors": set(),
    "utils": {"errors"},
    "shadowing": set(),
    "api": set(),
    "bootstrap": set(),
    "types": set(),
    "config": {"errors", "bootstrap"},
    "models": {"errors", "config"},
    "monitoring": BASE,
    "render": BASE,
    "engine": BASE,
    "rollout": BASE | {"render", "engine"},
    "endpoint": BASE | {"render", "engine", "rollout"},
    "evaluation": BASE | {"rollout"},
    "viewer": BASE | {"rollout", "evaluation"},
    "weight_sync": BASE | {"engine"},
    "train": BASE | {"weight_sync"},
    "planner": BASE | {"train"},
    "dryrun": BASE | {"weight_sync", "train", "planner"},
    "controller": BASE | {*RUNNING, "weight_sync", "train"},
    "commands": BASE | {*RUNNING, "train", "planner", "controller", "viewer"},
    "cli": BASE | {"bootstrap", "engine", "train", "planner", "dryrun", "controller", "commands"},
}
"""What each part of ``agent_rl`` may import of the others; ``rollout`` and ``train`` meet only in the controller."""


def imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.lineno, node.module or ""


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_downstream(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sources(package)
        for line, module in imports(path)
        if (top := module.split(".")[0]) in PACKAGES and top != package and top not in MAY_IMPORT[package]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("part", INSIDE_AGENT_RL)
def test_parts_of_agent_rl_import_only_downstream(part: str) -> None:
    base = ROOT / "agent_rl" / part
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in (sorted(base.rglob("*.py")) if base.is_dir() else [base.with_suffix(".py")])
        for line, module in imports(path)
        if module.startswith("agent_rl.") and module.split(".")[1] not in INSIDE_AGENT_RL[part] | {part}
    ]
    assert not wrong, "\n".join(wrong)


def test_every_part_of_agent_rl_has_its_place_in_the_table() -> None:
    parts = {
        path.stem for path in (ROOT / "agent_rl").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert parts - {"__init__"} == set(INSIDE_AGENT_RL)


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = import_graph.import_graph(import_graph.modules(ROOT))
    assert import_graph.circles(graph) == []
    assert import_graph.circles(import_graph.parts_graph(graph)) == []


@pytest.mark.parametrize(
    "module",
    [
        "agent_rl.api",
        "agent_rl.config",
        "agent_rl.cli",
        "agent_rl.rollout.episode",
        "agent_rl.controller.train",
        "agent_rl.weight_sync.sync",
        "sandbox",
        "tools",
        "envs",
        "r3.routing",
    ],
)
def test_light_modules_import_without_heavy_packages(module: str) -> None:
    heavy = ("torch", "megatron", "ray", "transformers", "sglang", "matplotlib")
    code = f"import {module}, sys; print([m for m in {heavy!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_package_names_are_served_by_this_distribution_alone() -> None:
    distributions = importlib.metadata.packages_distributions()
    owners = {owner for package in PACKAGES for owner in distributions.get(package, ["agent-rl"])}
    assert owners == {"agent-rl"}
    code = f"import {', '.join(PACKAGES)}; print(*(module.__file__ for module in ({', '.join(PACKAGES)})))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd="/").stdout
    assert found.split() == [str(ROOT / package / "__init__.py") for package in PACKAGES]
