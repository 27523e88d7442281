"""Validates candidates: runs their tests before and after the fix several times, and tries reward hacks on them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from envs.context import EnvContext
from envs.swe.grading import with_verifiability
from envs.swe.pytest_log import parse_summary
from envs.swe.records import SweRecord
from envs.swe.sandboxes import TestRun, run_tests, sandbox_spec
from envs.swe.task_audit import audit_record
from envs.swe.task_synthesis.candidate import Candidate, CandidateRejected
from envs.swe.task_synthesis.issues import IssueWriter, failure_excerpts, issue_from_message
from envs.types import GradingError
from sandbox import SandboxError

REPEATS = 3
USAGE = 4
"""pytest's exit code for unknown options, for example from a project's addopts."""
_NETWORK = re.compile(
    r"Network is unreachable|Name or service not known|[Tt]emporary failure in name resolution"
    r"|Failed to establish a new connection|NewConnectionError|gaierror|getaddrinfo failed|URLError|ConnectError"
    r"|nodename nor servname"
)
_NO_MODULE = re.compile(r"No module named '?([\w.]+)")

Statuses = Mapping[str, str]


@dataclass(frozen=True)
class Validation:
    """Runs tests in sandboxes of ``context``. The candidates' site packages are in ``directory``."""

    context: EnvContext
    directory: Path
    writer: IssueWriter | None = None
    repeats: int = REPEATS

    async def validate(self, candidate: Candidate) -> SweRecord:
        """The verified record of a candidate. Raises ``CandidateRejected``, also if a sandbox breaks."""
        try:
            return await self._validate(candidate)
        except (SandboxError, GradingError) as error:
            raise CandidateRejected("sandbox or grading failed", str(error)[:300]) from None

    async def _validate(self, candidate: Candidate) -> SweRecord:
        record, fixed_run, fixed = await self._run_fixed(candidate.record)
        verbose = record.model_copy(update={"test_command": record.test_command.replace("--tb=no", "--tb=short")})
        first = await self._run(verbose, "")
        broken = _statuses(first)
        if not _failing_tests(fixed, broken):
            raise CandidateRejected(*_undetected_reason(fixed, broken, fixed_run))
        for decoy in candidate.decoys:
            if _failing_tests(fixed, _statuses(await self._run(record, decoy))) == ():
                raise CandidateRejected("the fix is not unique", "another change passes the same tests")
        befores = [broken, *[_statuses(await self._run(record, "")) for _ in range(self.repeats - 1)]]
        afters = [fixed, *[_statuses(await self._run(record, record.gold)) for _ in range(self.repeats - 1)]]
        expected = stable_tests(befores, afters)
        issue = candidate.issue or await self._issue(candidate, failure_excerpts(first.log))
        update = {
            "expected_output_json": json.dumps(dict.fromkeys(expected, "PASSED"), ensure_ascii=False),
            "execution_result_content": json.dumps({"old_commit_statuses": broken, "new_commit_statuses": fixed}),
            "problem_statement": f"[ISSUE]\n{issue}\n[/ISSUE]",
        }
        return await self._audited(record.model_copy(update=update))

    async def _issue(self, candidate: Candidate, failed: Sequence[str]) -> str:
        return await self.writer.write(candidate, failed) if self.writer else issue_from_message(candidate, failed)

    async def _run_fixed(self, record: SweRecord) -> tuple[SweRecord, TestRun, Statuses]:
        """The record with a command that pytest accepts, the run with the fix, and its statuses."""
        run = await self._run(record, record.gold)
        if run.result.exit_code == USAGE:
            record = record.model_copy(update={"test_command": without_addopts(record.test_command)})
            run = await self._run(record, record.gold)
        if not run.started:
            raise CandidateRejected("the patch does not apply", run.outcome)
        if run.result.timed_out:
            raise CandidateRejected("tests take too long", run.outcome)
        statuses = _statuses(run)
        if "PASSED" not in statuses.values():
            raise CandidateRejected(*_no_pass_reason(run))
        return record, run, statuses

    async def _run(self, record: SweRecord, patch: str) -> TestRun:
        return await run_tests(self.context, record, sandbox_spec(self.context, record, self.directory), patch)

    async def _audited(self, record: SweRecord) -> SweRecord:
        """The record marked verified if the audit finds no leak and no rewarded hack; else ``CandidateRejected``."""
        for finding in await audit_record(self.context, record, site_root=self.directory):
            if not finding.ok:
                raise CandidateRejected(f"audit: {finding.check}", finding.detail)
        return await with_verifiability(self.context, record.model_copy(update={"verified": True}), self.directory)


def without_addopts(command: str) -> str:
    """The command without the project's ``addopts``, which can name options of plugins that are not installed."""
    return command.replace("-m pytest ", "-m pytest -o addopts= ")


def _statuses(run: TestRun) -> Statuses:
    """The statuses of a run, empty if it timed out or has no summary."""
    return {} if run.result.timed_out else parse_summary(run.log) or {}


def _failing_tests(fixed: Statuses, broken: Statuses) -> tuple[str, ...]:
    """The tests that pass with the fix and do not pass in the ``broken`` state."""
    return tuple(test for test, status in fixed.items() if status == "PASSED" and broken.get(test) != "PASSED")


def stable_tests(befores: Sequence[Statuses], afters: Sequence[Statuses]) -> tuple[str, ...]:
    """The expected tests: they passed in every run with the fix and had a constant status without it.

    Raises ``CandidateRejected`` if none of them failed in every run without the fix.
    """
    passed = [test for test in afters[0] if all(run.get(test) == "PASSED" for run in afters)]
    detecting = [test for test in passed if all(run.get(test) != "PASSED" for run in befores)]
    if not detecting:
        raise CandidateRejected("flaky", "no test fails before the fix and passes after it in every run")
    flaky = [test for test in passed if len({run.get(test) for run in befores}) > 1]
    return tuple(test for test in passed if test not in flaky)


def _undetected_reason(fixed: Statuses, broken: Statuses, fixed_run: TestRun) -> tuple[str, str]:
    """Reason and detail for a fix that changes no test from failing to passing."""
    if _NETWORK.search(fixed_run.log):
        return "tests need a network", "the tests that pass without a network also pass before the fix"
    failing = sum(status in ("FAILED", "ERROR") for status in fixed.values())
    if failing and any(status != "PASSED" for status in broken.values()):
        return "tests fail with the fix", f"{failing} of {len(fixed)}"
    return "no test notices the fix", f"{len(fixed)} tests run"


def _no_pass_reason(run: TestRun) -> tuple[str, str]:
    """Reason and detail for a run with the fix in which no test passed."""
    if _NETWORK.search(run.log):
        return "tests need a network", ""
    if missing := _NO_MODULE.search(run.log):
        return "a module is missing", missing[1]
    if "collected 0 items" in run.log or "no tests ran" in run.log:
        return "no tests", ""
    return "tests do not run", run.outcome
