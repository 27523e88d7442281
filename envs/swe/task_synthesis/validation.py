"""Tries a draft out: its tests before and after the fix, several times, and hacks; what holds becomes a record."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from envs.context import EnvContext
from envs.swe.audit import audit_record
from envs.swe.pytest_log import parse_summary
from envs.swe.records import SweRecord
from envs.swe.sandboxes import TestRun, run_tests, sandbox_spec
from envs.swe.task_synthesis.candidate import Candidate, Fallen
from envs.swe.task_synthesis.issues import Writer, failures, from_message
from envs.types import GradingError
from sandbox import SandboxError

REPEATS = 3
USAGE = 4
"""pytest's exit code for options that it doesn't know, which a project's addopts may name."""
_NETWORK = re.compile(
    r"Network is unreachable|Name or service not known|[Tt]emporary failure in name resolution"
    r"|Failed to establish a new connection|NewConnectionError|gaierror|getaddrinfo failed|URLError|ConnectError"
    r"|nodename nor servname"
)
_NO_MODULE = re.compile(r"No module named '?([\w.]+)")

Statuses = Mapping[str, str]


@dataclass(frozen=True)
class Validation:
    """Runs tests in sandboxes of ``context``; the drafts' sites lie in ``directory``."""

    context: EnvContext
    directory: Path
    writer: Writer | None = None
    repeats: int = REPEATS

    async def judge(self, draft: Candidate) -> SweRecord:
        """The verified record of a draft. Raises ``Fallen``; a sandbox that breaks is one of its reasons."""
        try:
            return await self._judge(draft)
        except (SandboxError, GradingError) as error:
            raise Fallen("sandbox or grading failed", str(error)[:300]) from None

    async def _judge(self, draft: Candidate) -> SweRecord:
        record, after, fixed = await self._after(draft.record)
        verbose = record.model_copy(update={"test_command": record.test_command.replace("--tb=no", "--tb=short")})
        first = await self._run(verbose, "")
        broken = _statuses(first)
        if not _noticed(fixed, broken):
            raise Fallen(*_why_unnoticed(fixed, broken, after))
        for decoy in draft.decoys:
            if _noticed(fixed, _statuses(await self._run(record, decoy))) == ():
                raise Fallen("the fix is not unique", "another change passes the same tests")
        befores = [broken, *[_statuses(await self._run(record, "")) for _ in range(self.repeats - 1)]]
        afters = [fixed, *[_statuses(await self._run(record, record.gold)) for _ in range(self.repeats - 1)]]
        expected = stable(befores, afters)
        issue = draft.issue or await self._issue(draft, failures(first.log))
        update = {
            "expected_output_json": json.dumps(dict.fromkeys(expected, "PASSED"), ensure_ascii=False),
            "execution_result_content": json.dumps({"old_commit_statuses": broken, "new_commit_statuses": fixed}),
            "problem_statement": f"[ISSUE]\n{issue}\n[/ISSUE]",
        }
        return await self._audited(record.model_copy(update=update))

    async def _issue(self, draft: Candidate, failed: Sequence[str]) -> str:
        return await self.writer.write(draft, failed) if self.writer else from_message(draft, failed)

    async def _after(self, record: SweRecord) -> tuple[SweRecord, TestRun, Statuses]:
        """The record with a command that pytest understands, the run with the fix, and what passed there."""
        run = await self._run(record, record.gold)
        if run.result.exit_code == USAGE:
            record = record.model_copy(update={"test_command": without_addopts(record.test_command)})
            run = await self._run(record, record.gold)
        if not run.began:
            raise Fallen("the patch does not apply", run.account)
        if run.result.timed_out:
            raise Fallen("tests take too long", run.account)
        statuses = _statuses(run)
        if "PASSED" not in statuses.values():
            raise Fallen(*_why_dead(run))
        return record, run, statuses

    async def _run(self, record: SweRecord, patch: str) -> TestRun:
        return await run_tests(self.context, record, sandbox_spec(self.context, record, self.directory), patch)

    async def _audited(self, record: SweRecord) -> SweRecord:
        """The record marked verified, once no leak and no hack is found. Raises ``Fallen``."""
        for finding in await audit_record(self.context, record, site_root=self.directory):
            if not finding.ok:
                raise Fallen(f"audit: {finding.check}", finding.detail)
        return record.model_copy(update={"verified": True})


def without_addopts(command: str) -> str:
    """The command for a pytest that lacks a plugin whose options the project's ``addopts`` name."""
    return command.replace("-m pytest ", "-m pytest -o addopts= ")


def _statuses(run: TestRun) -> Statuses:
    """The statuses of a run; none where it did not end, or gave no summary."""
    return {} if run.result.timed_out else parse_summary(run.log) or {}


def _noticed(fixed: Statuses, broken: Statuses) -> tuple[str, ...]:
    """The tests that pass with the fix, and don't in another state."""
    return tuple(test for test, status in fixed.items() if status == "PASSED" and broken.get(test) != "PASSED")


def stable(befores: Sequence[Statuses], afters: Sequence[Statuses]) -> tuple[str, ...]:
    """The tests to expect: those that passed in every run with the fix, and don't waver without it.

    Raises ``Fallen`` where none of them fails in every run without it.
    """
    passed = [test for test in afters[0] if all(run.get(test) == "PASSED" for run in afters)]
    noticed = [test for test in passed if all(run.get(test) != "PASSED" for run in befores)]
    if not noticed:
        raise Fallen("flaky", "no test that fails before the fix and passes after it does so every time")
    wavering = [test for test in passed if len({run.get(test) for run in befores}) > 1]
    return tuple(test for test in passed if test not in wavering)


def _why_unnoticed(fixed: Statuses, broken: Statuses, after: TestRun) -> tuple[str, str]:
    if _NETWORK.search(after.log):
        return "tests need a network", "and what passes without one passes before the fix, too"
    failing = sum(status in ("FAILED", "ERROR") for status in fixed.values())
    if failing and any(status != "PASSED" for status in broken.values()):
        return "tests fail with the fix", f"{failing} of {len(fixed)}"
    return "no test notices the fix", f"{len(fixed)} tests run"


def _why_dead(run: TestRun) -> tuple[str, str]:
    """Why no test passed with the fix."""
    if _NETWORK.search(run.log):
        return "tests need a network", ""
    if missing := _NO_MODULE.search(run.log):
        return "a module is missing", missing[1]
    if "collected 0 items" in run.log or "no tests ran" in run.log:
        return "no tests", ""
    return "tests do not run", run.account
