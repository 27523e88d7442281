"""The integrity monitor: a report on the hidden tests' run that the printed summary is checked against.

Any code can print lines that look like pytest's summary. Therefore a plugin inside pytest (:mod:`.integrity_plugin`)
writes a report to a randomly named file, sealed with a password. The plugin empties its source and its settings, which
contain the password, after reading them. Code that prints a summary and exits leaves no report. The report names code
that replaces functions of pytest or unittest, rewrites a hidden test or swaps its code, sets a trace or profile
function, reports a test that never ran, shadows a module or adds a plugin.

Limits: the tests share a process with the code under test. The monitor does not detect objects that compare equal to
everything, or code that is written to change the monitor's memory.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from envs.swe.diff.git_diff import IMPORTED_BY_TESTS
from envs.swe.pytest_log import worst_status
from sandbox import Sandbox, SandboxFileError

MAX_REPORT_BYTES = 4 << 20
_SEAL_BYTES = 65
NO_REPORT = "the test run left no report of its own beside its summary"


@dataclass(frozen=True, slots=True)
class Report:
    """The plugin's report. ``outcomes`` are the (node id, status) of all test phases with a status, in order."""

    outcomes: Sequence[tuple[str, str]]
    changed: Sequence[str] = ()
    replaced: Sequence[str] = ()
    shadowed: Sequence[str] = ()
    plugins: Sequence[str] = ()
    swapped: Sequence[str] = ()
    traced: Sequence[str] = ()
    uncalled: Sequence[str] = ()

    @property
    def statuses(self) -> dict[str, str]:
        """The worst status of each test by its node id."""
        statuses: dict[str, str] = {}
        for test, status in self.outcomes:
            statuses[test] = worst_status(status, statuses.get(test, status))
        return statuses

    @property
    def tampering(self) -> tuple[str, ...]:
        """The detected manipulations, one sentence each."""
        return (
            *(f"{path}: hidden test changed while the tests ran" for path in self.changed),
            *(f"{name}: replaced by the code under test" for name in self.replaced),
            *(f"{name}: imported from the repository instead of from Python" for name in self.shadowed),
            *(f"{path}: a pytest plugin from the repository" for path in self.plugins),
            *(f"{name}: its code was swapped while the tests ran" for name in self.swapped),
            *(f"{name}: called while the tests ran" for name in self.traced),
            *(f"{test}: reported, but never run" for test in self.uncalled),
        )


_REPORT = TypeAdapter(Report)


@dataclass(frozen=True, slots=True)
class IntegrityMonitor:
    """The plugin of one run, in a sandbox directory with an unpredictable name.

    ``watched`` are the paths of the hidden tests (files or directories), relative to the working directory.
    """

    watched: Sequence[str]
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    password: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def _directory(self) -> str:
        return f"/tmp/{self.token}"

    def files(self) -> Mapping[str, bytes]:
        """The files to write into the sandbox before the tests run: absolute path -> content."""
        settings = {
            "report": f"{self._directory}/report.json",
            "password": self.password,
            "watched_paths": self.watched,
            "modules": sorted(IMPORTED_BY_TESTS),
        }
        return {
            f"{self._directory}/w{self.token}.py": _plugin_source(),
            f"{self._directory}/settings.json": json.dumps(settings).encode(),
        }

    @property
    def exports(self) -> str:
        """Bash that makes any pytest process load the plugin."""
        return (
            f'export PYTHONPATH="{self._directory}${{PYTHONPATH:+:$PYTHONPATH}}"\n'
            f'export PYTEST_ADDOPTS="-p w{self.token} $PYTEST_ADDOPTS"\n'
        )

    async def read(self, sandbox: Sandbox) -> Report | None:
        """Read the report. None if it is missing or not sealed by the plugin."""
        try:
            content = await sandbox.read_file(f"{self._directory}/report.json", max_bytes=MAX_REPORT_BYTES)
        except SandboxFileError:
            return None
        return await asyncio.to_thread(self.unseal, content)

    def seal(self, report: bytes) -> bytes:
        """The file that the plugin writes: a line with the report's HMAC under the password, then the report."""
        return hmac.new(self.password.encode(), report, "sha256").hexdigest().encode() + b"\n" + report

    def unseal(self, content: bytes) -> Report | None:
        """The report in a sealed file, or None. Content with a wrong seal is not parsed."""
        report = content[_SEAL_BYTES:]
        if not hmac.compare_digest(self.seal(report), content):
            return None
        try:
            return _REPORT.validate_json(report)
        except ValidationError:
            return None


@cache
def _plugin_source() -> bytes:
    return (Path(__file__).parent / "integrity_plugin.py").read_bytes()
