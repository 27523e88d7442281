"""An account of the hidden tests' run that the summary on the screen is checked against.

Anything may print a line that looks like pytest's. So a plugin watches from inside pytest (:mod:`.witness_plugin`) and
writes a report, sealed with a password, to a place named by a random number; its source and its orders, where the
password stands, are emptied as soon as they are read. Code that prints a summary and exits leaves no report; code that
replaces functions of pytest or unittest, rewrites a hidden test or swaps its code, sets a trace or profile function,
reports a test that never ran, shadows a module or brings a plugin is named in it.

What it can't see: code under test that returns objects which compare equal to everything, or that knows this module and
goes for its memory. Tests share one process with what they test.
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
from envs.swe.pytest_log import worst
from sandbox import Sandbox, SandboxFileError

MAX_REPORT_BYTES = 4 << 20
_SEAL_BYTES = 65
NO_REPORT = "the test run left no report of its own beside its summary"


@dataclass(frozen=True, slots=True)
class Report:
    """What the plugin saw. ``outcomes`` are (node id, status) of every phase that has one, in their order."""

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
        found: dict[str, str] = {}
        for test, status in self.outcomes:
            found[test] = worst(status, found.get(test, status))
        return found

    @property
    def tampering(self) -> tuple[str, ...]:
        """What was done to the tests' surroundings, one sentence a thing."""
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
    """One run's plugin: a directory in the sandbox with a name nobody can know beforehand. ``watched`` are the paths
    of the hidden tests (files or directories), relative to the working directory."""

    watched: Sequence[str]
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    password: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def _directory(self) -> str:
        return f"/tmp/{self.token}"

    def files(self) -> Mapping[str, bytes]:
        """What has to lie in the sandbox before the tests run: absolute path -> content."""
        order = {
            "report": f"{self._directory}/report.json",
            "password": self.password,
            "places": self.watched,
            "modules": sorted(IMPORTED_BY_TESTS),
        }
        return {
            f"{self._directory}/w{self.token}.py": _plugin(),
            f"{self._directory}/order.json": json.dumps(order).encode(),
        }

    @property
    def exports(self) -> str:
        """Bash that makes pytest load the plugin, whatever script starts it."""
        return (
            f'export PYTHONPATH="{self._directory}${{PYTHONPATH:+:$PYTHONPATH}}"\n'
            f'export PYTEST_ADDOPTS="-p w{self.token} $PYTEST_ADDOPTS"\n'
        )

    async def read(self, sandbox: Sandbox) -> Report | None:
        """The report, or None where there is none, or none of the plugin's."""
        try:
            content = await sandbox.read_file(f"{self._directory}/report.json", max_bytes=MAX_REPORT_BYTES)
        except SandboxFileError:
            return None
        return await asyncio.to_thread(self.opened, content)

    def seal(self, report: bytes) -> bytes:
        """What the plugin writes: the report after a line that only who knows the password can make."""
        return hmac.new(self.password.encode(), report, "sha256").hexdigest().encode() + b"\n" + report

    def opened(self, content: bytes) -> Report | None:
        """The report of a file that was sealed with the password; nothing else is parsed."""
        report = content[_SEAL_BYTES:]
        if not hmac.compare_digest(self.seal(report), content):
            return None
        try:
            return _REPORT.validate_json(report)
        except ValidationError:
            return None


@cache
def _plugin() -> bytes:
    return (Path(__file__).parent / "integrity_plugin.py").read_bytes()
