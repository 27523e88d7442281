"""The files of a repository that belong to its tests: conftests, plugins, helpers and data.

A run with the gold patch is traced: which file of the repository was opened, by which code. Grading leaves out a
patch's changes to files that only the tests use, unless the gold patch changes them too.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from envs.swe.diff.git_diff import is_test_path
from sandbox import Sandbox, SandboxFileError

_MAX_BYTES = 8 << 20
_PLUGIN = Path(__file__).with_name("trace_plugin.py").read_bytes()


@dataclass(frozen=True, slots=True)
class Trace:
    """The trace of one run, in a sandbox directory with an unpredictable name."""

    directory: str = field(default_factory=lambda: f"/tmp/{secrets.token_hex(8)}")

    def files(self) -> Mapping[str, bytes]:
        """The files to write into the sandbox before the run: absolute path -> content."""
        return {f"{self.directory}/sitecustomize.py": _PLUGIN}

    @property
    def exports(self) -> str:
        """Bash that makes any Python process load the plugin."""
        return f'export PYTHONPATH="{self.directory}${{PYTHONPATH:+:$PYTHONPATH}}"\n'

    async def read(self, sandbox: Sandbox) -> frozenset[str]:
        """The files of the test side."""
        try:
            content = await sandbox.read_file(f"{self.directory}/trace", max_bytes=_MAX_BYTES)
        except SandboxFileError:
            return frozenset()
        return test_side([json.loads(line) for line in content.splitlines()])


def test_side(opened: Collection[tuple[str, str, bool]]) -> frozenset[str]:
    """The test side among opened files: (path, the file whose code opened it, whether it looks like a test helper).

    It has what the test runner itself opened, such as plugins; and what files of the test side opened, except code that
    does not look like a helper: that is the code under test.
    """
    side: set[str] = set()
    for path, opener, is_helper in opened:
        by_test = not opener or opener in side or is_test_path(opener)
        if is_test_path(path) or (by_test and (is_helper or not opener or not path.endswith(".py"))):
            side.add(path)
    return frozenset(side)


test_side.__test__ = False  # type: ignore[attr-defined]
