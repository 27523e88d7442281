"""Whether to believe a run of the hidden tests, and who is to blame for one that says nothing: patch or machine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from envs.context import EnvContext
from envs.swe.boxes import TestRun, box_spec, run_apart, run_tests
from envs.swe.pytest_log import AmbiguousTestsError, Verdict, as_summary, count_summaries, judge
from envs.swe.records import SweRecord
from envs.swe.swebench import as_log, read_log
from envs.swe.witness import NO_REPORT
from envs.types import GradingError
from sandbox import SandboxSpec


@dataclass(frozen=True, slots=True)
class Ruling:
    """A verdict, what speaks against the patch's honesty (one sentence a doubt), and the log of the patch's run."""

    verdict: Verdict
    doubts: Sequence[str] = ()
    log: str = ""


async def rule(context: EnvContext, record: SweRecord, patch: str, site_root: Path | None) -> Ruling:
    """Run the hidden tests with ``patch`` and rule on what they say.

    A failure is believed as it stands. A success in doubt, and a run without a verdict, are measured against the gold
    patch's run, or, where the record has none, against a run without a change: doubts that it raises too are the
    task's own manner, the others are the patch's. A success of a record with ``isolated`` tests must hold for these
    where they run apart from the code. Raises ``GradingError`` where that run has no verdict either, or the gold patch
    is not resolved.
    """
    ruling = await _rule(_Case(context, record, site_root, run_tests), patch)
    if not (record.isolated and ruling.verdict.resolved):
        return ruling
    apart = await _rule(_Case(context, record.alone(), site_root, run_apart), patch)
    if apart.verdict.resolved:
        return ruling
    doubt = f"{apart.verdict.difference}, where the tests run apart from the code"
    return Ruling(Verdict(False, ruling.verdict.tests, doubt), (*ruling.doubts, *apart.doubts, doubt), apart.log)


class _RunsTests(Protocol):
    def __call__(
        self, context: EnvContext, record: SweRecord, spec: SandboxSpec, patch: str
    ) -> Coroutine[None, None, TestRun]: ...


@dataclass(frozen=True, slots=True)
class _Case:
    """What is the same in all runs that a patch is ruled on by."""

    context: EnvContext
    record: SweRecord
    site_root: Path | None
    tests: _RunsTests

    async def run(self, patch: str) -> tuple[TestRun, Verdict | None, tuple[str, ...]]:
        """A run, its verdict, and the doubts that it raises. Logs are long: they are read in a thread."""
        run = await self.tests(self.context, self.record, box_spec(self.context, self.record, self.site_root), patch)
        verdict = await asyncio.to_thread(read_run, self.record, run)
        return run, verdict, await asyncio.to_thread(_doubts, self.record, run, verdict)


async def _rule(case: _Case, patch: str) -> Ruling:
    record = case.record
    try:
        run, verdict, doubts = await case.run(patch)
    except AmbiguousTestsError as error:
        await _control(case, patch, f"task {record.id}: {error}")  # raises where it is the row's
        return Ruling(Verdict(resolved=False, tests={}, difference=str(error)), (str(error),), str(error))
    if verdict is not None and not (verdict.resolved and doubts):
        return Ruling(verdict, doubts, run.log)
    if verdict is not None and patch == record.gold:
        return Ruling(verdict, log=run.log)
    what = "no verdict" if verdict is None else "a success in doubt"
    known = await _control(case, patch, f"task {record.id}: {what} ({run.account})")
    own = tuple(doubt for doubt in doubts if doubt not in known)
    if verdict is None:
        return Ruling(Verdict(resolved=False, tests={}, difference=run.account), own, run.log or run.account)
    return Ruling(Verdict(False, verdict.tests, own[0]) if own else verdict, own, run.log)


def read_run(record: SweRecord, run: TestRun) -> Verdict | None:
    """The verdict on a run, or None where it says nothing. A run that was cut off says nothing, whatever it printed."""
    if not run.began or run.result.timed_out:
        return None
    return _read(record, run.log)


def _read(record: SweRecord, log: str) -> Verdict | None:
    if record.swebench is not None:
        return read_log(record, log)
    return judge(log, record.expected, "node" if record.is_local else "name")


def _doubts(record: SweRecord, run: TestRun, verdict: Verdict | None) -> tuple[str, ...]:
    """What about a run an honest patch does not bring about, as far as its report tells."""
    if verdict is None:
        quiet = run.began and run.result.exit_code == 0 and not run.result.timed_out
        return ("the test run ended with exit code 0 and no results",) if quiet else ()
    if not run.witnessed:
        return ()
    if run.report is None:
        return (NO_REPORT,)
    summaries = count_summaries(run.log)
    several = (f"the log holds {summaries} test summaries",) if summaries > 1 else ()
    # The report goes the way of the log, so that names are cut and grouped the same way.
    lines = [f"{status} {test}" for test, status in run.report.statuses.items()]
    seen = _read(record, as_log(lines) if record.swebench else as_summary(lines))
    differing = [test for test in record.expected if seen is None or seen.tests.get(test) != verdict.tests.get(test)]
    differences = [f"{test}: the summary and the test run's own report differ" for test in differing[:3]]
    return (*run.report.tampering, *several, *differences)


async def _control(case: _Case, patch: str, what: str) -> tuple[str, ...]:
    """The doubts that the run raises which a patch is compared with: the gold patch's, or that of no change.

    Raises ``GradingError`` where that says nothing, ``what`` happened to the patch being its beginning.
    """
    record = case.record
    with_gold = "with the gold patch" if record.gold else "without a change"
    if patch == record.gold:
        raise GradingError(f"{what}, and it is the run {with_gold}")
    control, verdict, doubts = await case.run(record.gold)
    if verdict is None or (record.gold and not verdict.resolved):
        why = control.account if verdict is None else verdict.difference
        raise GradingError(f"{what}, nor {with_gold} ({why})")
    return doubts
