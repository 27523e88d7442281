"""The table of docs/reference/gpu-status.md: where the features in ``tests/gpu/features.yaml`` were run.

A feature was run on a GPU where a table of ``tests/gpu/gpu_run.py`` in ``tests/gpu/results/`` has all of its checks as
expected, in a dry run where docs/research/dry-runs.md has the command of its config.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
FEATURES = ROOT / "tests/gpu/features.yaml"
RESULTS = ROOT / "tests/gpu/results"
DRY_RUNS = ROOT / "docs/research/dry-runs.md"


def records(directory: Path = RESULTS) -> list[str]:
    """The recorded tables. Raises ValueError for one of ``gpu_run.py --cpu``."""
    tables = {path: path.read_text() for path in sorted(directory.glob("*.md")) if path.name != "README.md"}
    for path, text in tables.items():
        if " x CPU, " in text.partition("\n")[0]:
            raise ValueError(f"{path.name}: the table of a run on a CPU records no run on a GPU")
    return list(tables.values())


def summary(tables: Sequence[str]) -> str:
    """A sentence that names the machines of ``tables``."""
    machines = "; ".join(text.partition("\n")[0] for text in tables)
    return f"Recorded runs on GPUs: {machines}." if tables else "**Nothing was run on a GPU.**"


def rows() -> Iterator[list[str]]:
    """Feature, where it was run, and what shows it."""
    checks = passed_checks(records())
    for entry in yaml.safe_load(FEATURES.read_text()):
        yield [entry["feature"], status(entry, checks), "<br>".join(evidence(entry))]


def status(entry: Mapping[str, Any], passed: Mapping[str, bool]) -> str:
    """In the words of the page. ``passed``: the checks that ran on a GPU."""
    checks: Sequence[str] = entry.get("gpu", ())
    if checks and all(passed.get(name) for name in checks):
        return "run on a GPU"
    words = [word for key, word in (("dry_run", "dry-run"), ("tests", "CPU")) if entry.get(key)]
    return ", ".join(words) or ("fakes only" if entry.get("fakes") else "not run")


def passed_checks(tables: Iterable[str]) -> dict[str, bool]:
    """By check of ``gpu_run.py``'s tables, whether all of its lines are as expected."""
    passed: dict[str, bool] = {}
    for line in (line for text in tables for line in text.splitlines() if line.count("|") == 6):
        check, good = (line.split("|")[place].strip() for place in (1, 5))
        passed[check] = passed.get(check, True) and "NO" not in good
    return passed


def evidence(entry: Mapping[str, Any]) -> Iterator[str]:
    """Raises ValueError for a test that does not exist or a dry run that is not recorded."""
    for config in entry.get("dry_run", ()):
        if f"configs/{config}.yaml" not in DRY_RUNS.read_text():
            raise ValueError(f"{FEATURES.name}: {DRY_RUNS.name} has no dry run of {config}")
        yield f"dry run of `configs/{config}.yaml`"
    for key, word in (("tests", ""), ("fakes", ", a fake")):
        for name in entry.get(key, ()):
            path, _, test = name.partition("::")
            if test not in _functions(ROOT / "tests" / path):
                raise ValueError(f"{FEATURES.name}: tests/{path} has no {test}")
            yield f"`{Path(path).name}::{test}`{word}"


def _functions(path: Path) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}
