"""Writes eval scripts (bash) for rows that only have a test command."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable

from envs.swe.diff.git_diff import split_patch

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
"""swebench's markers around the tests' output."""

CONDA = ("source /opt/miniconda3/bin/activate", "conda activate testbed", "cd /testbed")
"""First lines of SWE-bench-like eval scripts: activate the image's environment and enter its repository."""

_DATA_SUFFIXES = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")


def eval_script(setup: Iterable[str], tests: Iterable[str]) -> str:
    """A script that runs the ``setup`` lines and then the ``tests``, whose output is between swebench's markers."""
    command_lines = ["#!/bin/bash", "set -uxo pipefail", *setup, f": '{START}'", *tests, f": '{END}'"]
    return "\n".join(command_lines) + "\n"


def apply_test_patch(test_patch: str, base: str) -> list[str]:
    """Lines that reset the patched test files to the commit ``base`` and apply the test patch."""
    existing = [part.path for part in split_patch(test_patch) if not part.is_new]
    reset = [f"git checkout {shlex.quote(base)} -- {shlex.join(existing)}"] if base and existing else []
    return [*reset, *apply_patch(test_patch)]


def apply_patch(patch: str, options: str = "-v") -> list[str]:
    """Lines that apply a patch with ``git apply``."""
    end = f"EOF_{hashlib.sha256(patch.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
    return [f"git apply {options} - <<'{end}'", *patch.removesuffix("\n").split("\n"), end]


def test_files(test_patch: str) -> list[str]:
    """The test files to run: those that exist after the test patch, without data files."""
    parts = [part for part in split_patch(test_patch) if "\n+++ /dev/null\n" not in part.text]
    return [part.path for part in parts if not part.path.endswith(_DATA_SUFFIXES)]
