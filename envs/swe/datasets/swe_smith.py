"""SWE-smith: bugs injected into a correct repository. A row's ``patch`` is the bug; its inverse is the fix.

The test commands are those of SWE-bench/SWE-smith at 032f1a1, swesmith/profiles/python.py (docs/reference/datasets.md).
"""

from __future__ import annotations

import shlex
from typing import Any

from envs.swe.datasets.spec import CONDA, Row, as_record, eval_script, grading, require, string_list
from envs.swe.diff.git_diff import reversed_patch

PARSER = "swe-smith"
"""The name of SWE-smith's log parser, which reads pytest's progress lines (:mod:`envs.swe.swebench`)."""

_PYTEST = "pytest --disable-warnings --color=no --tb=no --verbose"
_TEST_COMMANDS = {
    "tkrajina__gpxpy": "pytest test.py --verbose --color=no --tb=no --disable-warnings",
    "jax-ml__jax": f"{_PYTEST} -n auto",
    "mido__mido": f"{_PYTEST} -rs -c /dev/null",
    "paramiko__paramiko": "pytest -rA --color=no --disable-warnings",
    "pydantic__pydantic": f"/root/.local/bin/uv run {_PYTEST}",
}
_OTHER_RUNNERS = ("python__mypy", "tornadoweb__tornado", "un33k__python-slugify")


def recognizes(row: Row) -> bool:
    """Whether the row names a SWE-smith mirror or image and has no test patch."""
    names = f"{row.get('image_name', '')} {row.get('repo', '')}"
    return "instance_id" in row and "test_patch" not in row and "swesmith" in names


def read(row: Row) -> dict[str, Any]:
    require(row, "SWE-smith", "instance_id", "repo", "patch", "FAIL_TO_PASS", "problem_statement")
    mirror, _, bug = str(row["instance_id"]).rpartition(".")
    project, _, commit = mirror.rpartition(".")
    if not (project and commit and bug):
        raise ValueError(f"instance_id: {row['instance_id']!r}; right would be OWNER__REPO.COMMIT.BUG")
    if project in _OTHER_RUNNERS:
        raise ValueError(f"repo: {project} has its own test runner, which is not supported; right would be pytest")
    files = _test_files(string_list(row["FAIL_TO_PASS"]))
    command = f"{_TEST_COMMANDS.get(project, _PYTEST)} {shlex.join(files)}"
    passing = [test for test in string_list(row.get("PASS_TO_PASS", ())) if test.startswith(tuple(files))]
    tests = {"FAIL_TO_PASS": row["FAIL_TO_PASS"], "PASS_TO_PASS": passing, "test_patch": ""}
    spec = grading(tests, eval_script(CONDA, [command]), PARSER, hidden_files=files, rules="swe-smith")
    bug_patch = str(row["patch"])
    return as_record(
        row, spec, docker_image=_image(row, mirror), bug_patch=bug_patch, gold_patch=reversed_patch(bug_patch)
    )


def _test_files(tests: list[str]) -> list[str]:
    """The sorted files of pytest node ids. Raises ``ValueError`` for an id without a file."""
    if other := next((test for test in tests if ".py::" not in test), None):
        raise ValueError(
            f"FAIL_TO_PASS: {other!r} is not a pytest node id, so the test files are unknown; "
            "right would be path/to/test_file.py::test (of SWE-smith's languages only Python is supported)"
        )
    return sorted({test.partition("::")[0] for test in tests})


def _image(row: Row, mirror: str) -> str:
    """The row's image, or SWE-smith's published image for the repository and commit."""
    published = f"swesmith.x86_64.{mirror.replace('__', '_1776_')}".lower()
    image = str(row.get("image_name") or row.get("docker_image") or published)
    return f"jyangballin/{image}" if image.startswith("swesmith.") else image
