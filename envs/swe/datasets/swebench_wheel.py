"""Derives the grading fields of SWE-bench's original rows from a wheel of swebench 4, without a network.

swebench 4 has tables of test commands by repository and version. swebench 5 reads finished scripts from its rows
instead. The wheel's code runs in a process of its own (``swebench_wheel_reader.py``), because both releases have one
name.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envs.types import TaskRecordError

_READER = Path(__file__).with_name("swebench_wheel_reader.py")
_NEEDED = ("instance_id", "repo", "version", "base_commit", "test_patch")


def is_wheel(source: Path | str) -> bool:
    return Path(source).suffix == ".whl"


def derive_specs(wheel: Path | str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The grading fields by ``instance_id`` of the ``rows`` whose repository and version the wheel knows.

    Raises ``TaskRecordError`` for a file that is not a wheel of swebench 4, and if it knows none of the rows.
    """
    if not Path(wheel).is_file():
        raise TaskRecordError(f"specs: {wheel}: no such file; right would be a wheel of swebench 4")
    lines = [json.dumps({key: row[key] for key in _NEEDED}) for row in rows if all(row.get(key) for key in _NEEDED)]
    command = [sys.executable, "-I", str(_READER), str(Path(wheel).resolve())]
    with tempfile.TemporaryDirectory(prefix="agent-rl-") as directory:  # swebench reads a .env file in its directory
        done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, cwd=directory)
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise TaskRecordError(
            f"specs: {wheel}: cannot be read ({reason}); right would be a wheel of swebench 4, for example from "
            "`pip download --no-deps swebench==4.1.0`, and the extra swebench installed"
        )
    specs = {spec["instance_id"]: spec for spec in map(json.loads, done.stdout.splitlines())}
    if not specs:
        raise TaskRecordError(f"specs: {wheel}: knows the repository and version of none of the {len(rows)} rows")
    return specs
