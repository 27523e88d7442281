"""Every make target brings what it needs: the steps that ``make`` would run, read without running them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def steps(target: str) -> str:
    run = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return run.stdout


@pytest.mark.parametrize(
    ("target", "before", "after"),
    [
        ("real-tasks", "sandbox.base_image", "envs.swe.real"),  # where docker answers, its boxes need the image
        ("test", "sandbox.base_image", "-m pytest"),
        ("test", "agent-rl setup", "-m pytest"),
        ("quickstart", "bootstrap.py", "agent-rl train"),
        ("quickstart", "agent-rl setup", "agent-rl train"),
        ("bench", "bootstrap.py", "tests/bench"),
        ("docs", "bootstrap.py docs", "sphinx-build"),
    ],
)
def test_a_target_makes_what_it_needs_first(target: str, before: str, after: str) -> None:
    planned = steps(target)
    assert 0 <= planned.find(before) < planned.find(after), planned
