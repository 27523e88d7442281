"""The bash that grades a row which says only by which command its tests run."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable

from envs.swe.diff.git_diff import split_patch

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
"""What swebench finds the tests' output between."""

CONDA = ("source /opt/miniconda3/bin/activate", "conda activate testbed", "cd /testbed")
"""How the scripts of SWE-bench's kin begin: with the environment and the repository of their images."""

_DATA = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")


def eval_script(before: Iterable[str], tests: Iterable[str]) -> str:
    """A script that runs the lines ``before`` and then the ``tests``, their output between swebench's markers."""
    lines = ["#!/bin/bash", "set -uxo pipefail", *before, f": '{START}'", *tests, f": '{END}'"]
    return "\n".join(lines) + "\n"


def put_tests(test_patch: str, base: str) -> list[str]:
    """Lines that take the patched test files back to the commit ``base`` and apply the test patch."""
    old = [part.path for part in split_patch(test_patch) if not part.is_new]
    reset = [f"git checkout {shlex.quote(base)} -- {shlex.join(old)}"] if base and old else []
    return [*reset, *apply_patch(test_patch)]


def apply_patch(patch: str, options: str = "-v") -> list[str]:
    """Lines that apply a patch with git."""
    end = f"EOF_{hashlib.sha256(patch.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
    return [f"git apply {options} - <<'{end}'", *patch.removesuffix("\n").split("\n"), end]


def patched_tests(test_patch: str) -> list[str]:
    """The files that tests are run from: those the test patch leaves behind, without files of data."""
    parts = [part for part in split_patch(test_patch) if "\n+++ /dev/null\n" not in part.text]
    return [part.path for part in parts if not part.path.endswith(_DATA)]
