"""Order of the steps of make targets, from ``make -n``."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def steps(target: str) -> str:
    command = ["make", "--no-print-directory", "-n", target]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return run.stdout


@pytest.mark.parametrize(
    ("target", "before", "after"),
    [
        ("real-tasks", "sandbox.base_image", "scripts.build_release_tasks"),
        ("test", "sandbox.base_image", "-m pytest"),
        ("test", "agent-rl setup", "-m pytest"),
        ("test", "agent_rl.bootstrap agents", "-m pytest"),
        ("quickstart", "agent_rl.bootstrap", "agent-rl train"),
        ("quickstart", "agent-rl setup", "agent-rl train"),
        ("bench", "agent_rl.bootstrap", "benchmarks"),
        ("docs", "agent_rl.bootstrap docs", "sphinx-build"),
    ],
)
def test_target_runs_its_requirements_first(target: str, before: str, after: str) -> None:
    planned = steps(target)
    assert 0 <= planned.find(before) < planned.find(after), planned


def test_setup_runs_without_site_packages() -> None:
    """Run as a file, the setup would import agent_rl/types.py instead of the standard library's ``types``."""
    _, *arguments = shlex.split(steps("setup").splitlines()[0])
    assert arguments[-3:] == ["trainer", "engine", "sandbox"]
    subprocess.run([sys.executable, "-S", *arguments[:-3], "sandbox"], cwd=ROOT, timeout=60, check=True)
