"""Images for bubblewrap, made of the machine's own system directories and a repository; rows of SWE-bench."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envs.swe import SweRecord, diff_files
from sandbox import SandboxSpec

BUILT = Path(__file__).parents[2] / ".cache/tasks/real.jsonl"

# The images of data sets hold history with a future in it.
GIT_WITH_A_FUTURE = """
set -e
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a
git init -q . && git add -A && git commit -qm base
git commit -q --allow-empty -m 'the future fix' && git branch future && git reset -q --hard HEAD~1
"""


SYSTEM = {"/usr": "/usr", "/etc": "/etc"}
"""What sandboxes of a :func:`directory_image` bind of the machine."""


def directory_image(root: Path, files: Mapping[str, str], populate: str) -> Path:
    """An image in ``root`` with ``files`` in its /testbed, where ``populate`` (bash) is run on this machine."""
    for name in ("testbed", "usr"):  # sandboxes get the machine's own /usr and /etc there (SYSTEM)
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for path, text in files.items():
        (root / "testbed" / path).parent.mkdir(parents=True, exist_ok=True)
        (root / "testbed" / path).write_bytes(text.encode())
    subprocess.run(["bash", "-c", populate], cwd=root / "testbed", check=True, timeout=60)
    return root


def limits_with_pytest(memory_mb: int) -> SandboxSpec:
    """Limits of sandboxes that are lent the real tasks' pytest."""
    binds = {**SYSTEM, str(BUILT.parent / "site"): "/opt/site"}
    return SandboxSpec(memory_mb=memory_mb, ro_binds=binds, env={"PYTHONPATH": "/opt/site"})


_EVAL = """#!/bin/bash
set -uxo pipefail
{preamble}
git checkout {base} {tests}
git apply -v - <<'EOF_114329324912'
{test_patch}EOF_114329324912
: '>>>>> Start Test Output'
{pytest} -rA -p no:cacheprovider {directory}
: '>>>>> End Test Output'
git checkout {base} {tests}
"""


def swebench_row(record: SweRecord, image: str, *, base: str, preamble: str, pytest: str = "pytest") -> dict[str, Any]:
    """A real task as a row of SWE-bench's data set; ``preamble`` is how its script begins."""
    test_patch = diff_files({path: record.files.get(path, "") for path in record.tests}, dict(record.tests))
    before = json.loads(record.execution_result_content)["old_commit_statuses"]
    names = [test for test in record.expected if " " not in test]  # swebench cuts a test's name at its first space
    script = _EVAL.format(
        preamble=preamble,
        base=base,
        tests=" ".join(path for path in record.tests if path in record.files),
        test_patch=test_patch,
        pytest=pytest,
        directory=sorted(record.tests)[0].rpartition("/")[0],
    )
    return {
        "repo": f"{record.repo_name}/{record.repo_name}",
        "instance_id": f"{record.repo_name}__{record.id}",
        "base_commit": base,
        "patch": record.gold,
        "test_patch": test_patch,
        "problem_statement": record.problem_statement,
        "hints_text": "",
        "created_at": "2024-01-01T00:00:00Z",
        "version": "1",
        "FAIL_TO_PASS": json.dumps([test for test in names if before.get(test) != "PASSED"]),
        "PASS_TO_PASS": json.dumps([test for test in names if before.get(test) == "PASSED"]),
        "image": image,
        "eval_script": script,
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
    }
