"""The import direction, the lightness of what must be light, and that our generic package names are ours."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterable
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


GRAPH = import_graph.import_graph(import_graph.modules(ROOT))
PARTS = import_graph.parts_graph(GRAPH)


def imports_of(name: str, known: Iterable[str]) -> list[str]:
    """The imports from modules below ``name`` into packages or parts that are not ``known``."""
    depth, kept = name.count(".") + 1, {name, *known}
    mine = [module for module in GRAPH if ".".join(module.split(".")[:depth]) == name]
    return [f"{one} imports {to}" for one in mine for to in GRAPH[one] if ".".join(to.split(".")[:depth]) not in kept]


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_downstream(package: str) -> None:
    assert imports_of(package, MAY_IMPORT[package]) == []


@pytest.mark.parametrize("part", INSIDE_AGENT_RL)
def test_parts_of_agent_rl_import_only_downstream(part: str) -> None:
    outside = {".".join(name.split(".")[:2]) for name in GRAPH if not name.startswith("agent_rl.")} | {"agent_rl"}
    assert imports_of(f"agent_rl.{part}", {f"agent_rl.{other}" for other in INSIDE_AGENT_RL[part]} | outside) == []


def test_the_table_has_every_part_of_agent_rl() -> None:
    assert set(PARTS) == set(INSIDE_AGENT_RL)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert import_graph.circles(GRAPH) == []
    assert import_graph.circles(PARTS) == []


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
        "envs.swe",
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
