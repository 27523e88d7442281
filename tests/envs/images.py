"""Images for bubblewrap, made of the machine's own system folders and a repository."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from sandbox import SandboxSpec

BUILT = Path(__file__).parents[2] / ".cache/tasks/real.jsonl"

# The images of data sets hold history with a future in it.
GIT_WITH_A_FUTURE = """
set -e
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a
git init -q . && git add -A && git commit -qm base
git commit -q --allow-empty -m 'the future fix' && git branch future && git reset -q --hard HEAD~1
"""


def folder_image(root: Path, files: Mapping[str, str], set_up: str) -> Path:
    """A root file system in ``root`` with ``files`` in its /testbed, where ``set_up`` (bash) is run on this machine."""
    (root / "testbed").mkdir(parents=True)
    for name in ("usr", "etc"):
        (root / name).symlink_to(f"/{name}")
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for path, text in files.items():
        (root / "testbed" / path).parent.mkdir(parents=True, exist_ok=True)
        (root / "testbed" / path).write_bytes(text.encode())
    subprocess.run(["bash", "-c", set_up], cwd=root / "testbed", check=True, timeout=60)
    return root


def limits_with_pytest(memory_mb: int) -> SandboxSpec:
    """Limits of boxes that are lent the real tasks' pytest."""
    binds = {str(BUILT.parent / "site"): "/opt/site"}
    return SandboxSpec(memory_mb=memory_mb, ro_binds=binds, env={"PYTHONPATH": "/opt/site"})
