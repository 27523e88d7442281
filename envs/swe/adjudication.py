"""Decides whether to trust a run of the hidden tests, and who caused a run without results: the patch or the machine.

A run raises *doubts* where its log and the integrity monitor's report disagree or show tampering. A doubtful success is
compared with a *control run*: the hidden tests with the gold patch or, if the record has none, without a change.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path

from envs.context import EnvContext
from envs.swe.integrity import NO_REPORT
from envs.swe.pytest_log import TestVerdict, count_summaries, format_summary, judge_pytest_log
from envs.swe.records import SweRecord
from envs.swe.sandboxes import TestRun, run_tests, sandbox_spec
from envs.swe.swebench import format_swebench_log, judge_swebench_log
from envs.types import GradingError, UndecidableError

_MAX_DOUBTS = 10


@dataclass(frozen=True, slots=True)
class Adjudication:
    """A verdict, the doubts about the patch (one sentence each, at most 10), and the log of the patch's run."""

    verdict: TestVerdict
    doubts: Sequence[str] = ()
    log: str = ""


class ControlRuns:
    """Caches the doubts of each task's control run, so that one run serves all doubtful successes of the task."""

    def __init__(self) -> None:
        self._doubts: dict[str, tuple[str, ...]] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def doubts(
        self, record: SweRecord, run: Callable[[], Coroutine[None, None, tuple[str, ...]]]
    ) -> tuple[str, ...]:
        """Return the doubts of the record's control run; ``run`` makes it once. Errors of ``run`` are not cached."""
        async with self._locks[record.id]:
            if record.id not in self._doubts:
                self._doubts[record.id] = await run()
            return self._doubts[record.id]


async def adjudicate(
    context: EnvContext, record: SweRecord, patch: str, site_root: Path | None, control_runs: ControlRuns | None = None
) -> Adjudication:
    """Run the hidden tests with ``patch`` and decide what their result is worth.

    A failure is accepted as it is. A doubtful success, and a run without a verdict, are compared with the control run.
    Doubts that the control run raises too belong to the task; the remaining doubts belong to the patch and make the
    success a failure. ``control_runs`` caches the control run for later doubtful successes. A run without a verdict
    always gets a new control run, because that run must show that the machine can run the tests now.

    Raises ``GradingError`` if the control run has no verdict either or the gold patch does not resolve the task, and
    ``UndecidableError`` if the row itself is the cause.
    """
    case = _Case(context, record, site_root)
    run, verdict, doubts = await case.run(patch)
    if verdict is not None and not (verdict.resolved and doubts):
        return Adjudication(verdict, doubts[:_MAX_DOUBTS], run.log)
    if patch == record.gold:
        if verdict is None:
            raise _no_verdict_error(run, f"task {record.id}: no verdict ({run.outcome}) in the run {case.control}")
        return Adjudication(verdict, log=run.log)
    if verdict is None:
        own_doubts = _subtract(doubts, await _run_control(case, run, None))
        return Adjudication(TestVerdict(False, {}, run.outcome), own_doubts, run.log or run.outcome)
    cache = control_runs or ControlRuns()
    own_doubts = _subtract(doubts, await cache.doubts(record, lambda: _run_control(case, run, verdict)))
    return Adjudication(
        TestVerdict(False, verdict.tests, own_doubts[0]) if own_doubts else verdict, own_doubts, run.log
    )


@dataclass(frozen=True, slots=True)
class _Case:
    """The inputs that all runs of one adjudication share."""

    context: EnvContext
    record: SweRecord
    site_root: Path | None

    @property
    def control(self) -> str:
        """The patch of the control run, in words."""
        return "with the gold patch" if self.record.gold else "without a change"

    async def run(self, patch: str) -> tuple[TestRun, TestVerdict | None, tuple[str, ...]]:
        """Run the tests and return the run, its verdict and its doubts. A thread reads the logs, which are long."""
        run = await run_tests(self.context, self.record, sandbox_spec(self.context, self.record, self.site_root), patch)
        verdict = await asyncio.to_thread(judge_run, self.record, run)
        return run, verdict, await asyncio.to_thread(_find_doubts, self.record, run, verdict)


def _subtract(doubts: Sequence[str], control_doubts: Sequence[str]) -> tuple[str, ...]:
    return tuple(doubt for doubt in doubts if doubt not in control_doubts)[:_MAX_DOUBTS]


def judge_run(record: SweRecord, run: TestRun) -> TestVerdict | None:
    """The verdict on a run, or None if it has none. A run that timed out has none, whatever it printed."""
    if not run.started or run.result.timed_out:
        return None
    return _judge_log(record, run.log)


def _judge_log(record: SweRecord, log: str) -> TestVerdict | None:
    if record.swebench is not None:
        return judge_swebench_log(record, log)
    return judge_pytest_log(log, record.expected, record.key_mode)


def _find_doubts(record: SweRecord, run: TestRun, verdict: TestVerdict | None) -> tuple[str, ...]:
    """The observations about a run that no honest patch causes.

    Doubts are compared between runs, so they contain no number that differs from run to run.
    """
    if verdict is None:
        is_silent = run.started and run.result.exit_code == 0 and not run.result.timed_out
        return ("the test run ended with exit code 0 and no results",) if is_silent else ()
    # Only SWE-smith's rules allow a success without some tests: it counts a missing test as passed.
    absent = [f"{test}: not in the log" for test in record.expected if record.swebench and test not in verdict.tests]
    if not run.monitored:
        return tuple(absent)
    if run.report is None:
        return (NO_REPORT, *absent)
    several = ("the log holds several test summaries",) if count_summaries(run.log) > 1 else ()
    # The report is formatted as a log, so that both go through the same name truncation and merging.
    lines = [f"{status} {test}" for test, status in run.report.statuses.items()]
    reported = _judge_log(record, format_swebench_log(lines) if record.swebench else format_summary(lines))
    differing = [
        test for test in record.expected if reported is None or reported.tests.get(test) != verdict.tests.get(test)
    ]
    differences = [f"{test}: the summary and the test run's own report differ" for test in differing]
    return (*run.report.tampering, *several, *absent, *differences)


async def _run_control(case: _Case, patched: TestRun, verdict: TestVerdict | None) -> tuple[str, ...]:
    """Make the control run and return its doubts.

    ``patched`` and ``verdict`` are the patch's run and its verdict; error messages name them. Raises ``GradingError``
    if the control run has no verdict or the gold patch does not resolve the task.
    """
    run, control_verdict, doubts = await case.run(case.record.gold)
    if control_verdict is not None and (control_verdict.resolved or not case.record.gold):
        return doubts
    finding = f"task {case.record.id}: {'a doubtful success' if verdict else 'no verdict'} ({patched.outcome})"
    control_outcome = control_verdict.difference if control_verdict else run.outcome
    message = f"{finding}; the control run {case.control} failed ({control_outcome})"
    raise GradingError(message) if verdict or control_verdict else _no_verdict_error(run, message)


def _no_verdict_error(control: TestRun, message: str) -> GradingError:
    """The error for a control run without a verdict. The row is the cause if the run ended without being cut off."""
    return UndecidableError(message) if control.ended_normally else GradingError(message)
